"""Find the line of code that keeps an event loop from turning.

    loop:    answer .. answer ............................................... answer
    thread:       ping      ping   no answer: look at the loop's stack, look, look

asyncio's debug mode measures how long a callback took, but names the line at which its task waits
next, not the line that blocked, and says nothing before the callback is over. So a thread looks at
the stack meanwhile. A call that also holds the interpreter (a regular expression, json.loads) is
seen once, as soon as it is over: CPython is still at the call then. py-spy sees inside such calls.
"""

import asyncio
import contextlib
import linecache
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_TICK = 0.02  # seconds between two pings
_LOOK = 0.05  # seconds from a ping to the first look, and between two looks
_LINE = 90  # characters of a source line
_RLX = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_path("stdlib")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/debugpy")

# What a line of the stack matches → what to write in its place; the first that matches counts.
_COMPUTING_REMEDIES = (
    (r"create_default_context|load_verify_locations",
     "a new client reads all certificates: pass http_client=kwargs['http_client'] on to it"),
    (r"<frozen importlib|importlib/", "import it before, at the top of the file"),
)  # fmt: skip
_WAITING_REMEDIES = (
    (r"\btime\.sleep\(|: sleep\(", "await asyncio.sleep(…)"),
    (r"\bSyncAPIClient\.", "use the async client (AsyncOpenAI, AsyncAnthropic)"),
    (r"requests/|urllib3/|http/client\.py|urllib/request\.py|httpx\w*/_client\.py:\d+ Client\.|"
     r"httpcore\w*/_sync",
     "use an async HTTP client (httpx.AsyncClient, aiohttp), or await asyncio.to_thread(…)"),
    (r"subprocess\.py|\bos\.(system|popen|wait)", "use asyncio.create_subprocess_exec"),
    (r"threading\.py:\d+ |queue\.py|concurrent/futures/|\.acquire\(|\.join\(\)|\.result\(",
     "wait by asyncio's own Lock, Queue or Event, or await asyncio.to_thread(…)"),
    (r"asyncio/runners\.py|run_until_complete|nest_asyncio",
     "await it: a loop inside the loop blocks both"),
    (r"sqlite3|psycopg|pymysql|\.execute\w*\(|\.fetch\w*\(",
     "await asyncio.to_thread(…), or use an async driver"),
)  # fmt: skip


class Place(NamedTuple):
    """A line of a stack, by file, line and qualified name of its function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return `agent.py:14 Agent.run: time.sleep(0.5)`."""
        source = " ".join(linecache.getline(self.file, self.line).split())
        source = source if len(source) <= _LINE else f"{source[: _LINE - 1]}…"
        return f"{_short(self.file)}:{self.line} {self.function}: {source}"

    @property
    def owner(self) -> str:
        """Return who wrote the code, by its file: user | framework | python | rlx."""
        if self.file.startswith(_RLX):
            return "rlx"
        if "site-packages" in self.file or "dist-packages" in self.file:
            return "framework"
        return "python" if self.file.startswith((_STDLIB, "<frozen")) else "user"


class LoopWatch:
    """Looks at the stack of a loop's thread, from a thread of its own, while the loop is late.

    Args:
      late: called in the watching thread at each look with the seconds by `own_clock` since the
        loop was asked to turn, those that its thread computed, and its stack, outermost first.
    """

    def __init__(self, late: Callable[[float, float, list[Place]], None]):
        self._late = late
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to watch the running loop; called in its thread."""
        watched = asyncio.get_running_loop(), threading.get_ident(), own_clock()
        threading.Thread(
            target=self._watch, args=watched, name="rlx-loop-watch", daemon=True
        ).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch(
        self, loop: asyncio.AbstractEventLoop, ident: int, clock: Callable[[], float]
    ) -> None:
        cpu = time.pthread_getcpuclockid(ident)

        def look() -> None:
            stack = places(traceback.walk_stack(sys._current_frames().get(ident)))[::-1]
            if stack and not stack[-1].function.endswith("Selector.select"):  # else it is idle
                self._late(clock() - begin, time.clock_gettime(cpu) - computed, stack)

        begin, computed = clock(), time.clock_gettime(cpu)
        while not self._ended.wait(_TICK):
            if clock() - begin > _TICK + _LOOK:  # a call held the interpreter
                look()
            answered = threading.Event()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answered.set)
            while not answered.wait(_LOOK) and not self._ended.is_set():
                look()
            begin, computed = clock(), time.clock_gettime(cpu)


def own_clock() -> Callable[[], float]:
    """Return a clock in seconds that stands still while this thread is ready and has no CPU.

    On a crowded machine that may be most of the time that a callback takes, and is no fault of it.
    """
    path = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def now() -> float:
        ready = 0.0
        with contextlib.suppress(OSError), open(path, "rb") as file:  # not of every kernel
            ready = int(file.read().split()[1]) / 1e9
        return time.monotonic() - ready

    return now


def places(frames: Iterable[tuple[FrameType, int]]) -> list[Place]:
    """Return the places of (frame, line) pairs, as `traceback.walk_stack` gives them."""
    codes = ((frame.f_code, line) for frame, line in frames)
    return [
        Place(code.co_filename, line, code.co_qualname.replace(".<locals>", ""))
        for code, line in codes
    ]


def blamed(stack: Sequence[Place]) -> list[str]:
    """Return the stack's lines from the user's deepest down, else from a framework's, or the last.

    The first is the line whose call does not return; what follows is where it is inside.
    """
    for owner in ("user", "framework"):
        found = [i for i, place in enumerate(stack) if place.owner == owner]
        if found:
            return list(map(str, stack[found[-1] :]))
    return list(map(str, stack[-1:]))


def remedy(stack: str, computes: bool) -> str:
    """Return what to write instead of the call that a stack is in.

    Args:
      stack: its lines from the blamed one down.
      computes: whether the thread computed in it, rather than waited.
    """
    known = _COMPUTING_REMEDIES if computes else (*_COMPUTING_REMEDIES, *_WAITING_REMEDIES)
    for pattern, instead in known:
        if re.search(pattern, stack):
            return instead
    if computes:
        return "it computes: do less of it, or loop.run_in_executor with a ProcessPoolExecutor"
    return "await asyncio.to_thread(…), or make it asynchronous"


def debugging(stack: Sequence[Place]) -> bool:
    """Return whether the stack waits at a debugger's prompt."""
    return any(name in place.file for place in stack for name in _DEBUGGERS)


def _short(file: str) -> str:
    """Return a path from its library's name on, or from here."""
    for mark in ("site-packages/", "dist-packages/", f"{_STDLIB}/"):
        if mark in file:
            return file.rsplit(mark, 1)[1]
    with contextlib.suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file
