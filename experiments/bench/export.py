"""Time moving the policy's weights from the trainer to the host, and to a file for the fleet.

    python -m experiments.bench.export                  # both shapes, about five minutes
    python -m experiments.bench.export --dry            # the smallest sizes

Shapes: Qwen2.5-0.5B whole, and two of 7B's layers with a small vocabulary. Masters are float32. The
baseline is numpy on the host, with one thread that transposes and casts one tensor after the other.

  host   until all tensors are on the host
  file   until a safetensors file and its checksum are in /dev/shm
  stall  how long the trainer's thread cannot begin its next update; another thread reads buckets

Both ways run in turns, and their bytes are compared. The first round compiles and does not count.
Figures are medians [quartiles].
"""

import argparse
import dataclasses
import itertools
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from experiments.bench.process import median_spread
from experiments.bench.train_step_workers import MODELS
from rlx.fleet import publish
from rlx.model import params as parameters
from rlx.model.buckets import export
from rlx.model.tensors import BUCKET, Buckets
from rlx.run.export import hand_over
from rlx.system.process_settings import keep_freed_memory

SHAPES = {
    "0.5B": MODELS["0.5b"],
    "7B, 2 layers": dataclasses.replace(
        MODELS["0.5b"], vocab_size=4096, num_layers=2, model_dim=3584, mlp_dim=18_944,
        num_heads=28, num_kv_heads=4, head_dim=128,
    ),
}  # fmt: skip


def by_the_host(params, rows, dtype) -> Buckets:
    """Return all tensors in HF's layout, made by numpy."""
    tensors = {}
    for row in rows:
        value = np.asarray(parameters.leaf(params, row))
        for name, part in zip(row.names, value if row.stacked else [value], strict=True):
            part = part.T if row.transposed else part
            tensors[name] = np.ascontiguousarray(part, dtype=np.dtype(dtype))
    return Buckets.of(tensors)


WAYS = {"numpy": by_the_host, "device": export}


def measured(make, params, rows, dtype, room: str, pool) -> tuple[list[float], int]:
    """Return the seconds to the host, to a file, and of stall, and the file's checksum."""
    start = time.perf_counter()
    for bucket in make(params, rows, dtype):
        for tensor in bucket.values():
            np.asarray(tensor)
        del bucket, tensor
    host = time.perf_counter() - start
    start = time.perf_counter()

    def send(tensors):
        return pool.submit(publish.stage, 1, tensors, "path", room)

    sent = hand_over(make(params, rows, dtype), send)
    stall = time.perf_counter() - start
    staged = sent.result()
    file = time.perf_counter() - start
    staged.close()
    return [host, file, stall], staged.crc32


def main() -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--room", default="/dev/shm")
    p.add_argument("--dry", action="store_true", help="figures mean nothing")
    args = p.parse_args()
    keep_freed_memory()  # as in a run: first use of a page costs as much as a transpose
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"jax {jax.__version__} on {cores} cores, load {load:.1f}; buckets of {BUCKET >> 20} MiB")
    print("\n| shape | dtype | way | host, s | file, s | stall, s |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.room) as room, ThreadPoolExecutor(1) as pool:
        for dtype, (name, config) in itertools.product(("bfloat16", "float32"), SHAPES.items()):
            if args.dry:
                config = dataclasses.replace(config, num_layers=1, vocab_size=512, mlp_dim=512)
            rows = parameters.table(config)
            params = jax.jit(lambda key, config=config: parameters.init(config, key))(
                jax.random.key(0)
            )
            jax.block_until_ready(params)
            found = {way: [] for way in WAYS}
            for round_ in range(1 + (1 if args.dry else args.rounds)):
                sums = {}
                for way, make in WAYS.items():
                    seconds, sums[way] = measured(make, params, rows, dtype, room, pool)
                    if round_:
                        found[way].append(seconds)
                assert len(set(sums.values())) == 1, f"other bytes: {sums}"
            for way, rounds in found.items():
                columns = " | ".join(median_spread(column) for column in zip(*rounds, strict=True))
                print(f"| {name} | {dtype} | {way} | {columns} |", flush=True)
            ratios = [
                median_spread([a / b for a, b in zip(numpy, device, strict=True)])
                for numpy, device in zip(
                    *(zip(*found[way], strict=True) for way in WAYS), strict=True
                )
            ]
            print(f"| {name} | {dtype} | ratio | {' | '.join(ratios)} |", flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
