"""Measure the controller: trajectories per second and memory with 10,000 live prompts.

    python -m experiments.bench.controller [--live=10000] [--seconds=20] [--cores=0,1]

Executor, cursor, staleness and buffer are real; the trainer takes every batch at once. The engine
does no work: it keeps `--live` prompts waiting, and answers the oldest when a new one comes. It
runs first in this process, then in a server process behind the real gRPC client.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from experiments.bench import process
from rlx.base import Group
from rlx.fleet.requests import Chunk, EngineStatus, Request
from rlx.fleet.sample import Completion

SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 8, 64, 64
BATCH_PROMPTS = 512
WARM_BATCHES = 4
PATIENCE = 120.0  # seconds per batch


class Gate:
    """Keep `size` callers waiting; each new one releases the oldest."""

    def __init__(self, size: int):
        self.size, self.waiting = size, deque()

    async def enter(self) -> None:
        if len(self.waiting) >= self.size - 1:
            self._release()
        mine = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        await mine

    def _release(self) -> None:
        while self.waiting:
            oldest = self.waiting.popleft()
            if not oldest.done():  # its caller may have been cancelled
                oldest.set_result(None)
                return


class InstantFleet:
    """`Fleet.generate` without a network; tokens have the published version."""

    def __init__(self, live: int):
        self.gate, self.version = Gate(live), 0
        self.tokens = np.arange(NEW_TOKENS, dtype=np.int32)
        self.logprobs = np.full(NEW_TOKENS, -1.0, np.float32)

    async def generate(self, prompt_tokens, sampling, n, *, priority=0) -> list[Completion]:
        await self.gate.enter()
        versions = np.full(NEW_TOKENS, self.version, np.int32)
        return [
            Completion(self.tokens.copy(), self.logprobs.copy(), versions.copy(), "stop")
            for _ in range(n)
        ]

    async def publish(self, version, tensors) -> None:
        self.version = version

    async def close(self) -> None:
        pass


class InstantEngine:
    """The same engine in a server."""

    def __init__(self, live: int):
        self.gate, self.version, self.made = Gate(live), 0, 0

    async def start(self) -> None: ...
    async def pause(self, level: int = 0) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...

    async def load(self, path: str, version: int, kv: str = "keep") -> int:
        self.version = version
        return 0

    async def generate(self, request: Request):
        await self.gate.enter()
        tokens, logprobs = list(range(NEW_TOKENS)), [-1.0] * NEW_TOKENS
        for i in range(request.n):
            self.made += NEW_TOKENS
            yield Chunk(
                request.first_index + i, tokens, logprobs, [self.version] * NEW_TOKENS, "stop"
            )

    def status(self) -> EngineStatus:
        waiting = len(self.gate.waiting)
        return EngineStatus(self.version, waiting, 0, self.gate.size, 1 << 20, self.made, False)


class Workflow:
    """RLVR without tokenizer and reward process: a prompt, n samples, a reward each."""

    def __init__(self, sampling):
        self.sampling = sampling

    async def run(self, fleet, task) -> Group:
        from rlx.rollout.workflows import trajectory

        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
        done = await fleet.generate(prompt, self.sampling, SAMPLES)
        trajectories = (
            trajectory(prompt, c, float(i % 2), f"{task.group_id}.{i}") for i, c in enumerate(done)
        )
        return Group(task.group_id, tuple(trajectories), task.row)


@dataclass
class Result:
    """Measurements of one run."""

    trajectories_per_second: float
    live: int
    megabytes: float  # of this process, more than before the executor started
    cpu_share: float  # of one core, in this process


def drive(fleet, live: int, seconds: float, connect: bool) -> Result:
    """Run the executor as the loop does, and measure it once `live` prompts wait."""
    from rlx.fleet.requests import Sampling
    from rlx.rollout.data import Cursor
    from rlx.rollout.executor import Executor
    from rlx.rollout.staleness import Limits

    before = rss()
    staleness = live // BATCH_PROMPTS + 2  # only concurrency limits admission
    executor = Executor(
        Workflow(Sampling(max_new_tokens=NEW_TOKENS, seed=0)),
        Cursor([{"question": str(i), "answer": "0"} for i in range(10_000)]),
        Limits(BATCH_PROMPTS, staleness, live),
        fleet,
    )
    executor.start()
    weights = {"scale": np.ones(1, np.float32)}
    try:
        if connect:
            executor.loop.run(fleet.connect())
        executor.loop.run(fleet.publish(0, weights))
        executor.set_version(0)
        batches, begun, most, peak = 0, 0.0, 0, 0.0
        while not begun or time.perf_counter() - begun < seconds:
            batch = executor.collect(timeout=PATIENCE)
            assert batch, f"the executor stands still: {executor.counters()}"
            batches += 1
            executor.loop.run(fleet.publish(batches, weights))
            executor.set_version(batches)
            most, peak = max(most, int(executor.counters()["running"])), max(peak, rss())
            if batches == WARM_BATCHES:
                begun, cpu = time.perf_counter(), time.process_time()
        taken = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        assert executor.counters()["dropped"] == 0
        executor.loop.run(fleet.close())
    finally:
        executor.close()
    rate = (batches - WARM_BATCHES) * BATCH_PROMPTS * SAMPLES / taken
    return Result(rate, most, peak - before, cpu / taken)


def rss() -> float:
    """Return the resident memory of this process, megabytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def serve(live: int, pipe) -> None:
    """Run the server process until the pipe closes."""
    from rlx.engines.server import serve as run

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
        await run(
            lambda: InstantEngine(live), on_ready=pipe.send, stop=stop, weight_roots=["/dev/shm"]
        )

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())


def over_the_wire(live: int, seconds: float) -> Result:
    """Run the same with the engine in a server process."""
    from rlx.fleet.client import Fleet

    class Published(Fleet):
        async def publish(self, version, tensors):
            return await super().publish(version, tensors, "path")

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(live, theirs), daemon=True)
    server.start()
    try:
        if not ours.poll(60):
            raise SystemExit("the server did not start within 60 s")
        return drive(Published([f"127.0.0.1:{ours.recv()}"]), live, seconds, connect=True)
    finally:
        ours.close()
        theirs.close()
        server.join(10)
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--cores", default="0,1")
    args = parser.parse_args()
    os.sched_setaffinity(0, process.cores_of(args.cores))
    print(f"{SAMPLES} samples of {NEW_TOKENS} tokens a prompt, batches of {BATCH_PROMPTS} prompts")
    print("| engine | trajectories/s | live prompts | MB | MB per 1000 live | share of a core |")
    print("|---|---|---|---|---|---|")
    for name, run in (
        ("in the process", lambda: drive(InstantFleet(args.live), args.live, args.seconds, False)),
        ("behind gRPC", lambda: over_the_wire(args.live, args.seconds)),
    ):
        r = run()
        print(
            f"| {name} | {r.trajectories_per_second:,.0f} | {r.live:,} | {r.megabytes:.0f} | "
            f"{r.megabytes / r.live * 1000:.1f} | {r.cpu_share:.0%} |"
        )


if __name__ == "__main__":
    main()
