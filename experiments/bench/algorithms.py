"""Time advantages, loss and gradient on a million tokens, compared with the same in PyTorch.

    python -m experiments.bench.algorithms [--preset=grpo] [--threads=1,2] [--cores=0,1]

Inputs are rewards and log-probabilities; the output is the gradient with respect to the target's
log-probabilities. There are 1,048,576 tokens in rows of 1,024: 512 prompts of 16 completions with
log-normal lengths. rlx's side is one jitted program. torch's is the same code on its tensors, eager
and compiled by inductor. The sides are processes pinned to the same cores and step in turns. Ratios
are those of neighbouring steps. Printed are medians and quartiles of wall and CPU time, and each
side's peak memory beyond its inputs and libraries.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys

from experiments.bench.algorithms_workers import resolved
from experiments.bench.process import cores_of, median_spread
from experiments.bench.train_step import Worker

SIDES = {"jax": "rlx", "eager": "torch eager", "compiled": "torch compiled"}
WORKERS = "experiments.bench.algorithms_workers"


def compare(options: dict, sides: list[str], cores: list[int], rounds: int) -> dict:
    """Print one row of the table: all sides in turns."""
    taken: dict[str, list[dict]] = {side: [] for side in sides}
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        workers = {}
        for side in sides:
            workers[side] = Worker({**options, "side": side}, cores, WORKERS)
            stack.callback(workers[side].close)
        for _ in range(rounds):
            for side, worker in workers.items():
                taken[side].append(worker.step())
    row = {
        "preset": options["preset"],
        "threads": options["threads"],
        "tokens": options["tokens"],
        "rows": workers["jax"].facts["rows"],
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    for side in sides:
        row[SIDES[side]] = summary(taken[side], taken["jax"], workers[side].facts)
    return row


def summary(steps: list[dict], ours: list[dict], facts: dict) -> dict:
    """Return milliseconds, ratio to rlx, memory, and seconds until the third call ended."""
    out = {}
    for clock in ("wall", "cpu"):
        out[f"{clock}_ms"] = median_spread([1e3 * s[clock] for s in steps])
        if steps is not ours:
            ratios = [s[clock] / o[clock] for s, o in zip(steps, ours, strict=True)]
            out[f"{clock}_ratio"] = median_spread(ratios)
    out["loss"] = statistics.median(s["check"] for s in steps)
    out["peak_mb"] = round(max(s["peak_bytes"] for s in steps) / 1e6)
    out["warm_seconds"] = round(facts["warm_seconds"], 1)
    return out


def main() -> None:
    """Print one JSON object per row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="grpo", help="one or several, with commas")
    parser.add_argument("--cores", type=cores_of, default=[0, 1])
    parser.add_argument("--threads", type=cores_of, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sides", default="jax,eager,compiled")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--width", type=int, default=1024, help="tokens a row")
    a = parser.parse_args()
    print(f"# python -m experiments.bench.algorithms {' '.join(sys.argv[1:])}", flush=True)
    sides = [side for side in SIDES if side in ("jax", *a.sides.split(","))]
    if "compiled" in sides and not shutil.which(os.environ.get("CXX", "g++")):
        print("# torch compiled is left out: inductor needs g++, and there is none", flush=True)
        sides.remove("compiled")
    for preset in a.preset.split(","):
        resolved(preset)  # an unknown name is an error before any process starts
        for threads in a.threads:
            options = {
                "preset": preset, "threads": threads, "prompts": a.prompts,
                "samples": a.samples, "tokens": a.tokens, "width": a.width,
            }  # fmt: skip
            row = compare(options, sides, a.cores[:threads], a.rounds)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
