"""Measure publishing only changed weights: share of bytes, time, and equality of every bit.

    python -m experiments.bench.delta                       # everything, about four minutes
    python -m experiments.bench.delta --part=grpo           # a real run's updates
    python -m experiments.bench.delta --part=codec          # only the delta, 0.5B shape
    python -m experiments.bench.delta --part=wire           # path, stream and delta, 0.5B shape

Weights are bf16, their masters float32. `grpo` runs configs/arithmetic.py at the given learning
rates, and publishes every step to one JAX server by delta. `codec` and `wire` have Qwen2.5-0.5B's
shapes, N(0, 0.02) and norms of 1. A step moves every master by lr · u. With `first`, u is ±1 as in
AdamW's first step, the largest possible. With `later` it is N(0, 0.23), as for gradients that are
noise (b1 = 0.9). Baselines are writing the whole file with its checksum, copying that file, and the
other two ways of publishing. The server of `wire` has an engine that loads nothing. All results are
compared bit by bit. The trainer has the first of `--cores`, the server the second. Figures are
medians [quartiles].
"""

import argparse
import asyncio
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from experiments.bench.process import cores_of, median_spread
from rlx import serve
from rlx.fleet import delta, publish
from rlx.fleet.requests import EngineStatus
from rlx.launch.local import CpuPlan, LocalServers

STEPS = {
    "first": lambda rng, n: np.where(rng.random(n, np.float32) < 0.5, 1, -1).astype(np.float32),
    "later": lambda rng, n: 0.23 * rng.standard_normal(n, np.float32),
}
Tensors = dict[str, np.ndarray]


def grpo(steps: int, rates: list[float], cores: list[int]) -> None:
    """Print the changed elements and bytes of each step of a real run."""
    print(
        "\n| learning rate | steps | changed, % | bytes, % of the file | stall, ms | publish, s |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for rate in rates:
            rows = list(_trained(rate, steps, cores, directory))
            columns = [median_spread(column) for column in zip(*rows, strict=True)]
            print(f"| {rate:g} | {steps} | {' | '.join(columns)} |", flush=True)


def _trained(rate: float, steps: int, cores: list[int], directory: str) -> Iterator[tuple]:
    from configs.arithmetic import get_config
    from rlx.model import hf
    from rlx.rollout.data import Cursor
    from rlx.rollout.executor import Executor
    from rlx.rollout.staleness import Limits
    from rlx.run.inputs import prepare
    from rlx.train.train_options import TrainOptions
    from rlx.train.update import JaxUpdate

    c = get_config()
    c.optimizer.learning_rate, c.model.publish_dtype = rate, "bfloat16"
    inputs = prepare(c)
    _, weights = hf.load(inputs.model_dir, "float32")
    update = JaxUpdate(inputs.model_config, TrainOptions.of(c))
    state = update.init(weights)
    options = {"slots": c.fleet.slots, "max_model_len": 192, "dtype": "bfloat16"}
    with LocalServers(inputs.model_dir, workdir=directory, plan=_plan(cores), **options) as local:
        inputs.reward_pool.start()
        fleet = local.fleet()
        limits = Limits(c.rollout.batch_prompts, c.rollout.max_staleness, 48)
        executor = Executor(inputs.workflow, Cursor(inputs.train_rows, 0), limits, fleet, seed=0)
        executor.start()
        try:
            executor.loop.run(fleet.connect())
            old = hf.to_hf(state.params, inputs.model_config, "bfloat16")
            for version in range(steps + 1):
                new = hf.to_hf(state.params, inputs.model_config, "bfloat16")
                report = executor.loop.run(fleet.publish(version, new, "delta"))
                executor.set_version(version)
                if version:
                    share = 100 * report.sent_bytes / report.num_bytes
                    yield changed(old, new), share, 1e3 * report.stall_seconds, report.seconds
                old = new
                if version < steps:
                    groups = executor.collect(timeout=120)
                    state, _ = update.update(state, groups)
            executor.loop.run(fleet.close())
        finally:
            executor.close()
            inputs.reward_pool.close()


def changed(old: Tensors, new: Tensors) -> float:
    """Return the share of elements whose bits differ, in %."""
    count = sum(int((old[k].view(np.uint16) != new[k].view(np.uint16)).sum()) for k in old)
    return 100 * count / sum(value.size for value in old.values())


def shaped(scale: float) -> Tensors:
    """Return float32 masters of Qwen2.5-0.5B's shapes; `scale` shrinks the layers."""
    import dataclasses

    import jax

    from experiments.bench.train_step_workers import MODELS
    from rlx.model import params

    config = MODELS["0.5b"]
    if scale < 1:
        config = dataclasses.replace(config, num_layers=1, vocab_size=4096)
    rng, out = np.random.default_rng(0), {}
    for path, leaf in jax.tree.leaves_with_path(params.shapes(config)):
        name = jax.tree_util.keystr(path)
        out[name] = 0.02 * rng.standard_normal(leaf.shape, np.float32)
        if "norm" in name:
            out[name] = np.ones(leaf.shape, np.float32)
    return out


def moved(masters: Tensors, kind: str, rate: float, rng: np.random.Generator) -> Tensors:
    """Update the masters in place; return them as bf16."""
    out = {}
    for name, value in masters.items():
        value += rate * STEPS[kind](rng, value.size).reshape(value.shape)
        out[name] = value.astype(ml_dtypes.bfloat16)
    return out


def codec(masters: Tensors, rounds: int, rate: float, room: Path) -> None:
    """Time encoding and applying, and writing and copying the whole file."""
    print(
        "\n| step | changed, % | bytes, % | encode, s | apply, s | write file, s | copy file, s |\n"
        "|---|---|---|---|---|---|---|"
    )
    rng = np.random.default_rng(1)
    base, new, made, result, copy = (room / name for name in ("base", "new", "d", "result", "copy"))
    for kind in STEPS:
        old, rows = moved(masters, kind, rate, rng), []
        publish.write_weights(old, base)
        for round_ in range(rounds + 1):
            now = moved(masters, kind, rate, rng)
            made.touch()
            result.touch()
            write, crc = timed(lambda now=now: publish.write_weights(now, new))
            encode, (size, _) = timed(lambda: delta.encode(base, new, made, 1 << 40))
            apply, got = timed(lambda: delta.apply(base, made, result))
            copying, _ = timed(lambda: shutil.copyfile(new, copy))
            assert got == crc
            assert _same(new, result), "the result is another file"
            if round_:  # the first one allocates memory
                row = 100 * size / new.stat().st_size, encode, apply, write, copying
                rows.append((changed(old, now), *row))
            old = now
            os.replace(new, base)
            for path in (made, result, copy):
                path.unlink()
        columns = " | ".join(median_spread(column) for column in zip(*rows, strict=True))
        print(f"| {kind} | {columns} |", flush=True)


def timed(function: Callable) -> tuple[float, object]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def _same(one: Path, two: Path) -> bool:
    a, b = np.memmap(one, np.uint8, "r"), np.memmap(two, np.uint8, "r")
    return a.size == b.size and np.array_equal(a, b)


class Loading:
    """An engine that neither loads nor generates."""

    version = 0

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def load(self, path: str, version: int, kv: str = "keep") -> int:
        self.version = version
        return 0

    def status(self) -> EngineStatus:
        return EngineStatus(self.version, 0, 0, 1, 1 << 20, 0, False)


async def wire(masters: Tensors, rounds: int, rate: float, local: LocalServers) -> None:
    """Time a whole publish, from bf16 arrays to the acknowledgement, three ways in turns."""
    fleet = await asyncio.to_thread(local.fleet)
    await fleet.connect()
    rng, versions = np.random.default_rng(2), itertools.count(1)
    rows: dict[str, list] = {}
    for round_ in range(rounds + 1):
        for method in ("path", "stream", "delta"):
            if method == "delta":  # its base
                await fleet.publish(next(versions), moved(masters, "later", rate, rng), method)
            now = moved(masters, "later", rate, rng)
            report = await fleet.publish(next(versions), now, method)
            assert report.deliveries[0].method == method
            if round_:
                rows.setdefault(method, []).append((report.sent_bytes / 1e6, report.seconds))
    await fleet.close()
    print("\n| way | sent, MB | arrays to acknowledgement, s |\n|---|---|---|")
    for method, values in rows.items():
        columns = " | ".join(median_spread(column) for column in zip(*values, strict=True))
        print(f"| {method} | {columns} |", flush=True)


def _plan(cores: list[int]) -> CpuPlan:
    return CpuPlan(tuple(cores[:1]), (tuple(cores[1:2] or cores),))


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve.main(sys.argv[2:], {"loading": lambda args: Loading()})
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--part", default="all", choices=("all", "grpo", "codec", "wire"))
    p.add_argument("--cores", default="0,1", help="trainer, server")
    p.add_argument("--steps", type=int, default=20, help="of grpo")
    p.add_argument("--rates", default="1e-6,5e-5", help="learning rates of grpo")
    p.add_argument("--rate", type=float, default=1e-6, help="learning rate of the others")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--room", default="/dev/shm")
    p.add_argument("--dry", action="store_true", help="as small as it gets; figures mean nothing")
    args = p.parse_args()
    cores = cores_of(args.cores)
    os.sched_setaffinity(0, cores[:1])
    if args.dry:
        args.steps, args.rounds = 2, 1
    print(f"load average {os.getloadavg()[0]:.1f}")
    if args.part in ("all", "grpo"):
        grpo(args.steps, [float(rate) for rate in args.rates.split(",")], cores)
    if args.part in ("all", "codec", "wire"):
        masters = shaped(0.1 if args.dry else 1)
        total = sum(value.size for value in masters.values())
        print(f"\n{total / 1e6:.0f} M elements, learning rate {args.rate:g}, {args.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=args.room) as room:
        if args.part in ("all", "codec"):
            codec(masters, args.rounds, args.rate, Path(room))
        if args.part in ("all", "wire"):
            command = (sys.executable, "-m", "experiments.bench.delta", "--serve")
            options = {"plan": _plan(cores), "command": command, "publish_dir": room}
            with LocalServers("none", workdir=room, **options) as local:  # type: ignore[arg-type]
                asyncio.run(wire(masters, args.rounds, args.rate, local))
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
