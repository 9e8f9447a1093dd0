"""Measure publishing weights to vLLM with requests in flight: bytes, stall, first new token.

    python -m experiments.bench.vllm_publish                      # tiny, 32 requests in flight
    python -m experiments.bench.vllm_publish --model=0.5b --publishes=5 --requests=8
    python -m experiments.bench.vllm_publish --dry                # figures mean nothing

Before each publish every parameter is changed by ±learning rate in float32, and cast to the served
dtype. Columns, medians [quartiles] in ms:

  stall        pause to resume, as the server reports it: no decode step ran
  gap          longest time between two messages of one request around the publish, at the client.
               Tokens are sent at most every 0.15 s: `without` is the gap with no publish.
  first token  from parameters ready to the first message with a token of the new version
  of which     host: parameters → tensors with HF names; write: file and checksum in /dev/shm.
               verify, stage: the server's checksum, EngineCore's reading, checking and packing.
  copy         the same bytes copied within memory, and into a fresh file in /dev/shm

The rival in the same run, on the same core, is vLLM's documented way: pause_generation(mode="keep")
→ collective_rpc("reload_weights") → resume_generation. On a CPU it does not update a tied head, and
it checks nothing. Its gap is between single tokens.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import grpc
import numpy as np

from experiments.bench import process, vllm_workers
from rlx.fleet import publish, wire
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet.requests import Request, Sampling, Timeouts
from rlx.launch.local import CpuPlan, LocalServers

PROMPT, MAX_LEN = 32, 512
SETTLE = 3  # messages of every request between two publishes


class InFlight:
    """Requests that never end, and the times of their messages."""

    def __init__(self, stub: rpc.RolloutStub, count: int):
        self._stub = stub
        self.arrivals: list[list[float]] = [[] for _ in range(count)]
        self.first: dict[int, float] = {}  # version → its first token
        self._tasks = [asyncio.create_task(self._keep_busy(index)) for index in range(count)]

    async def _keep_busy(self, index: int) -> None:
        room = MAX_LEN - PROMPT
        sampling = Sampling(max_new_tokens=room, min_new_tokens=room, seed=index)
        prompt = (np.arange(PROMPT, dtype=np.int32) + 7 * index) % 200
        done: list[int] = []
        while True:  # an aborted request continues from its tokens
            tokens = np.concatenate([prompt, np.array(done, np.int32)])
            request = Request(f"r{index}", tokens, sampling, prefix_len=len(done))
            done = await self._read(index, request, done)

    async def _read(self, index: int, request: Request, done: list[int]) -> list[int]:
        """Follow one request to its end; return the tokens of a completion to be continued."""
        async for reply in self._stub.Generate(wire.request_message(request), timeout=600):
            now = time.perf_counter()
            self.arrivals[index].append(now)
            for chunk in wire.chunks_from(reply):
                done = [*done, *chunk.tokens.tolist()]
                if len(chunk.versions):
                    self.first.setdefault(int(chunk.versions[-1]), now)
                if chunk.stop_reason == "length":
                    return []
        return done

    async def settle(self, messages: int = SETTLE) -> None:
        """Wait until every request has had some more messages."""
        wanted = [len(times) + messages for times in self.arrivals]
        while any(len(t) < n for t, n in zip(self.arrivals, wanted, strict=True)):
            await asyncio.sleep(0.01)

    def gap(self, begun: float) -> float:
        """Return the longest seconds between messages of a request, the second after `begun`."""
        return max(
            b - a for times in self.arrivals for a, b in itertools.pairwise(times) if b > begun
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Trainer:
    """Float32 parameters that move by the learning rate, and the weights to publish."""

    def __init__(self, model: Path, dtype: str, learning_rate: float):
        import jax
        import jax.numpy as jnp

        from rlx.model import hf

        self.config, self.params = hf.load(model, jnp.float32)
        self.dtype = dtype
        self.tensors = lambda: hf.to_hf(self.params, self.config, dtype)

        def move(params, sign):
            def leaf(x):
                odd = jnp.arange(x.size).reshape(x.shape) % 3 - 1
                return x + sign * learning_rate * odd

            return jax.tree.map(leaf, params)

        self._move, self._steps = jax.jit(move), 0

    def step(self) -> None:
        import jax

        self._steps += 1
        self.params = jax.block_until_ready(self._move(self.params, 1.0 if self._steps % 2 else -1))


async def ours(model: Path, trainer: Trainer, method: str, kv: str, args, scratch: Path) -> dict:
    """Return the figures of `args.publishes` publishes by one method."""
    cores = process.cores_of(args.cores)
    plan = CpuPlan(tuple(cores[:1]), (tuple(cores[1:2]),))
    options = {"slots": args.requests, "max_model_len": MAX_LEN, "dtype": args.dtype}
    rows: list[dict[str, float]] = []
    with LocalServers(model, workdir=scratch, plan=plan, engine="vllm", **options) as local:
        (address,) = await asyncio.to_thread(local.wait)
        fleet = local.fleet(limits=Timeouts(publish_timeout_seconds=300), kv_on_update=kv)
        await fleet.connect()
        channel = grpc.aio.insecure_channel(address, options=wire.OPTIONS)
        stub, metadata = rpc.RolloutStub(channel), (("authorization", f"Bearer {local.token}"),)
        for name, call in vars(stub).items():
            setattr(stub, name, partial(call, metadata=metadata))
        flight = InFlight(stub, args.requests)
        for version in range(args.publishes + 1):
            await flight.settle()
            await asyncio.to_thread(trainer.step)
            await flight.settle()
            quiet = time.perf_counter()
            await flight.settle()
            row = {"without": 1e3 * flight.gap(quiet)}
            await fleet.drain_spans()
            start = time.perf_counter()
            tensors = await asyncio.to_thread(trainer.tensors)
            row["host"] = 1e3 * (time.perf_counter() - start)
            report = await fleet.publish(version + 1, tensors, method)
            while version + 1 not in flight.first:
                await asyncio.sleep(0.005)
            await flight.settle()
            row["first token"] = 1e3 * (flight.first[version + 1] - start)
            row["gap"] = 1e3 * flight.gap(start)
            row["publish"] = 1e3 * report.seconds
            row |= {"file": report.num_bytes / 1e6, "sent": report.sent_bytes / 1e6}
            row |= named(await fleet.drain_spans())
            if version:  # the first one allocates memory
                rows.append(row)
        await flight.close()
        await channel.close()
        await fleet.close()
    return columns(rows)


def named(spans: dict[str, list[tuple[str, int, int]]]) -> dict[str, float]:
    """Return ms of the server's part."""
    names = {"swap weights": "stall", "stage weights": "stage", "verify weights": "verify"}
    return {
        names[name]: (end - start) / 1e6
        for server in spans.values()
        for name, start, end in server
        if name in names
    }


def columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows if name in row] for name in rows[0]}


def scale(trainer: Trainer, repeats: int) -> dict[str, list[float]]:
    """Return ms to write the file as `publish` does, and to copy the same bytes."""
    tensors = trainer.tensors()
    figures: dict[str, list[float]] = {"write": [], "copy": [], "copy to file": []}
    for _ in range(repeats + 1):
        file = publish.WeightFile("/dev/shm")
        start = time.perf_counter()
        publish.write_weights(tensors, file.path)
        figures["write"].append(1e3 * (time.perf_counter() - start))
        source = np.fromfile(file.path, np.uint8)
        file.close()
        target = np.zeros_like(source)
        target[:] = 1
        start = time.perf_counter()
        target[:] = source
        figures["copy"].append(1e3 * (time.perf_counter() - start))
        file = publish.WeightFile("/dev/shm")
        start = time.perf_counter()
        target.tofile(file.path)
        figures["copy to file"].append(1e3 * (time.perf_counter() - start))
        file.close()
    return {name: values[1:] for name, values in figures.items()}


def rivals(model: Path, trainer: Trainer, args, scratch: Path) -> dict[str, dict]:
    """Return the figures of vLLM's documented way, with KV kept and recomputed."""
    published = scratch / "published"
    published.mkdir(exist_ok=True)
    shutil.copyfile(model / "config.json", published / "config.json")
    options = {"slots": args.requests, "max_model_len": MAX_LEN, "dtype": args.dtype}
    options |= {"requests": args.requests, "prompt": PROMPT}
    log, core = scratch / "rival.log", process.cores_of(args.cores)[1]
    figures: dict[str, list] = {"keep": [], "recompute": []}
    with vllm_workers.Rival("reload", model, core, log, **options) as rival:
        rival.ask()
        for turn in range(args.publishes + 1):
            trainer.step()
            publish.write_weights(trainer.tensors(), published / "model.safetensors")
            for kv, values in figures.items():
                stall, gap, first = rival.ask([str(published), kv == "recompute"])
                if turn:
                    values.append({"stall": stall, "gap": gap, "after pause": first})
    return {kv: columns(values) for kv, values in figures.items()}


def show(name: str, figures: dict[str, list[float]]) -> None:
    names = ("stall", "gap", "without", "first token", "host", "verify", "stage", "publish")
    cells = [spread(figures[n]) if figures.get(n) else "–" for n in names]
    sizes = [f"{np.median(figures[n]):.2f}" if n in figures else "–" for n in ("file", "sent")]
    print(f"| {name} | {' | '.join([*sizes, *cells])} |", flush=True)


def spread(values: list[float]) -> str:
    """Return median [quartiles]; long times in whole ms."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    digits = 0 if middle >= 100 else 1
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--model", default="tiny", choices=vllm_workers.MODELS)
    p.add_argument("--cores", default="0,1", help="trainer and client, engines")
    p.add_argument("--requests", type=int, default=32, help="in flight")
    p.add_argument("--publishes", type=int, default=10)
    p.add_argument("--methods", default="path,stream,delta", help="of path, stream and delta")
    p.add_argument("--kv", default="keep,recompute,abort")
    p.add_argument("--rival", type=int, default=1)
    p.add_argument("--learning-rate", type=float, default=1e-6)
    p.add_argument("--dtype", default="")
    p.add_argument("--scratch", default="", help="where the large model is kept")
    p.add_argument("--json", default="", help="file for all figures")
    p.add_argument("--dry", action="store_true", help="as small as it gets")
    args = p.parse_args()
    if args.dry:
        args.publishes, args.requests, args.methods, args.kv = 1, 2, "path", "keep"
    args.dtype = args.dtype or ("float32" if args.model == "tiny" else "bfloat16")
    os.sched_setaffinity(0, process.cores_of(args.cores)[:1])
    everything = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with vllm_workers.model_dir(args.model, Path(args.scratch or directory)) as model:
            print(
                f"{args.model}, {args.dtype}, {args.requests} requests in flight, "
                f"{args.publishes} publishes; load average {os.getloadavg()[0]:.1f}\n\n"
                "| how | file, MB | sent, MB | stall | gap | without | first token | host | "
                "verify | stage | publish |\n|---|---|---|---|---|---|---|---|---|---|---|",
                flush=True,
            )
            trainer = Trainer(model, args.dtype, args.learning_rate)
            # Not all pairs: methods differ before the engine has the file, policies afterwards.
            methods, policies = args.methods.split(","), args.kv.split(",")
            pairs = [(methods[0], kv) for kv in policies] + [(m, policies[0]) for m in methods[1:]]
            for method, kv in pairs:
                figures = asyncio.run(ours(model, trainer, method, kv, args, scratch))
                everything[f"{method}, {kv}"] = figures
                show(f"{method}, {kv}", figures)
            if args.rival:
                for kv, figures in rivals(model, trainer, args, scratch).items():
                    everything[f"vLLM's own, {kv}"] = figures
                    show(f"vLLM's own, {kv}", figures)
            everything["scale"] = scale(trainer, args.publishes)
    ratios(everything)
    if args.json:
        Path(args.json).write_text(json.dumps(everything))


def ratios(everything: dict[str, dict[str, list[float]]]) -> None:
    """Print stalls in multiples of a copy's time and of the rival's."""
    scales = everything["scale"]
    print("\n" + ", ".join(f"{name} {spread(values)} ms" for name, values in scales.items()))
    copy = float(np.median(scales["copy"]))
    for name, figures in everything.items():
        if not figures.get("stall"):
            continue
        stall = float(np.median(figures["stall"]))
        kv = "recompute" if name.endswith("recompute") else "keep"
        line = f"{name}: stall {stall / copy:.1f} × copy"
        if theirs := everything.get(f"vLLM's own, {kv}", {}).get("stall"):
            line += f", {stall / float(np.median(theirs)):.2f} of vLLM's own ({kv})"
        print(line)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
