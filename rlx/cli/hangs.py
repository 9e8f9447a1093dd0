"""Report a hang of a process in one line, with the stacks of all its threads.

    every second   signs of life ─▶ look(state, now, signs) ─▶ state, lines

A report ends nothing. A sign is late after several times its longest quiet period so far.
While a call of C code holds the interpreter, no line can be printed, and a thread of faulthandler
writes the stacks.
"""

import asyncio
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TextIO

from rlx.cli.user_code import frames, place_of
from rlx.system.threads import last_turn

# Quiet seconds that are never late.
SECONDS = {
    "loop": 10.0, "user": 30.0, "call": 60.0, "rollout": 60.0, "engine": 300.0, "step": 1800.0,
}  # fmt: skip
_TICK, _STOPPED = 1.0, 10.0  # seconds between looks; a longer gap means a stopped process
_TIMES, _AGAIN = 5.0, 4.0  # late: times the longest quiet; times the last reported one
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/debugpy")


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
        start = sign.since or now
        was = state.get(name, Quiet(sign.mark, start))
        if was.mark != sign.mark:
            lasted = 0.0 if was.mark is None else now - was.since
            was = Quiet(sign.mark, start, max(was.longest, lasted))
        quiet = now - was.since
        late = max(least[name], _TIMES * was.longest, _AGAIN * was.reported)
        if sign.mark is not None and quiet >= late:
            lines.append(f"{sign.what()}, for {quiet:.0f} s")
            was = was._replace(reported=quiet)
        after[name] = was
    return {**state, **after}, lines


@contextmanager
def reported(
    signs: Callable[[float], Mapping[str, Sign]],
    say: Callable[[str], None],
    path: Path | None = None,
) -> Iterator[None]:
    """Look at `signs(woken)` during the block; `say` what is late, and write the stacks to `path`.

    `woken` is when the process started or went on after a stop. Without a path, stderr gets the
    stacks. A directory that does not exist yet is made by the first report.
    """
    over, opened = threading.Event(), list[TextIO]()

    def stacks(line: str) -> str:
        """Write a line and the stacks; return where."""
        if path is None:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            return "the stacks of all threads are above"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                print(f"{time.ctime()}: {line}", file=file, flush=True)
                faulthandler.dump_traceback(file)
        return f"{path} has the stacks of all threads"

    def watch() -> None:
        state: dict[str, Quiet] = {}
        last = woken = time.monotonic()
        while not over.wait(_TICK):
            now = time.monotonic()
            if path and not opened and path.parent.is_dir():
                with suppress(OSError):
                    opened.append(path.open("a"))
            if opened:  # each time anew, so that it writes only if no thread runs
                faulthandler.dump_traceback_later(SECONDS["loop"], file=opened[0])
            if now - last > _STOPPED:  # nothing could run meanwhile
                state, woken = {}, now
            last = now
            state, lines = look(state, now, signs(woken), SECONDS)
            for line in lines if not over.is_set() else ():
                say(f"{line}; {stacks(line)}")

    (thread := threading.Thread(target=watch, name="watchdog", daemon=True)).start()
    try:
        yield
    finally:
        over.set()
        thread.join(_TICK)  # it may wait for a lock of the interrupted code
        if path:
            faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):
            for file in opened:
                file.close()
                if path and not path.stat().st_size:
                    path.unlink()


def loop_sign(turned: float, thread: int, name: str) -> Sign:
    """Return the sign of an event loop in a thread, which `turned` last at that time."""
    stack = frames(thread)
    mark = None if debugging(stack) else turned
    return Sign(mark, lambda: f"{name} is blocked at {place_of(stack)}")


def debugging(stack: list[FrameType]) -> bool:
    """Return whether a thread with this stack waits at a debugger's prompt."""
    return any(name in frame.f_code.co_filename for frame in stack for name in _DEBUGGERS)


@contextmanager
def reported_here(
    name: str, further: Callable[[float], Mapping[str, Sign]] = lambda woken: {}
) -> Iterator[None]:
    """Report on stderr when the running event loop is blocked, and what `further` signs say."""
    turned, thread = last_turn(asyncio.get_running_loop()), threading.get_ident()

    def signs(woken: float) -> dict[str, Sign]:
        return {"loop": loop_sign(turned(), thread, name), **further(woken)}

    with reported(signs, lambda text: print(text, file=sys.stderr, flush=True)):
        yield
