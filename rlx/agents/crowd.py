"""Runs an agent once or many times at once, on a loop of its own, watched.

The loop lives in a thread, as in training, so that one that blocks for ever can still be reported.
"""

import asyncio
import contextlib
import copy
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.agents.frames import Place, at, awaited, trimmed
from rlx.agents.stalls import Stall, Watchdog

_GRACE = 2.0  # seconds a cancelled run has to end
_SETTLE = 1.0  # seconds for connections to close behind the runs
_BLOCKED_NEWS = 5.0  # seconds of a blocked loop that are told at once


@dataclass(frozen=True, slots=True)
class Job:
    """One run: `row` is the `index`-th of the data; `run` numbers it in the whole session."""

    run: int
    index: int
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the agent's, in words.

    Attributes:
      kind: its type.
      message: in one line.
      places: the user's frames of the traceback, outermost first.
    """

    kind: str
    message: str
    places: Sequence[Place] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
      end: returned | raised | timeout | stuck (cancelled, and did not end) | lost (never ended).
      begin, seconds: monotonic.
      value: what it returned.
      failure: of one that raised; for a timeout, where it waited.
    """

    job: Job
    end: str
    begin: float
    seconds: float
    value: Any = None
    failure: Failure | None = None


@dataclass(slots=True)
class Left:
    """What runs left behind: names and how many of each; sockets more than before."""

    tasks: Counter = field(default_factory=Counter)
    threads: Counter = field(default_factory=Counter)
    sockets: int = 0


@dataclass(slots=True)
class Session:
    """All that was seen of a crowd of runs.

    Attributes:
      begin, end: monotonic.
      busy_seconds: in which the loop's thread computed, or wanted to; queued_seconds: in which the
        machine had no processor for it.
      background: exceptions of tasks that nobody awaited.
      gave_up: why it ended before its runs; "" where it did not.
    """

    outcomes: list[Outcome]
    stalls: list[Stall]
    left: Left
    begin: float
    end: float
    busy_seconds: float
    queued_seconds: float
    background: Counter
    gave_up: str = ""


class Crowd:
    """All jobs at once.

    Args:
      agent: one object for all runs.
      base_url: of a run's number.
      timeout: seconds a run may take; 0: as long as it likes.
    """

    def __init__(
        self,
        agent: Any,
        jobs: Sequence[Job],
        base_url: Callable[[int], str],
        api_key: str,
        timeout: float,
    ):
        self._agent, self._jobs, self._timeout = agent, jobs, timeout
        self._base_url, self._api_key = base_url, api_key
        self.outcomes: list[Outcome] = []
        self._background: Counter = Counter()
        self._left = Left()
        self._watchdog = Watchdog()
        self._finished = threading.Event()
        self._broken: BaseException | None = None
        self._begun: dict[int, float] = {}

    def run(
        self,
        show: Callable[[int, int], None] = lambda done, wanted: None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Session:
        """Runs until every job ended, or the loop is blocked beyond hope.

        Args:
          show: told (done, wanted), several times a second.
          tell: told a line of what cannot wait.

        Raises:
          KeyboardInterrupt: never; an interruption ends the session, which says so.
        """
        before = _population()
        thread = threading.Thread(target=self._thread, args=(before,), name="agents", daemon=True)
        begin = time.monotonic()
        thread.start()
        gave_up = ""
        try:
            gave_up = self._attend(show, tell)
        except KeyboardInterrupt:
            gave_up = "interrupted"
        if self._broken is not None:
            raise self._broken
        stalls = self._watchdog.every()
        lost = [] if not gave_up else self._lost()
        end = self._watchdog.end or time.monotonic()
        return Session(
            [*self.outcomes, *lost], stalls, self._left, self._watchdog.begin or begin, end,
            self._watchdog.busy_seconds, self._watchdog.queued_seconds, self._background, gave_up,
        )  # fmt: skip

    def _attend(self, show: Callable[[int, int], None], tell: Callable[[str], None]) -> str:
        """Waits for the loop's end; why it did not come, if it did not."""
        told, shown = 0.0, -1
        while not self._finished.wait(0.1):
            if (done := len(self.outcomes)) != shown:
                shown = done
                show(done, len(self._jobs))
            stall = self._watchdog.blocked()
            if stall and stall.seconds > _BLOCKED_NEWS and stall.begin != told:
                told = stall.begin
                tell(f"the event loop has been blocked for {stall.seconds:.0f} s")
            if stall and self._timeout and stall.seconds > self._timeout + _GRACE:
                return f"the event loop is blocked, for {stall.seconds:.0f} s by now"
        if shown != len(self.outcomes):
            show(len(self.outcomes), len(self._jobs))
        return ""

    def _lost(self) -> list[Outcome]:
        """Runs without an end."""
        now, ended = time.monotonic(), {outcome.job.run for outcome in self.outcomes}
        out = []
        for job in self._jobs:
            if job.run not in ended:
                begin = self._begun.get(job.run, now)
                out.append(Outcome(job, "lost", begin, now - begin))
        return out

    def _thread(self, before: "_Population") -> None:
        try:
            asyncio.run(self._main(before))
        except BaseException as error:
            if not self._finished.is_set():
                self._broken = error
        finally:
            self._finished.set()

    async def _main(self, before: "_Population") -> None:
        import httpx

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None) as client:
            self._watchdog.start()
            runs = [asyncio.create_task(self._one(job, client)) for job in self._jobs]
            await asyncio.gather(*runs)
            self._watchdog.stop()
        del runs
        self._left = await _left(before)
        self._finished.set()

    def _unhandled(self, loop: Any, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        self._background[_failure(error).message if error else str(context.get("message"))] += 1

    async def _one(self, job: Job, client: Any) -> None:
        begin = self._begun[job.run] = time.monotonic()
        task = asyncio.create_task(_guarded(self._agent, job, self._kwargs(job, client)))
        await asyncio.wait({task}, timeout=self._timeout or None)
        if task.done():
            outcome = _ended(task, job, begin)
        else:
            places = [at(*frame) for frame in awaited(task.get_coro())]
            where = Failure("TimeoutError", "", [p for p in places if p.owner == "user"][-4:])
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE)
            end = "timeout" if task.done() else "stuck"
            outcome = Outcome(job, end, begin, time.monotonic() - begin, None, where)
        self.outcomes.append(outcome)

    def _kwargs(self, job: Job, client: Any) -> dict[str, Any]:
        return {
            "base_url": self._base_url(job.run),
            "api_key": self._api_key,
            "http_client": client,
        }


async def _guarded(agent: Any, job: Job, kwargs: Mapping[str, Any]) -> Any:
    """The run, on a copy of its row; what would end the loop ends the run alone."""
    try:
        return await agent.run(copy.deepcopy(dict(job.row)), **kwargs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Exited(f"{type(error).__name__}: {error}").with_traceback(
            error.__traceback__
        ) from None


class _Exited(Exception):
    """The agent asked the whole program to end."""


def _ended(task: asyncio.Task, job: Job, begin: float) -> Outcome:
    seconds = time.monotonic() - begin
    if task.cancelled():
        failure = Failure("CancelledError", "the run was cancelled from within")
        return Outcome(job, "raised", begin, seconds, None, failure)
    error = task.exception()
    if error is not None:
        return Outcome(job, "raised", begin, seconds, None, _failure(error))
    return Outcome(job, "returned", begin, seconds, task.result())


def _failure(error: BaseException) -> Failure:
    """An exception in words; of a group, its first."""
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    kind = type(inner).__name__
    if inner is not error:
        kind = f"{type(error).__name__} of {kind}"
    if isinstance(error, _Exited):
        kind = "SystemExit"
    places = trimmed(inner) or trimmed(error)
    message = " ".join(str(inner).split())[:500]
    return Failure(kind, message, places[-8:])


@dataclass(frozen=True, slots=True)
class _Population:
    threads: Counter
    sockets: int


def _population() -> _Population:
    return _Population(_threads(), _sockets())


async def _left(before: _Population) -> Left:
    """What is there now and was not before, once it no longer grows less."""
    until = time.monotonic() + _SETTLE
    gc.collect()
    while True:
        own = asyncio.current_task()
        tasks = [t for t in asyncio.all_tasks() if t is not own]
        left = Left(
            Counter(_coroutine_name(t) for t in tasks),
            _threads() - before.threads,
            max(_sockets() - before.sockets, 0),
        )
        if time.monotonic() > until or not (left.tasks or left.threads or left.sockets > 2):
            return left
        await asyncio.sleep(0.05)


def _coroutine_name(task: asyncio.Task) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", None) or type(coroutine).__name__


def _threads() -> Counter:
    """Threads by name without its numbers; not asyncio's own workers, which stay."""
    names = (thread.name for thread in threading.enumerate())
    stems = (re.sub(r"[-_(]?\d+\)?", "", name) for name in names)
    ours = {"MainThread", "agents", "rlx-watchdog", "asyncio"}
    return Counter(stem for stem in stems if stem not in ours)


def _sockets() -> int:
    """Open sockets of this process; 0 where the system does not tell."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count
