"""Part `step_*` for trainer=torch: its update of 1.5B (GRPO, AdamW, bfloat16, float32 masters).

    utilisation = the step's model FLOPs / seconds / peak FLOP/s

The seconds include packing the batch on the host.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bench.plain_torch import init
from experiments.bench.train_step_workers import MODELS, make_config, make_groups, qwen2
from rlx.doctor.gpu_cards import peak_flops
from rlx.train.train_options import TrainOptions
from rlx_torch.update import TorchUpdate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = qwen2(512, 2, 64, 4, 2, 160)


def device() -> dict[str, Any]:
    """Return the device's name and its peak, bfloat16 FLOP/s; None if unknown."""
    kind = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    peak = peak_flops(kind, "bfloat16") or None
    platform = "gpu" if DEVICE == "cuda" else "cpu"
    return {"kind": kind, "platform": platform, "torch": torch.__version__, "flops": peak}


def segment_lengths(rows: int, length: int) -> list[int]:
    """Return the lengths of each row's segments, in tokens: ½, ¼, ⅛ and ⅛ of it."""
    return [length // n for n in (2, 4, 8, 8)] * rows


def run(o: dict[str, Any]) -> dict[str, Any]:
    """Return seconds, utilisation and peak memory of the step."""
    model, found = TINY if o["tiny"] else MODELS["1.5b"], device()
    sizes = np.array(segment_lengths(o["rows"], o["length"]))
    lengths = np.stack([sizes // 8, sizes - sizes // 8], 1)
    config = make_config({
        "budget": o["rows"] * o["length"], "row_buckets": (o["length"],), "chunk": o["chunk"],
        "compute_dtype": "bfloat16", "remat": o["remat"],
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        init(model).save_pretrained(directory)
        update = TorchUpdate(model, TrainOptions.of(config), Path(directory))
        state = update.init()
    groups, taken = make_groups(lengths, model.vocab_size, samples=4), []
    for _ in range(2 if o["tiny"] else 6):
        start = time.perf_counter()
        state, metrics = update.update(state, groups)
        dict(metrics)  # waits for the device
        taken.append(time.perf_counter() - start)
    seconds, useful = statistics.median(taken[1:]), metrics["model_flops"]
    return {
        "model": "tiny" if o["tiny"] else "1.5b",
        "rows": o["rows"], "length": o["length"], "remat": o["remat"], "chunk": o["chunk"],
        "seconds": seconds,
        "tokens_per_second": float(sizes.sum()) / seconds,
        "utilisation": useful / seconds / found["flops"] if found["flops"] else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    share, peak = result["utilisation"], result["peak_bytes"]
    used = f"utilisation {100 * share:.1f} %" if share else "utilisation unknown"
    memory = f", peak {peak / 1e9:.1f} GB" if peak else ""
    return [
        f"{result['model']}, {result['rows']} × {result['length']} tokens, remat "
        f"{result['remat']}: {used}, {result['tokens_per_second']:.0f} tokens/s, "
        f"{1e3 * result['seconds']:.1f} ms a step{memory}"
    ]
