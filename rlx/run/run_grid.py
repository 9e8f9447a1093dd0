"""Run a grid of settings, each by a command in its own WORKDIR; used by rlx/sweep.py.

With `scheduler.type` such a command submits a job and follows it. A finished run is skipped and an
unfinished one resumes its last checkpoint. A run that fails ends no other.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.command import INTERRUPTED, say
from rlx.config import check
from rlx.launch.local import start_on
from rlx.observe.metrics import STARTS
from rlx.observe.run_table import OUTPUT, score, summary
from rlx.run import flags, resume
from rlx.run.allocate import VISIBLE, apply_allocation, gpus
from rlx.run.scheduler import FAILED, steps_in
from rlx.run.trainers import PARENT
from rlx.system import exit_reason
from rlx.system.jsonl import append_jsonl
from rlx.system.signals import interrupts
from rlx.system.workdir_lock import holder, make_directory

_LAST_SECONDS = 15.0  # until runs that were interrupted twice are killed
_LOOK_SECONDS = 0.2
_LINES = 40  # last lines of a run's output
# Between values, not inside the brackets of one, which may hold others.
_COMMA = re.compile(r",(?!(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")

Slot = tuple[Sequence[int], Sequence[str]]  # cores and GPUs of one run at a time


def grid(axes: Sequence[str], count: int = 0) -> dict[str, list[str]]:
    """Return name → flags of each combination of KEY=V1,V2, of a random `count`; or UserError."""
    choices = []
    for axis in axes:
        key, _, values = axis.partition("=")
        if not values or key.startswith("-"):
            remedy = "write KEY=VALUE,VALUE, such as seed=0,1,2"
            raise UserError(f"{axis!r} is not an axis of a sweep; {remedy}")
        choices.append([f"{key}={value}" for value in _COMMA.split(values)])
    pairs = [*itertools.product(*choices)]
    by_name = {re.sub(r"[^\w.+=,-]+", "_", ",".join(pair)): pair for pair in pairs}
    if len(by_name) < len(pairs) or len({axis.partition("=")[0] for axis in axes}) < len(axes):
        raise UserError(f"{' '.join(axes)} has a key or a value twice; give each once")
    chosen = sorted(random.Random(0).sample(range(len(pairs)), min(count, len(pairs))))
    names = [*by_name]
    picks = [names[i] for i in chosen] or names
    return {name: [f"--config.{pair}" for pair in by_name[name]] for name in picks}


def slots(jobs: int, config: ConfigDict) -> list[Slot]:
    """Return equal shares of this process's cores and GPUs, all if runs compute elsewhere."""
    cores, cards = sorted(os.sched_getaffinity(0)), gpus()
    if jobs > 0 and config.scheduler.type != "local":
        return [(cores, ())] * jobs
    if jobs < 1 or 0 < len(cards) < jobs:
        most = f"1 to {len(cards)}, the number of GPUs" if cards else "1 or more"
        raise UserError(f"--jobs={jobs} does not fit; give {most}")
    return [(_share(cores, i, jobs) or cores, _share(cards, i, jobs)) for i in range(jobs)]


def _share(items: Sequence, i: int, count: int) -> Sequence:
    return items[len(items) * i // count : len(items) * (i + 1) // count]


def unfinished_runs(runs: Mapping[str, Sequence[str]], workdir: Path) -> dict[str, Sequence[str]]:
    """Return the runs that are not finished in `workdir`/NAME; UserError for a wrong setting."""
    configs = {name: config_of(argv) for name, argv in runs.items()}
    for config in configs.values():
        check(config)
    return {n: runs[n] for n, c in configs.items() if not resume.finished_steps(c, workdir / n)}


def halve(
    runs: Mapping[str, Sequence[str]], workdir: Path, free: list[Slot], rounds: int
) -> tuple[int, dict[str, Sequence[str]]]:
    """Run all up to 2^-rounds of their steps, keep the better half, and so on.

    Only what runs have recorded up to there decides, so that the same command decides again alike.
    Returns `run_all`'s status, and the runs that are left to finish.

    References: Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943.
    """
    left, status = dict(runs), 0
    for n in range(rounds, 0, -1):
        steps = {name: max(1, config_of(argv).total_steps >> n) for name, argv in left.items()}
        status = run_all(left, workdir, free, steps) or status
        if status == INTERRUPTED:
            break
        scores = {name: score(workdir / name, steps[name]) for name in left}
        order = sorted(left, key=lambda name: -scores[name])  # equal ones stay in their order
        for name in order[(len(order) + 1) // 2 :]:
            del left[name]
            say(f"{name}: ends at step {steps[name]} with a score of {scores[name]:.3g}")
    return status, left


def config_of(argv: Sequence[str]) -> ConfigDict:
    """Return the config that these flags of a sweep stand for."""
    return apply_allocation(flags.parse(["rlx.sweep", *argv])[0])


def run_all(
    runs: Mapping[str, Sequence[str]], workdir: Path, free: list[Slot],
    steps: Mapping[str, int] | None = None,
) -> int:  # fmt: skip
    """Run all in `workdir`/NAME, one for each slot at a time; return an exit status.

    Ctrl-C, or its number of `steps`, lets a run save and end; a second Ctrl-C ends it at once.
    """
    status, stop, until, signals = 0, Event(), {**(steps or {})}, list[int]()
    todo = deque(n for n in runs if n not in until or steps_in(workdir / n) < until[n])
    running: dict[subprocess.Popen[bytes], tuple[str, Slot]] = {}
    with interrupts(stop.set, forward=signals.append):
        try:
            while running or (todo and status != INTERRUPTED):
                while todo and free and not stop.is_set():
                    name, slot = todo.popleft(), free.pop()
                    say(f"{name}: starts, {len(todo)} wait")
                    running[_start(runs[name], workdir / name, slot)] = name, slot
                stopped = stop.is_set() and status != INTERRUPTED
                status = INTERRUPTED if stopped else status
                for process, (name, _) in running.items():
                    over = name in until and steps_in(workdir / name) >= until[name]
                    if over or stopped:
                        process.send_signal(signals[0] if stopped else signal.SIGINT)
                    if over:
                        del until[name]
                for process in [each for each in running if each.poll() is not None]:
                    name, slot = running.pop(process)
                    free.append(slot)
                    say(f"{name}: {_end(workdir / name, process.returncode)}")
                    failed = process.returncode not in (0, *[INTERRUPTED] * bool(steps))
                    status = status or FAILED * failed
                time.sleep(_LOOK_SECONDS)
        finally:
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_SECONDS)
                process.kill()
    return status


def _start(argv: Sequence[str], workdir: Path, slot: Slot) -> subprocess.Popen[bytes]:
    make_directory(workdir)
    cores, cards = slot
    visible = {VISIBLE: ",".join(cards)} if cards else {}
    command = (sys.executable, "-m", "rlx.main", *argv, f"--workdir={workdir}")
    env = {**os.environ, **visible, PARENT: str(os.getpid())}
    with (workdir / OUTPUT).open("ab") as out:
        return start_on(command, cores, stdin=subprocess.DEVNULL, stdout=out, env=env)


def _end(workdir: Path, status: int) -> str:
    """Return how a run ended; note it in its directory if it failed before it could."""
    if status in (0, INTERRUPTED):
        return "stopped" if status else "finished"
    with (workdir / OUTPUT).open(encoding="utf-8", errors="replace") as out:
        last = exit_reason.last_words([*deque(out, _LINES)])
    if summary(workdir, {})["state"] != "failed" and not holder(workdir):
        append_jsonl(workdir / STARTS, {"ended": "failed", "error": last})
    return f"failed, {exit_reason.words(status, 0)}: {last}"
