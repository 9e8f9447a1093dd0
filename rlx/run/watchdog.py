"""Report a hang in one line, with the stacks of all threads in WORKDIR/stacks.txt.

    every second   signs of life ─▶ look(state, now, signs) ─▶ state, lines

The watchdog ends nothing. A sign is late after several times its longest quiet period so far.
While a call of C code holds the interpreter, no line can be printed, and a thread of faulthandler
writes the stacks.
"""

import asyncio
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from rlx.base import UserError
from rlx.cli.command import say
from rlx.cli.user_code import frames, of_user, place_of
from rlx.observe.run_status import STATUS
from rlx.system.jsonl import write_atomically

# Quiet seconds that are never late.
SECONDS = {"loop": 10.0, "user": 30.0, "call": 60.0, "rollout": 60.0, "step": 1800.0}
_TICK, _STOPPED = 1.0, 10.0  # seconds between looks; a longer gap means a stopped process
_TIMES, _AGAIN = 5.0, 4.0  # late: times the longest quiet; times the last reported one
_STATUS = 5.0  # seconds between two writes of the status
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/debugpy")
_BUSY = 30.0  # CPU seconds that count as life before the first step, while it compiles


class Sign(NamedTuple):
    """A sign of life."""

    mark: Hashable  # changes with each sign; None while there is nothing to do
    what: Callable[[], str]  # returns the sentence for a late sign
    since: float = 0.0  # time of the mark; 0.0 if unknown


class Quiet(NamedTuple):
    """Time of a mark's last change, the longest quiet before it, and the last report."""

    mark: Hashable
    since: float
    longest: float = 0.0
    reported: float = 0.0


def look(
    state: Mapping[str, Quiet], now: float, signs: Mapping[str, Sign], least: Mapping[str, float]
) -> tuple[dict[str, Quiet], list[str]]:
    """Return the state after a look at all signs, and a line for each late one.

    At `now`, in monotonic seconds, a sign that is quiet for its `least` seconds is not late.
    """
    after, lines = {}, []
    for name, sign in signs.items():
        begun = sign.since or now
        was = state.get(name, Quiet(sign.mark, begun))
        if was.mark != sign.mark:
            lasted = 0.0 if was.mark is None else now - was.since
            was = Quiet(sign.mark, begun, max(was.longest, lasted))
        quiet = now - was.since
        late = max(least[name], _TIMES * was.longest, _AGAIN * was.reported)
        if sign.mark is not None and quiet >= late:
            lines.append(f"{sign.what()}, for {quiet:.0f} s")
            was = was._replace(reported=quiet)
        after[name] = was
    return {**state, **after}, lines


@contextmanager
def watchdog(workdir: Path) -> Iterator[Callable[[Any], None]]:
    """Watch this thread during the block; yield a function that adds the parts of a run."""
    held, opened, path = list[Any](), list[TextIO](), workdir / "stacks.txt"
    ended, own = threading.Event(), threading.get_ident()

    def watch() -> None:
        state: dict[str, Quiet] = {}
        written, woken = -_STATUS, time.monotonic()
        last = woken
        while not ended.wait(_TICK):
            now = time.monotonic()
            if not opened and workdir.is_dir():
                with suppress(OSError):
                    opened.append(path.open("a"))
            if opened:  # each time anew, so that it writes only if no thread runs
                faulthandler.dump_traceback_later(SECONDS["loop"], file=opened[0])
            if now - last > _STOPPED:  # nothing could run meanwhile
                state, woken = {}, now
            last, signs = now, _signs(own, held[0] if held else None, woken)
            state, lines = look(state, now, signs, SECONDS)
            if held and now - written >= _STATUS:
                written = now
                with suppress(OSError, UserError):
                    write_atomically(workdir / STATUS, json.dumps(_status(held[0])).encode())
            for line in lines if not ended.is_set() else ():
                with suppress(OSError):
                    workdir.mkdir(parents=True, exist_ok=True)
                    with path.open("a") as file:
                        print(f"{time.ctime()}: {line}", file=file, flush=True)
                        faulthandler.dump_traceback(file)
                text = f"{line}; {path} has the stacks of all threads"
                (held[0].progress.message if held else say)(text)

    (thread := threading.Thread(target=watch, name="watchdog", daemon=True)).start()
    try:
        yield held.append
    finally:
        ended.set()
        thread.join(_TICK)  # it may wait for a lock of the interrupted code
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):
            for file in opened:
                file.close()
                if not path.stat().st_size:
                    path.unlink()


def _signs(main: int, parts: Any, woken: float) -> dict[str, Sign]:
    """Return the signs of life of the thread `main`, and of a run's parts once they are built."""
    inside = frames(main)
    runs = [i for i, f in enumerate(inside) if f.f_code.co_qualname == "run" and not of_user(f)]
    users = [id(frame) for frame in inside[max(runs, default=-1) + 1 :] if of_user(frame)]
    call = users[0] if users else parts and parts.hooks.under_way
    mark = None if _debugging(inside) else call
    found = {"user": Sign(mark, lambda: f"{place_of(inside)} does not return")}
    if parts is None:
        return found
    executor, loop = parts.executor, parts.loop
    blocked = frames(loop.thread.ident or 0)
    turned = None if _debugging(blocked) else loop.turned()
    at = "the loop of all rollouts is blocked at"
    found["loop"] = Sign(turned, lambda: f"{at} {place_of(blocked)}")
    if calls := list(loop.threads.calls.values()):
        name, since = calls[0][0], max(calls[0][1], woken)
        found["call"] = Sign((name, since), lambda: f"{name} does not return", since)
    if parts.inputs.options.online:  # applications may pause
        return found
    counts = executor.counters()
    if attempts := executor.under_way():
        task, row, begun = attempts[0]
        waits, moved = _waits_at(task), 0
        about: Hashable = row, begun, 0
        words = f"the rollout of {row} is not done, it is at {place_of(waits)}"
        if not counts["accepted"]:  # a server may compile
            moved = getattr(parts.fleet, "tokens", 0)
            about = None if "/fleet/" in place_of(waits[-1:]) else (row, begun, moved)
        found["rollout"] = Sign(about, lambda: words, 0.0 if moved else max(begun, woken))
    step, phase, since = parts.progress.doing()
    busy = 0 if step else int(time.process_time() / _BUSY)
    queues = ", ".join(f"{counts[name]} {name}" for name in ("running", "buffered", "failed"))
    doing = f"no step after {step}; {phase} since {since:.0f} s; {queues}"
    found["step"] = Sign((step, busy), lambda: doing)
    return found


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


def _debugging(frames: list[FrameType]) -> bool:
    """Return whether a thread waits at a debugger's prompt."""
    return any(name in frame.f_code.co_filename for frame in frames for name in _DEBUGGERS)


def _waits_at(task: asyncio.Task) -> list[FrameType]:
    """Return the frames of a task's waiting coroutines, outermost first."""
    found: list[FrameType] = []
    each: Any = task.get_coro()
    while frame := getattr(each, "cr_frame", None):
        found.append(frame)
        each = getattr(each, "cr_await", None)
    return found
