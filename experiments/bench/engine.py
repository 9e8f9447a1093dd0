"""Measure how fast the JAX engine generates in this process.

    python -m experiments.bench.engine --shape=tiny          # 3.7M parameters, fp32
    python -m experiments.bench.engine --shape=0.5b --slots=8 --rounds=1
    python -m experiments.bench.engine --model=DIR
    taskset -c 0 python -m experiments.bench.engine          # on one core

Prints start time, tokens/s at several concurrencies, time of a prefill, and the stall of a weight
update. Groups of 8 samples share a prompt; every sample makes all its new tokens. On a busy machine
compare the figures with the speed of a matrix product of the model's shape, measured at the same
time. The first round of a concurrency compiles and does not count.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

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
            config = SHAPES[args.shape]
            hf.save(model, config, params.init(config, jax.random.key(0), args.dtype))
        asyncio.run(bench(model, args))


if __name__ == "__main__":
    main()
