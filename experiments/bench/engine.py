"""Measure how fast the JAX engine generates in this process, or when first tokens come.

    python -m experiments.bench.engine --shape=tiny          # 3.7M parameters, fp32
    python -m experiments.bench.engine --shape=0.5b --slots=8 --rounds=1
    python -m experiments.bench.engine --model=DIR
    taskset -c 0 python -m experiments.bench.engine          # on one core
    python -m experiments.bench.engine --first=512,2048 [--engine=vllm]

Prints start time, tokens/s at several concurrencies, time of a prefill, and the stall of a weight
update. Groups of 8 samples share a prompt; every sample makes all its new tokens. On a busy machine
compare the figures with the speed of a matrix product of the model's shape, measured at the same
time. The first round of a concurrency compiles and does not count.

With `--first`, seconds until every sample has a token are measured, for prompts of these lengths: a
request for one sample, one for a group, and the group's samples with a prompt each.
"""

import argparse
import asyncio
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.engines.engine import Engine
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request, Sampling
from rlx.model import hf, params
from rlx.model.model_config import ModelConfig

SHAPES = {
    "tiny": ModelConfig(
        "Qwen2ForCausalLM", vocab_size=2048, num_layers=4, model_dim=256, mlp_dim=768, num_heads=8,
        num_kv_heads=4, head_dim=32, tie_embeddings=True, attention_bias=True, max_position=1024,
    ),
    "0.5b": ModelConfig(
        "Qwen2ForCausalLM", vocab_size=151_936, num_layers=24, model_dim=896, mlp_dim=4864,
        num_heads=14, num_kv_heads=2, head_dim=64, tie_embeddings=True, attention_bias=True,
    ),
}  # fmt: skip
SAMPLES = 8  # of a group


def flags() -> argparse.Namespace:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--model", default="", help="HF directory; otherwise --shape, random weights")
    p.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    p.add_argument("--slots", type=int, default=64)
    p.add_argument("--decode-steps", type=int, default=8)
    p.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    p.add_argument("--new", type=int, default=64, help="new tokens a sample")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--first", default="", help="lengths of prompts, for first tokens")
    p.add_argument("--engine", default="jax", choices=("jax", "vllm"), help="with --first")
    return p.parse_args()


async def generate(engine: JaxEngine, concurrency: int, args: argparse.Namespace) -> int:
    """Generate all samples of one round; return the number of tokens."""
    config = hf.load_config(engine.model_path)
    rng = np.random.default_rng(0)

    async def group(index: int, samples: int) -> int:
        prompt = rng.integers(0, config.vocab_size, args.prompt).astype(np.int32)
        sampling = Sampling(max_new_tokens=args.new, min_new_tokens=args.new, seed=index)
        request = Request(str(index), prompt, sampling, samples)
        return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

    sizes = [SAMPLES] * (concurrency // SAMPLES) or [concurrency]
    return sum(await asyncio.gather(*(group(i, n) for i, n in enumerate(sizes))))


async def rate(engine: JaxEngine, concurrency: int, args: argparse.Namespace) -> None:
    """Print wall and CPU tokens/s, and the time of a decode step and of a prefill."""
    engine.status()
    await generate(engine, concurrency, args)
    await asyncio.to_thread(engine.wait_compiled)
    for _ in range(2):  # warm-up of the new programs
        await generate(engine, concurrency, args)
    engine.status()
    rates, per_cpu, step, prefill = [], [], [], []
    for _ in range(args.rounds):
        start, cpu = time.perf_counter(), time.process_time()
        tokens = await generate(engine, concurrency, args)
        rates.append(tokens / (time.perf_counter() - start))
        per_cpu.append(tokens / (time.process_time() - cpu))
        spans = engine.status().spans
        step += [
            (end - begin) / args.decode_steps for name, begin, end in spans if name == "decode"
        ]
        prefill.append(sum(end - begin for name, begin, end in spans if name == "prefill"))
    print(
        f"{concurrency:4d} sequences  {statistics.median(rates):8.0f} tokens/s (best "
        f"{max(rates):.0f})  {statistics.median(per_cpu):8.0f} per CPU-second  "
        f"step {statistics.median(step) / 1e6:.2f} ms (best {min(step) / 1e6:.2f})  "
        f"prefill of all {statistics.median(prefill) / 1e6:.1f} ms"
    )


async def update(engine: JaxEngine, concurrency: int, args: argparse.Namespace) -> None:
    """Print how long decoding stops for new weights, by three ways."""
    path = str(engine.model_path / hf.WEIGHTS)
    for name, paused, kv in (
        ("pause, load, resume", True, "keep"),
        ("pause, load with recomputed cache, resume", True, "recompute"),
        ("load beside decoding", False, "keep"),
    ):
        stalls = []
        for version in range(args.rounds):
            task = asyncio.create_task(generate(engine, concurrency, args))
            await asyncio.sleep(0.05)
            if paused:
                await engine.pause()
            start = time.perf_counter()
            await engine.load(path, version, kv)
            if paused:
                await engine.resume()
                stalls.append(time.perf_counter() - start)
            await task
            spans = engine.status().spans
            swaps = [(end - begin) / 1e9 for what, begin, end in spans if what == "swap weights"]
            stalls += [] if paused else swaps
        print(f"stall: {name:42s} {statistics.median(stalls) * 1e3:8.1f} ms")


def product_speed(config: ModelConfig, slots: int) -> float:
    """Return GFLOP/s of a layer's largest product, best of many."""
    x = jnp.ones((slots, config.model_dim))
    w = jnp.ones((2 * config.mlp_dim, config.model_dim))
    run = jax.jit(lambda x, w: jnp.einsum("rd,fd->rf", x, w))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        jax.block_until_ready(run(x, w))
        times.append(time.perf_counter() - start)
    return 2 * x.shape[0] * w.size / statistics.median(times) / 1e9


async def first_tokens(engine: Engine, args: argparse.Namespace) -> None:
    """Print seconds to first tokens with a prompt for one sample, for a group, and for each."""
    rng = np.random.default_rng(0)

    async def first(length: int, samples: int, name: str) -> None:
        prompt = rng.integers(3, 250, length).astype(np.int32)
        new, waiting = args.decode_steps, set(range(samples))
        sampling = Sampling(max_new_tokens=new, min_new_tokens=new, seed=0)
        async for chunk in engine.generate(Request(name, prompt, sampling, samples)):
            waiting.discard(chunk.index)
            if not waiting:
                break

    for length in map(int, args.first.split(",")):
        taken: dict[str, list[float]] = {}
        for turn in range(args.rounds + 2):  # the first ones compile
            for what, prompts, samples in (
                ("one sample", 1, 1), ("a group", 1, SAMPLES), ("other prompts", SAMPLES, 1),
            ):  # fmt: skip
                start = time.perf_counter()
                names = [f"{length} {turn} {what} {i}" for i in range(prompts)]
                await asyncio.gather(*(first(length, samples, name) for name in names))
                taken.setdefault(what, []).append(time.perf_counter() - start)
        found = ", ".join(f"{what} {statistics.median(t[2:]):.3f}" for what, t in taken.items())
        print(f"{args.engine}, prompt {length}: seconds to first tokens: {found}")


async def bench_first(model: str, args: argparse.Namespace) -> None:
    kind: Any = JaxEngine
    if args.engine == "vllm":
        from rlx.engines.vllm.vllm_engine import VllmEngine as kind
    length = max(map(int, args.first.split(","))) + args.new
    options = {"decode_steps": args.decode_steps} if args.engine == "jax" else {}
    engine = kind(model, slots=SAMPLES, max_model_len=length, dtype=args.dtype, **options)
    await engine.start()
    try:
        await first_tokens(engine, args)
    finally:
        await engine.close()


async def bench(model: str, args: argparse.Namespace) -> None:
    length = args.prompt + args.new
    options = {"slots": args.slots, "decode_steps": args.decode_steps, "dtype": args.dtype}
    engine = JaxEngine(model, max_model_len=length, **options)
    start = time.perf_counter()
    await engine.start()
    print(f"start {time.perf_counter() - start:.2f} s")
    config = hf.load_config(engine.model_path)
    try:
        for concurrency in sorted({8, 32, 64, args.slots}):
            if concurrency <= args.slots:
                await rate(engine, concurrency, args)
                print(f"      product at the same time: {product_speed(config, 64):.0f} GFLOP/s")
        await update(engine, args.slots, args)
    finally:
        await engine.close()


def main() -> None:
    args = flags()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{args.model or args.shape}: {cores} cores, load {load:.1f}, {jax.devices()[0]}")
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if not model:
            model = str(Path(directory) / "model")
            config = dataclasses.replace(SHAPES[args.shape], max_position=4096)
            weights = params.init(config, jax.random.key(0), args.dtype)
            hf.save(model, config, weights, source=hf.resolve("rlx:arithmetic"))
        asyncio.run((bench_first if args.first else bench)(model, args))


if __name__ == "__main__":
    main()
