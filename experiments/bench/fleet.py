"""Measure the cost of the network: tokens through Fleet and gRPC, or from the engine in process.

    python -m experiments.bench.fleet                   # both parts
    python -m experiments.bench.fleet --part=wire       # an engine that answers at once
    python -m experiments.bench.fleet --part=jax        # the JAX engine, 3.7M-parameter model

Part `wire` reports the tokens per second that the network path can carry, and the CPU time per
million tokens at each end. Its shape is the end-to-end workload (groups of 8, 8 tokens per decode
call), unpaced and paced as by an engine of 10k tokens/s. Part `jax` compares one server process
with the same engine in this process, in turns on the same core. On a busy machine compare the CPU
columns.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.bench import workload
from rlx import serve
from rlx.engines import options as server_options
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Chunk, EngineStatus, Request, Sampling
from rlx.launch.local import CpuPlan, LocalServers

GROUPS, SAMPLES, NEW_TOKENS = 8, 8, 64  # groups at a time: 64 sequences
ROUNDS = 5
WARM_SECONDS = 20.0  # the JAX engine compiles its smaller shapes while it runs
PROMPT = np.arange(10, 42, dtype=np.int32)


class InstantEngine:
    """Returns tokens without a model, `step_seconds` between two decode steps."""

    def __init__(self, decode_steps: int, step_seconds: float):
        self.decode_steps, self.step_seconds = decode_steps, step_seconds
        self.generated = 0

    async def start(self): ...
    async def pause(self, level=0): ...
    async def resume(self): ...
    async def load(self, path, version, kv="keep"): ...
    async def close(self): ...

    def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 64, 4096, self.generated, False)

    async def generate(self, request: Request):
        most = request.sampling.max_new_tokens
        for done in range(0, most, self.decode_steps):
            await asyncio.sleep(self.step_seconds)
            count = min(self.decode_steps, most - done)
            tokens, logprobs = list(range(count)), [-1.25] * count
            reason = "length" if done + count == most else None
            self.generated += count * request.n
            for i in range(request.n):
                yield Chunk(request.first_index + i, tokens, logprobs, [3] * count, reason)


def instant(args) -> InstantEngine:
    return InstantEngine(args.decode_steps, float(os.environ["STEP_SECONDS"]))


ENGINES = {**server_options.ENGINES, "instant": instant}


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def through_engine(engine, seed: int) -> int:
    """Call the engine for one group; return the number of tokens."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, seed=seed)
    request = Request(str(seed), PROMPT, sampling, n=SAMPLES)
    return sum([len(chunk.tokens) async for chunk in engine.generate(request)])


async def through_fleet(fleet: Fleet, seed: int) -> int:
    """Request the same group over gRPC."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, seed=seed)
    return sum(len(c.tokens) for c in await fleet.generate(PROMPT, sampling, SAMPLES))


async def rate(group, seconds: float) -> tuple[float, float]:
    """Return (tokens per second, CPU seconds per million tokens here), GROUPS at a time."""
    for seed in range(GROUPS):  # warm-up
        await group(seed)
    total, seeds = 0, iter(range(1 << 30))
    start, cpu = time.monotonic(), time.process_time()

    async def keep_busy():
        nonlocal total
        while time.monotonic() - start < seconds:
            made = await group(next(seeds))
            total += made

    await asyncio.gather(*(keep_busy() for _ in range(GROUPS)))
    elapsed = time.monotonic() - start
    return total / elapsed, (time.process_time() - cpu) / total * 1e6


async def wire_part(seconds: float, directory: str, cores: list[int]) -> None:
    print("part wire: 64 sequences, groups of 8, 8 tokens a decode call")
    print(f"{'':24}{'tokens/s':>10}{'CPU s per M tokens: client':>30}{'server':>8}")
    for name, step in (("unpaced", 0.0), ("paced to 10k tokens/s", 64 * 8 / 10_000)):
        engine = InstantEngine(8, step)
        tokens, cpu = await rate(lambda seed, e=engine: through_engine(e, seed), seconds)
        print(f"{'in process, ' + name:34}{tokens:10.0f}{cpu:20.2f}")
        os.environ["STEP_SECONDS"] = str(step)
        with servers("none", directory, cores, engine="instant", decode_steps=8) as local:
            fleet = await asyncio.to_thread(local.fleet)
            await fleet.connect()
            before = cpu_seconds(local.pids[0])
            begun = (await fleet.status())[0].status.tokens_generated
            tokens, cpu = await rate(lambda seed, f=fleet: through_fleet(f, seed), seconds)
            made = (await fleet.status())[0].status.tokens_generated - begun
            server = (cpu_seconds(local.pids[0]) - before) / made * 1e6
            print(f"{'Fleet + gRPC, ' + name:34}{tokens:10.0f}{cpu:20.2f}{server:8.2f}")
            await fleet.close()


async def jax_part(seconds: float, directory: str, cores: list[int]) -> None:
    """Run both engines on the second core, in turns; the client has the first."""
    from rlx.engines.jax.jax_engine import JaxEngine

    model = await asyncio.to_thread(workload.make, Path(directory) / "workload") / "model"
    options = {"slots": 64, "max_model_len": 128, "decode_steps": 8}
    with servers(model, directory, cores, engine="jax", **options) as local:
        fleet = await asyncio.to_thread(local.fleet)
        await fleet.connect()
        os.sched_setaffinity(0, cores[1:2] or cores)  # for threads that JAX makes from now on
        engine = JaxEngine(str(model), seed=0, dtype="float32", **options)
        await engine.start()
        await rate(lambda seed: through_engine(engine, seed), WARM_SECONDS)
        await rate(lambda seed: through_fleet(fleet, seed), WARM_SECONDS)
        rounds: dict[str, list] = {"in process": [], "Fleet + gRPC": []}
        for _ in range(ROUNDS):
            os.sched_setaffinity(0, cores[1:2] or cores)
            tokens, cpu = await rate(lambda seed: through_engine(engine, seed), seconds)
            rounds["in process"].append((tokens, cpu, 0.0))
            os.sched_setaffinity(0, cores[:1])
            before = cpu_seconds(local.pids[0])
            begun = (await fleet.status())[0].status.tokens_generated
            tokens, client = await rate(lambda seed: through_fleet(fleet, seed), seconds)
            made = (await fleet.status())[0].status.tokens_generated - begun
            server = (cpu_seconds(local.pids[0]) - before) / made * 1e6
            rounds["Fleet + gRPC"].append((tokens, server, client))
        await engine.close()
        await fleet.close()
    print("part jax: 3.7M-parameter Qwen2, fp32, 64 slots, one core; medians of", ROUNDS)
    print(f"{'':24}{'tokens/s':>10}{'CPU s per M tokens: engine':>30}{'client':>8}")
    for name, values in rounds.items():
        tokens, engine_cpu, client = np.median(values, axis=0)
        print(f"{name:34}{tokens:10.0f}{engine_cpu:20.1f}{client:8.2f}")


def servers(model, directory: str, cores: list[int], **options) -> LocalServers:
    """Start one server of this file's engines on the second core."""
    plan = CpuPlan(tuple(cores[:1]), (tuple(cores[1:2] or cores),))
    command = (sys.executable, "-m", "experiments.bench.fleet", "--serve")
    return LocalServers(model, workdir=directory, plan=plan, command=command, **options)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve.main(sys.argv[2:], ENGINES)
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="all", choices=("all", "wire", "jax"))
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        if args.part in ("all", "wire"):
            os.sched_setaffinity(0, cores[:1])
            asyncio.run(wire_part(args.seconds, directory, cores))
        if args.part in ("all", "jax"):
            asyncio.run(jax_part(args.seconds, directory, cores))


if __name__ == "__main__":
    main()
