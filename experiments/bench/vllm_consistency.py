"""Compare vLLM's behaviour logprobs with the trainer's and transformers', token by token.

    python -m experiments.bench.vllm_consistency        # the embedded model, fp32 and bf16
    python -m experiments.bench.vllm_consistency --dry

Completions come over gRPC from `rlx.serve --engine=vllm`, before and after a publish, with several
ways of sampling, and short and long ones together. The trainer (as for proximal logprobs) and
transformers score the same tokens at the same temperature. A bf16 engine is compared with the
trainer in bf16 and in fp32. Target: fp32 at most 1e-4.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import jax
import numpy as np

from experiments.bench import process
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.launch.local import CpuPlan, LocalServers
from rlx.mismatch import measure
from rlx.model import hf

WAYS = {
    "T 1": Sampling(temperature=1.0, seed=1),
    "T 0.7": Sampling(temperature=0.7, seed=2),
    "T 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=3),
    "T 1, top-k 20": Sampling(temperature=1.0, top_k=20, seed=4),
    "greedy": Sampling(temperature=0.0, seed=5),
}
LENGTHS = {"short": 12, "long": 400}  # new tokens, EOS suppressed
LIMIT = measure.Tolerance(max=1e-4, mean=1e-4)
SAMPLES = 4  # a prompt


def changed(params, seed: int):
    """Return other weights: each of the old ones changed by up to 20 %."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        x * jax.random.uniform(key, x.shape, x.dtype, 0.8, 1.2)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


async def draw(fleet: Fleet, prompts: list[np.ndarray], sampling: Sampling) -> list:
    groups = await asyncio.gather(*(fleet.generate(p, sampling, SAMPLES) for p in prompts))
    return [
        measure.EngineSample(prompt, completion)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]


async def every_way(fleet: Fleet, prompts, lengths: dict[str, int]) -> dict[str, list]:
    """Return (way, length) → samples."""
    found = {}
    for way, sampling in WAYS.items():
        for name, new in lengths.items():
            drawn = Sampling(
                sampling.temperature, sampling.top_p, sampling.top_k, new, new, seed=sampling.seed
            )
            found[f"{way}, {name}"] = await draw(fleet, prompts, drawn)
    return found


def scored(config, params, directory: Path, dtype: str, version: int, found: dict) -> list[float]:
    """Print a line for each way of sampling; return each one's max |Δ| to the trainer."""
    worst = []
    for name, samples in found.items():
        assert all((s.completion.versions == version).all() for s in samples)
        temperature = WAYS[name.rpartition(", ")[0]].temperature or 1.0
        row = measure.row_length(max(len(s.prompt) + len(s.completion.tokens) for s in samples))
        engine = [s.completion.logprobs for s in samples]
        sides = {
            compute: measure.TrainerScorer(config, temperature, row, compute).logprobs(
                params, samples
            )
            for compute in dict.fromkeys((dtype, "float32"))
        }
        sides["transformers"] = measure.transformers_logprobs(
            directory, samples, temperature, dtype
        )
        cells = []
        for other in (dtype, "float32", "transformers"):
            report = measure.compare(engine, sides[other], LIMIT)
            cells.append(f"{report.mean:.1e} / {report.max:.1e}")
            if other == dtype:
                worst.append(report.max)
        print(
            f"| {dtype} | {version} | {name} | {report.tokens} | {' | '.join(cells)} |", flush=True
        )
    return worst


async def one_dtype(args, dtype: str, scratch: Path) -> float:
    """Print the table's part of one engine dtype; return the largest |Δ|."""
    cores = process.cores_of(args.cores)
    plan = CpuPlan(tuple(cores[:1]), (tuple(cores[1:2]),))
    source = hf.resolve("rlx:arithmetic")
    config, params = hf.load(source)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 270, n).astype(np.int32) for n in rng.integers(4, 80, args.prompts)]
    lengths = {"short": LENGTHS["short"]} if args.dry else LENGTHS
    worst: list[float] = []
    options = {"slots": 32, "max_model_len": 512, "dtype": dtype}
    with LocalServers(source, workdir=scratch, plan=plan, engine="vllm", **options) as local:
        fleet = await asyncio.to_thread(local.fleet)
        await fleet.connect()
        for version in range(args.versions):
            if version:
                params = changed(params, version)
            directory = scratch / f"{dtype}-{version}"
            hf.save(directory, config, params, dtype, source=source)  # the engine's weights
            _, params = hf.load(directory)
            if version:
                await fleet.publish(version, directory, "stream")
            found = await every_way(fleet, prompts, lengths)
            worst += scored(config, params, directory, dtype, version, found)
        await fleet.close()
    return max(worst)


def main() -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--cores", default="0,1", help="trainer, engine")
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--versions", type=int, default=2, help="the model's weights, and updates")
    p.add_argument("--dtypes", default="float32,bfloat16")
    p.add_argument("--dry", action="store_true", help="as small as it gets")
    args = p.parse_args()
    if args.dry:
        args.prompts, args.dtypes = 2, "float32"
    os.sched_setaffinity(0, process.cores_of(args.cores)[:1])
    print(
        "|Δ logprob| in nats, mean / max, of vLLM's tokens scored by\n\n"
        "| dtype | version | sampling | tokens | trainer | trainer in fp32 | transformers |\n"
        "|---|---|---|---|---|---|---|"
    )
    worst = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in args.dtypes.split(","):
            worst[dtype] = asyncio.run(one_dtype(args, dtype, Path(scratch)))
    print(f"\nlargest: {worst}; target float32 {LIMIT.max}")
    if worst.get("float32", 0.0) > LIMIT.max:
        raise SystemExit("float32 is beyond its target")


if __name__ == "__main__":
    main()
