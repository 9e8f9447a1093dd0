"""Part `decode`: tokens per second of the JAX engine, 1.5B in bfloat16, random weights.

A decode step of a small batch must read every weight once. The roofline is therefore the weights'
bytes over the memory's bytes/s; the engine's share of it is printed.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench.train_step_workers import MODELS
from experiments.gpu import measure
from experiments.gpu.step import TINY
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request, Sampling
from rlx.model import hf
from rlx.model import params as parameters

PROMPT = 64  # tokens


async def generate(engine: JaxEngine, batch: int, new: int, vocabulary: int) -> int:
    """Generate `new` tokens for each of `batch` requests; return the number of tokens."""
    rng = np.random.default_rng(0)

    async def one(index: int) -> int:
        prompt = rng.integers(0, vocabulary, PROMPT).astype(np.int32)
        sampling = Sampling(max_new_tokens=new, min_new_tokens=new, seed=index)
        request = Request(str(index), prompt, sampling)
        return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

    return sum(await asyncio.gather(*(one(i) for i in range(batch))))


async def rates(path: str, o: dict[str, Any], vocabulary: int) -> dict[int, float]:
    """Return tokens per second by batch size: the better of two rounds, after two to warm up."""
    batches = o["batches"]
    dtype = "float32" if o["tiny"] else "bfloat16"
    engine = JaxEngine(path, slots=max(batches), max_model_len=PROMPT + o["new"], dtype=dtype)
    await engine.start()
    found = {}
    try:
        for batch in batches:
            await generate(engine, batch, o["new"], vocabulary)
            await asyncio.to_thread(engine.wait_compiled)
            await generate(engine, batch, o["new"], vocabulary)
            for _ in range(2):
                start = time.perf_counter()
                tokens = await generate(engine, batch, o["new"], vocabulary)
                rate = tokens / (time.perf_counter() - start)
                found[batch] = max(rate, found.get(batch, 0))
    finally:
        await engine.close()
    return found


def run(o: dict[str, Any]) -> dict[str, Any]:
    """Return tokens per second by batch size, and the roofline of a step."""
    model = TINY if o["tiny"] else MODELS["1.5b"]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model")
        weights = parameters.init(model, jax.random.key(0), "bfloat16")
        hf.save(path, model, weights, "bfloat16")
        del weights
        found = asyncio.run(rates(path, o, model.vocab_size))
    size = 2 * parameters.count(model)
    step = size / measure.device()["bytes_per_second"]
    return {
        "model": "tiny" if o["tiny"] else "1.5b",
        "tokens_per_second": found,
        "roofline_step_seconds": step,
        "of_roofline": {batch: rate / batch * step for batch, rate in found.items()},
    }


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    return [
        f"{result['model']}, batch {batch:>4}: {rate:9.0f} tokens/s, "
        f"{100 * result['of_roofline'][batch]:.1f} % of the roofline of its weights"
        for batch, rate in result["tokens_per_second"].items()
    ]
