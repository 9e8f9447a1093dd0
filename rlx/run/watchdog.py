"""Watch a run: its signs of life, and the status that `rlx status` reads."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rlx.base import UserError
from rlx.cli.command import say
from rlx.cli.hangs import Sign, debugging, loop_sign, reported
from rlx.cli.user_code import frames, of_user, place_of
from rlx.observe.run_status import STATUS
from rlx.rollout.executor import Executor
from rlx.system.jsonl import write_atomically
from rlx.system.threads import LoopThread

_STATUS_SECONDS = 5.0  # seconds between two writes of the status
_BUSY_SECONDS = 30.0  # CPU seconds that count as life before the first step, while it compiles


@contextmanager
def watchdog(workdir: Path) -> Iterator[Callable[[Any], None]]:
    """Watch this thread during the block; yield a function that adds the parts of a run.

    WORKDIR/stacks.txt gets the stacks of what hangs.
    """
    run_parts, main, last_write = list[Any](), threading.get_ident(), [-_STATUS_SECONDS]

    def signs(woken: float) -> dict[str, Sign]:
        result = _signs(main, run_parts[0] if run_parts else None, woken)
        if run_parts and (now := time.monotonic()) - last_write[0] >= _STATUS_SECONDS:
            last_write[0] = now
            with suppress(OSError, UserError):
                write_atomically(workdir / STATUS, json.dumps(_status(run_parts[0])).encode())
        return result

    def tell(text: str) -> None:
        (run_parts[0].progress.message if run_parts else say)(text)

    with reported(signs, tell, workdir / "stacks.txt"):
        yield run_parts.append


def _signs(main: int, parts: Any, woken: float) -> dict[str, Sign]:
    """Return the signs of life of the thread `main`, and of a run's parts once they are built."""
    inside = frames(main)
    runs = [i for i, f in enumerate(inside) if f.f_code.co_qualname == "run" and not of_user(f)]
    users = [id(frame) for frame in inside[max(runs, default=-1) + 1 :] if of_user(frame)]
    call = users[0] if users else parts and parts.hooks.under_way
    mark = None if debugging(inside) else call
    signs = {"user": Sign(mark, lambda: f"{place_of(inside)} does not return")}
    if parts is None:
        return signs
    executor = parts.executor
    signs |= rollout_signs(executor, parts.loop, parts.fleet, woken)
    if parts.inputs.options.online:  # applications may pause
        signs.pop("rollout", None)
        return signs
    counts = executor.counters()
    step, phase, since = parts.progress.doing()
    busy = 0 if step else int(time.process_time() / _BUSY_SECONDS)
    queues = ", ".join(f"{counts[name]} {name}" for name in ("running", "buffered", "failed"))
    doing = f"no step after {step}; {phase} since {since:.0f} s; {queues}"
    signs["step"] = Sign((step, busy), lambda: doing)
    return signs


def rollout_signs(
    executor: Executor, loop: LoopThread, fleet: Any, woken: float
) -> dict[str, Sign]:
    """Return the signs of the rollouts on a loop, which a fleet's servers generate."""
    signs = {"loop": loop_sign(loop.turned(), loop.thread.ident or 0, "the loop of all rollouts")}
    if calls := list(loop.threads.calls.values()):
        name, since = calls[0][0], max(calls[0][1], woken)
        signs["call"] = Sign((name, since), lambda: f"{name} does not return", since)
    if attempts := executor.under_way():
        task, row, start = attempts[0]
        waits, moved = _waits_at(task), 0
        about: Hashable = row, start, 0
        words = f"the rollout of {row} is not done, it is at {place_of(waits)}"
        if not executor.counters()["accepted"]:  # a server may compile
            moved = getattr(fleet, "tokens", 0)
            about = None if "/fleet/" in place_of(waits[-1:]) else (row, start, moved)
        signs["rollout"] = Sign(about, lambda: words, 0.0 if moved else max(start, woken))
    return signs


def _status(parts: Any) -> dict[str, Any]:
    """Return what each part of a run does now, for `rlx status`."""
    step, phase, since = parts.progress.doing()
    counts = parts.executor.counters()
    return {
        "time": time.time(), "pid": os.getpid(), "step": step, "phase": phase,
        "phase_seconds": since, "version": parts.executor.version,
        "evaluations": parts.held_out.under_way, "servers": getattr(parts.fleet, "states", dict)(),
        **{name: counts[name] for name in ("running", "buffered", "failed", "skipped")},
    }  # fmt: skip


def _waits_at(task: asyncio.Task) -> list[FrameType]:
    """Return the frames of a task's waiting coroutines, outermost first."""
    stack: list[FrameType] = []
    coroutine: Any = task.get_coro()
    while frame := getattr(coroutine, "cr_frame", None):
        stack.append(frame)
        coroutine = getattr(coroutine, "cr_await", None)
    return stack
