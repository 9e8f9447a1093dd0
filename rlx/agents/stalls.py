"""Finds what blocks an event loop: a thread looks at the loop's stack while its heartbeat is late.

    loop:      beat .. beat .. beat ........................ beat
    watchdog:                       late? look, look, look    → a stall, and where it was

A call that also holds the interpreter (a long json.loads, a regular expression) keeps the watchdog
from looking; it then looks once, as soon as the call is over: CPython is still at the call then.
"""

import asyncio
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import CodeType

from rlx.agents.frames import Place, at, blamed, stack

TICK = 0.02  # seconds between two beats, and between two looks
THRESHOLD = 0.1  # seconds a beat may be late
_SLOW_TICK = 0.1  # between looks, once a stall is longer than
_LONG = 2.0
_STACK_LIMIT = 12

_IMPORT = re.compile(r"<frozen importlib|importlib/")
# What a line of the stack fits → what to write in its place. The first that fits counts.
_ONCE = (
    (r"create_default_context|load_verify_locations",
     "a new client reads all certificates: pass http_client=kwargs['http_client'] on to it"),
    (_IMPORT.pattern, "import it before, at the top of the file"),
)  # fmt: skip
_REMEDIES = (
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
_COMPUTES = "it computes: do less of it, or loop.run_in_executor with a ProcessPoolExecutor"
_WAITS = "await asyncio.to_thread(…), or make it asynchronous"


@dataclass(frozen=True, slots=True)
class Look:
    """What the loop's thread did at one time.

    Attributes:
      time: seconds, monotonic.
      used: seconds in which its thread computed, and in which it wanted to and had no processor.
      task: which task ran, 0 for none.
      frames: outermost first.
    """

    time: float
    used: tuple[float, float]
    task: int
    frames: Sequence[tuple[CodeType, int]]


@dataclass(frozen=True, slots=True)
class Stall:
    """The loop did not turn from `begin` for `seconds`.

    Attributes:
      used: as of a Look, at `begin` and at the end.
    """

    begin: float
    seconds: float
    looks: Sequence[Look]
    used: tuple[tuple[float, float], tuple[float, float]]


@dataclass(slots=True)
class Cause:
    """A place in the code that stalls were at.

    Attributes:
      seconds: in all; `longest`: in one go, of one task.
      ran, queued: of `seconds`, those of computing, and of waiting for a processor.
      longest_ran: of computing in one go.
      stalls: how many it had a part in.
      tasks: how many tasks were seen at it.
      blocking: the user's (or a framework's) line whose call does not return.
      paths: the places from the user's code down → seconds.
    """

    blocking: Place
    paths: dict[tuple[Place, ...], float]
    seconds: float = 0.0
    longest: float = 0.0
    ran: float = 0.0
    queued: float = 0.0
    longest_ran: float = 0.0
    stalls: int = 0
    tasks: set[int] = field(default_factory=set)

    @property
    def computes(self) -> bool:
        """It computed, and waited for nothing but a processor."""
        return self.ran + self.queued > 0.4 * self.seconds

    @property
    def waited(self) -> float:
        """Seconds in which it did not even want a processor."""
        return max(self.seconds - self.ran - self.queued, 0.0)

    @property
    def path(self) -> tuple[Place, ...]:
        """Where it was for most of the time."""
        return max(self.paths, key=lambda path: self.paths[path])

    @property
    def waiting(self) -> Place | None:
        """The deepest line, where it is another's than the user's."""
        return self.path[-1] if len(self.path) > 1 else None

    @property
    def lines(self) -> list[str]:
        """The path as text, without the middle of a long one."""
        lines = [f"{place}: {place.call}" for place in self.path]
        if len(lines) <= _STACK_LIMIT:
            return lines
        half = _STACK_LIMIT // 2
        return [*lines[:half], f"… {len(lines) - 2 * half} more", *lines[-half:]]

    @property
    def once(self) -> bool:
        """It is an import, and will not be met again."""
        return any(_IMPORT.search(line) for line in self.lines)

    @property
    def remedy(self) -> str:
        """What to write instead."""
        known = _ONCE if self.computes else (*_ONCE, *_REMEDIES)
        for pattern, remedy in known:
            if any(re.search(pattern, line) for line in self.lines):
                return remedy
        return _COMPUTES if self.computes else _WAITS


class Watchdog:
    """Watches the running loop from `start` to `stop`, both called in the loop's thread."""

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self.begin = self.end = 0.0
        self.busy_seconds = 0.0  # in which the loop's thread computed, or wanted to
        self.queued_seconds = 0.0  # of them, those without a processor
        self._looks: list[Look] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rlx-watchdog", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._clock = _ThreadClock(self._ident, threading.get_native_id())
        self._used_before = self._used = self._clock.read()
        self.begin = self._last = time.monotonic()
        self._handle = self._loop.call_later(TICK, self._beat)
        self._thread.start()

    def stop(self) -> None:
        """Ends; what is late now still counts."""
        self._handle.cancel()
        self._close(time.monotonic())
        self.end = self._last
        self._ended.set()
        self._thread.join()

    def blocked(self) -> Stall | None:
        """The stall that is not over, from any thread; None while the loop turns."""
        late = time.monotonic() - self._last - TICK if self.begin and not self.end else 0.0
        if late <= THRESHOLD:
            return None
        return Stall(self._last, late, list(self._looks), (self._used, self._clock.read()))

    def debugging(self) -> bool:
        """Whether a person at a debugger's prompt is what it waits for now."""
        return _debugging(self._looks)

    def _beat(self) -> None:
        self._close(time.monotonic())
        self._handle = self._loop.call_later(TICK, self._beat)

    def _close(self, now: float) -> None:
        late = now - self._last - TICK
        looks, self._looks = self._looks, []
        before, self._used = self._used, self._clock.read()
        if late > THRESHOLD and not _debugging(looks):
            self.stalls.append(Stall(self._last, late, looks, (before, self._used)))
        self._last = now
        self.busy_seconds = sum(self._used) - sum(self._used_before)
        self.queued_seconds = self._used[1] - self._used_before[1]

    def _watch(self) -> None:
        tick = TICK
        while not self._ended.wait(tick):
            last, now = self._last, time.monotonic()
            late = now - last - TICK
            tick = TICK if late < _LONG else _SLOW_TICK
            if late < THRESHOLD / 2:
                continue
            # At once: reading a clock lets the loop's thread run on.
            frames = stack(sys._current_frames().get(self._ident))
            task = asyncio.current_task(self._loop)
            if last == self._last:  # it has not turned meanwhile
                self._looks.append(Look(now, self._clock.read(), id(task) if task else 0, frames))


def causes(stalls: Iterable[Stall]) -> tuple[list[Cause], float]:
    """(where the loop was blocked, worst first; seconds in which it only waited its turn).

    A stall is shared out between its looks by the time since the one before. The second number is
    of looks at a loop that was idle: the machine or another thread had the interpreter.
    """
    found: dict[tuple[str, int, str], Cause] = {}
    idle = 0.0
    for stall in stalls:
        seen: set[tuple[str, int, str]] = set()
        stretch: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for look, seconds, ran, queued in _shared_out(stall):
            cause = _cause(look)
            if cause is None:
                idle += seconds
                continue
            key = (cause.blocking.file, cause.blocking.line, cause.blocking.function)
            (path,) = cause.paths
            cause = found.setdefault(key, cause)
            cause.paths[path] = cause.paths.get(path, 0.0) + seconds
            cause.seconds += seconds
            cause.ran += ran
            cause.queued += queued
            cause.tasks.add(look.task)
            stretch[key, look.task][0] += seconds
            stretch[key, look.task][1] += ran
            seen.add(key)
        idle += 0.0 if stall.looks else stall.seconds
        for key in seen:
            found[key].stalls += 1
        for (key, _), (seconds, ran) in stretch.items():
            found[key].longest = max(found[key].longest, seconds)
            found[key].longest_ran = max(found[key].longest_ran, ran)
    return sorted(found.values(), key=lambda cause: -cause.seconds), idle


def _shared_out(stall: Stall) -> Iterator[tuple[Look, float, float, float]]:
    """(look, seconds, of them computing, and queued) of each: the last one's go on to the end."""
    before, used = stall.begin, stall.used[0]
    for i, look in enumerate(stall.looks):
        last = i + 1 == len(stall.looks)
        until = stall.begin + stall.seconds if last else look.time
        then = stall.used[1] if last else look.used
        ran, queued = (max(b - a, 0.0) for a, b in zip(used, then, strict=True))
        yield look, max(until - before, 0.0), ran, queued
        before, used = until, then


class _ThreadClock:
    """(seconds on a processor, seconds queued for one) of a thread, read from any thread.

    On a crowded machine the second is most of what a computation takes, and tells it from a wait.
    """

    def __init__(self, ident: int, native_id: int):
        self._file = f"/proc/self/task/{native_id}/schedstat"
        self._clock = None
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(ident)

    def read(self) -> tuple[float, float]:
        """Zeros where the system does not tell."""
        try:
            ran, queued, _ = Path(self._file).read_text().split()
            return int(ran) / 1e9, int(queued) / 1e9
        except (OSError, ValueError):  # no Linux, or one without these statistics
            return (time.clock_gettime(self._clock) if self._clock else 0.0), 0.0


def _cause(look: Look) -> Cause | None:
    """Of one look; None where the loop waited for events, as it should."""
    places = [at(code, instruction) for code, instruction in look.frames]
    inner = [p for p in places if p.owner != "rlx"]
    if not inner or (
        inner[-1].function.endswith("select") and inner[-1].file.endswith("selectors.py")
    ):
        return None
    index = blamed(places)
    return Cause(places[index], {tuple(places[index:]): 0.0})


def _debugging(looks: Sequence[Look]) -> bool:
    """Whether a person at a debugger's prompt is what it waits for."""
    names = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")
    return any(
        PurePath(code.co_filename).name in names for look in looks for code, _ in look.frames
    )
