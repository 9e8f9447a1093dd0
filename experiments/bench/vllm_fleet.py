"""Compare tokens/s on vLLM through workflow and gRPC with vLLM's own LLM.generate.

    python -m experiments.bench.vllm_fleet                        # tiny, 64 and 128 sequences
    python -m experiments.bench.vllm_fleet --model=0.5b --slots=64 --groups=8 --most=96
    python -m experiments.bench.vllm_fleet --model=135m --slots=16,64 --seeds=yes --engine=jax
    python -m experiments.bench.vllm_fleet --dry                  # a minute; figures mean nothing

Both make the same requests: prompts, numbers of new tokens (uniform in [least, most]), temperature
1, sampled logprobs, and seeds if any. The minimum suppresses EOS. rlx's path is the RLVR workflow
without its reward → Fleet → gRPC → `rlx.serve --engine=vllm` (or jax). vLLM's side is one offline
`LLM.generate` call with the same engine settings. Engines and server are on the second of
`--cores`; rlx's client, like a trainer, is on the first. They take turns; the share is the median
over rounds of the quotient. CPU is ms on the engines' core per 1,000 tokens. Other work on the
machine changes it less than tokens/s, which suffer most when the client waits for its core.
"""

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from experiments.bench import process, vllm_workers
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import GenerateCall, PartialSample
from rlx.launch.local import CpuPlan, LocalServers
from rlx.model.directory import load_config
from rlx.rewards.reward_pool import Graded
from rlx.rollout import arithmetic
from rlx.rollout.workflows import RLVR, Prompts, Task
from rlx.run.tokenizer_files import load_tokenizer

TARGET = 0.95
SEED_STEP = 1 << 10


class NoReward:
    """Stands in for the reward pool and computes nothing."""

    async def grade(self, calls):
        return Graded([0.0] * len(calls), [{} for _ in calls])


class Unseeded(Fleet):
    """A Fleet that removes the seeds of requests."""

    async def generate(self, prompt_tokens, sampling, n, *, session=None, priority=0):
        sampling = dataclasses.replace(sampling, seed=None)
        samples = [PartialSample(index) for index in range(n)]
        call = GenerateCall(np.asarray(prompt_tokens, np.int32), sampling, session, priority)
        await self._finish(call, samples)
        return [sample.completion() for sample in samples]


@dataclasses.dataclass(frozen=True)
class Work:
    """Return the requests of one round, the same for both sides: rows, new tokens and seeds."""

    rows: list[dict]
    lengths: list[int]
    seeds: list[int]


def work_of(round_: int, args: argparse.Namespace, slots: int) -> Work:
    groups = args.groups * slots // args.samples
    rng = np.random.default_rng(round_)
    return Work(
        arithmetic.problems(round_, "train", groups),
        rng.integers(args.least, args.most + 1, groups).tolist(),
        [SEED_STEP * (round_ * groups + k + 1) for k in range(groups)],
    )


async def through_fleet(fleet: Fleet, workflow: RLVR, work: Work, samples: int) -> float:
    """Return tokens/s of one round through the fleet."""
    start = time.perf_counter()

    async def group(k: int) -> int:
        n = work.lengths[k]
        exactly = Sampling(max_new_tokens=n, min_new_tokens=n)
        done = await workflow.run(
            fleet, Task(work.rows[k], k, work.seeds[k], sampling=exactly, n=samples)
        )
        return sum(int(t.loss_mask.sum()) for t in done.trajectories)

    tokens = sum(await asyncio.gather(*(group(k) for k in range(len(work.rows)))))
    assert tokens == samples * sum(work.lengths)
    return tokens / (time.perf_counter() - start)


def offline(
    rival: vllm_workers.Rival, prompts: Prompts, work: Work, samples: int, seeded: bool
) -> float:
    """Return tokens/s of the same requests in one call."""
    requests = [
        [prompts.ids(row), n, seed + k if seeded else None]
        for row, n, seed in zip(work.rows, work.lengths, work.seeds, strict=True)
        for k in range(samples)
    ]
    tokens, seconds = rival.ask(requests)
    assert tokens == samples * sum(work.lengths)
    return tokens / seconds


async def compare(model: Path, slots: int, seeded: bool, args, cores, scratch: Path) -> None:
    """Print one row of the table."""
    options = {"slots": slots, "max_model_len": args.max_model_len, "dtype": args.dtype}
    plan = CpuPlan(tuple(cores[:1]), (tuple(cores[1:2]),))
    config = load_config(model)
    log = scratch / "rival.log"
    prompts = Prompts(load_tokenizer(model))
    workflow = RLVR(prompts, Sampling(), NoReward(), args.samples)  # type: ignore[arg-type]
    stop = list(config.eos_token_ids)
    with (
        LocalServers(model, workdir=scratch, plan=plan, engine=args.engine, **options) as local,
        vllm_workers.Rival(
            "offline", model, cores[1], log, args.vllm_python, stop=stop, **options
        ) as rival,
    ):
        rival.ask()
        addresses = await asyncio.to_thread(local.wait)
        own = {"token": local.token, "publish_dir": local.directory}
        fleet = (Fleet if seeded else Unseeded)(addresses, **own)
        await fleet.connect()
        rounds: list[dict[str, tuple[float, float]]] = []
        pids = {"fleet": local.pids[0], "offline": rival.pid}
        for round_ in range(-1, args.rounds):
            work = work_of(max(round_, 0) if round_ >= 0 else 10_000, args, slots)
            pair = {}
            for side in ("fleet", "offline")[:: 1 if round_ % 2 else -1]:
                before = cpu_seconds(pids[side])
                if side == "fleet":
                    rate = await through_fleet(fleet, workflow, work, args.samples)
                else:
                    rate = await asyncio.to_thread(
                        offline, rival, prompts, work, args.samples, seeded
                    )
                tokens = args.samples * sum(work.lengths)
                pair[side] = rate, 1e6 * (cpu_seconds(pids[side]) - before) / tokens
            if round_ >= 0:  # the first one is a warm-up
                rounds.append(pair)
        await fleet.close()
    report(rounds, slots, seeded)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process and its children so far."""
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def report(rounds: list[dict[str, tuple[float, float]]], slots: int, seeded: bool) -> None:
    ours, our_cpu = np.array([r["fleet"] for r in rounds]).T
    theirs, their_cpu = np.array([r["offline"] for r in rounds]).T
    print(
        f"| {slots} | {'yes' if seeded else 'no'} | {spread(ours)} | {spread(theirs)} | "
        f"{process.median_spread(ours / theirs)} | {TARGET} | {spread(our_cpu)} | "
        f"{spread(their_cpu)} | {process.median_spread(their_cpu / our_cpu)} |",
        flush=True,
    )


def spread(values) -> str:
    """Return median and range, whole numbers."""
    return f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"


def main() -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--model", default="tiny", choices=vllm_workers.MODELS)
    p.add_argument("--engine", default="vllm", choices=("vllm", "jax"), help="of rlx's side")
    p.add_argument("--vllm-python", default=sys.executable, help="that has vLLM for its side")
    p.add_argument("--cores", default="0,1", help="client, engines")
    p.add_argument("--slots", default="64,128", help="sequences decoded together")
    p.add_argument("--seeds", default="yes,no", help="whether each request has one")
    p.add_argument("--samples", type=int, default=8, help="of a group, sharing the prompt")
    p.add_argument("--groups", type=int, default=3, help="times slots: samples of a round")
    p.add_argument("--least", type=int, default=64, help="new tokens")
    p.add_argument("--most", type=int, default=256, help="new tokens")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--dtype", default="")
    p.add_argument("--scratch", default="", help="where the large model is kept")
    p.add_argument("--dry", action="store_true", help="as small as it gets")
    args = p.parse_args()
    if args.dry:
        args.slots, args.rounds, args.groups, args.least, args.most = "8", 1, 1, 4, 8
    args.dtype = args.dtype or ("float32" if args.model == "tiny" else "bfloat16")
    args.max_model_len = args.most + 128  # a prompt in a chat template
    cores = process.cores_of(args.cores)
    os.sched_setaffinity(0, cores[:1])
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(args.scratch or directory)
        with vllm_workers.model_dir(args.model, scratch) as model:
            print(
                f"{args.model} in {args.engine}, {args.dtype}, groups of {args.samples}, "
                f"{args.least} to {args.most} new tokens, {args.rounds} rounds; "
                f"load average {os.getloadavg()[0]:.1f}\n\n"
                "| sequences | seeds | rlx, tokens/s | LLM.generate | share | target | rlx, CPU | "
                "LLM, CPU | share by CPU |\n|---|---|---|---|---|---|---|---|---|",
                flush=True,
            )
            for slots in map(int, args.slots.split(",")):
                for seeds in args.seeds.split(","):
                    coroutine = compare(model, slots, seeds == "yes", args, cores, Path(directory))
                    asyncio.run(coroutine)
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
