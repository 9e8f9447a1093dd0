"""Compile a microbatch of 1.5B with and without trees for an H100, and write what each does.

    python experiments/2026-12-shared-prefixes/compiled.py   # JAX's CUDA plugin, and no GPU

`plain` has the samples of a group in rows, `trees` a group in each row; a microbatch has about 16k
tokens of the model in both. Figures are those of a group: a microbatch's over its groups.
Attention's FLOPs are those of what tokens see, because the program does not say it.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rlx.run import compile_for

compile_for.set_up(os.environ)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from experiments.bench.train_step_workers import MODELS, make_config  # noqa: E402
from rlx.doctor import gpu_program  # noqa: E402
from rlx.doctor.gpu_cards import CARDS  # noqa: E402
from rlx.train import device_programs, prefix_trees  # noqa: E402
from rlx.train.packing import power_of_two  # noqa: E402
from rlx.train.train_options import TrainOptions  # noqa: E402

SAMPLES, BUDGET, CHUNK = 8, 18_432, 1024
CASES = ((2048, 128), (4096, 512))
MODEL, CARD = MODELS["1.5b"], CARDS["h100"]


class TreeShapes(device_programs.ShapesUpdate):
    """A trainer whose rows hold a group's tree each; the loss has its own rows."""

    loss_tokens = 0

    def _batch(self, row_length: int, num_segments: int) -> dict:
        rows = self._token_budget // row_length
        plain = super()._batch(row_length, num_segments)
        batch = {}
        for name, x in plain.items():
            shape = (rows, self.loss_tokens) if x.shape == (rows, row_length) else x.shape
            batch[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
        for name in prefix_trees.INPUTS:
            length = self.loss_tokens if name == "sources" else row_length
            place = plain["tokens"].sharding
            batch[name] = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=place)
        return batch


def sides(prompt: int, answer: int) -> Iterator[tuple[str, int, float, int, float]]:
    """Yield names, tokens of a row, groups of a microbatch, the loss's row, and pairs of a group.

    Pairs are those of queries and keys that see each other.
    """
    whole, tree = prompt + answer, prompt + SAMPLES * answer
    yield "plain", whole, BUDGET // whole / SAMPLES, 0, SAMPLES * whole**2 / 2
    read, least = SAMPLES * (answer + 1), tree // 64
    loss = min(power_of_two(read, least), power_of_two(read, 3 * least))
    pairs = prompt**2 / 2 + SAMPLES * (answer * prompt + answer**2 / 2)
    yield "trees", tree, BUDGET // tree, loss, pairs


def measure(
    devices: list, name: str, row: int, groups: float, loss: int, pairs: float, asked: int
) -> dict:
    """Return what a compiled microbatch, without AdamW, does for a group."""
    config = make_config({
        "budget": BUDGET, "row_buckets": (row,), "compute_dtype": "bfloat16",
        "remat": "attention", "chunk": CHUNK,
    })  # fmt: skip
    kind = TreeShapes if loss else device_programs.ShapesUpdate
    trainer = kind(MODEL, TrainOptions.of(config), devices)
    trainer.loss_tokens = loss
    begun = time.monotonic()
    lowered = next(trainer.lowered(row, accumulates=True, num_segments=16 if loss else 4))
    compiled = lowered.program.compile()
    planned = device_programs.planned_bytes(compiled.memory_analysis()) + lowered.beside
    text = compiled.as_text()
    chunks = -(-int(groups * asked) // CHUNK)
    reading = gpu_program.read(text, trips=(chunks, chunks))
    reading.attention_flops = groups * pairs * 14 * MODEL.num_layers * MODEL.num_heads
    reading.attention_flops *= MODEL.head_dim  # 2 products forward, 5 backward
    slow, fast = (reading.seconds(CARD, r) for r in (compile_for.SLOW, compile_for.FAST))
    more = {}
    if loss:  # seven levels of forks, as an agent's tree of eight turns has
        deep = gpu_program.read(text.replace("/trips_1/", "/trips_7/"), trips=(chunks, chunks))
        deep.attention_flops = reading.attention_flops
        more = {"seven_levels": round(deep.seconds(CARD, compile_for.FAST) / fast, 3)}
    return {
        "side": name, "rows": [BUDGET // row, row], "loss_row": loss or row, "groups": groups,
        "planned_gb": round(planned / 1e9, 1),
        "tflop": round((reading.flops + reading.attention_flops) / groups / 1e12, 2),
        "moved_gb": round(reading.moved / groups / 1e9, 1),
        "milliseconds": [round(1e3 * t / groups, 1) for t in (fast, slow)],
        "calls": {k: n for k, n in reading.calls.items() if "cudnn" in k},
        "row_by_row": f"{row},{row}" in text, **more,
        "compiled_in": round(time.monotonic() - begun),
    }  # fmt: skip


def main() -> None:
    """Print a JSON line for each case and side, and write them next to this file."""
    found = []
    with device_programs.gpus(CARD.target(), 1, 1) as devices:
        for prompt, answer in CASES:
            for side in sides(prompt, answer):
                row = measure(devices, *side, asked=SAMPLES * answer)
                found.append({"case": f"{prompt}+{answer}", **row})
                print(json.dumps(found[-1]), flush=True)
    path = Path(__file__).with_suffix(".json")
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))


if __name__ == "__main__":
    main()
