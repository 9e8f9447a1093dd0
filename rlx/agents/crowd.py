"""Runs an agent once or many times at once, watched.

Its loop is in the main thread, as in training: some libraries set signals. A thread attends to it,
so that a loop that is blocked for ever is still reported.
"""

import asyncio
import contextlib
import copy
import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.agents.frames import Place, at, awaited, trimmed
from rlx.agents.http_clients import HttpClients
from rlx.agents.stalls import Stall, Watchdog, causes

_GRACE = 2.0  # seconds a cancelled run has to end
_SETTLE = 1.0  # seconds for connections to close behind the runs
_BLOCKED_NEWS = 5.0  # seconds of a blocked loop that are told at once
_INTERRUPTS = 5  # before the program is ended
_INTERRUPT_SECONDS = 2.0  # between two


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
    """All jobs at once, each on an instance and with a client of its own, as in training.

    Args:
      make: a new instance of the agent's class.
      base_url: of a run's number.
      timeout: seconds a run may take; 0: as long as it likes.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        jobs: Sequence[Job],
        base_url: Callable[[int], str],
        api_key: str,
        timeout: float,
    ):
        self._make, self._jobs, self._timeout = make, jobs, timeout
        self._base_url, self._api_key = base_url, api_key
        self.outcomes: list[Outcome] = []
        self._background: Counter = Counter()
        self._left = Left()
        self._watchdog = Watchdog()
        self._finished, self._interrupted = threading.Event(), threading.Event()
        self._begun: dict[int, float] = {}
        self._gave_up = ""

    def run(
        self,
        show: Callable[[int, int], None] = lambda done, wanted: None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Session:
        """Runs until every job ended, Ctrl-C, or the loop is blocked beyond hope.

        In the main thread, whose calls a signal can end.

        Args:
          show: told (done, wanted), several times a second, from a thread.
          tell: told a line of what cannot wait, likewise.
        """
        begin = time.monotonic()
        attending = threading.Thread(
            target=self._attend, args=(show, tell), name="rlx-attending", daemon=True
        )
        attending.start()
        loop = asyncio.new_event_loop()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun with nohup or &
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            loop.run_until_complete(self._main())
        except KeyboardInterrupt:
            self._interrupted.set()
            self._gave_up = self._gave_up or "interrupted"
            self._watchdog.stop()
        finally:
            self._finished.set()
            attending.join()
        if not self._gave_up:  # else what is left in it would run on while it ends
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        lost = self._lost() if self._gave_up else []
        return Session(
            [*self.outcomes, *lost], self._watchdog.stalls, self._left,
            self._watchdog.begin or begin, self._watchdog.end, self._watchdog.busy_seconds,
            self._watchdog.queued_seconds,
            self._background, self._gave_up,
        )  # fmt: skip

    def _attend(self, show: Callable[[int, int], None], tell: Callable[[str], None]) -> None:
        """Shows how far it is; interrupts a loop that is blocked for longer than a run may take."""
        told, shown = 0.0, -1
        while not self._finished.wait(0.1):
            if (done := len(self.outcomes)) != shown:
                shown = done
                show(done, len(self._jobs))
            stall = self._watchdog.blocked()
            if stall is None or self._watchdog.debugging():
                continue
            if stall.seconds > _BLOCKED_NEWS and stall.begin != told:
                told = stall.begin
                since = f"for {stall.seconds:.0f} s by now"
                tell(f"the event loop is blocked, {since}: {_where(stall)}")
            if self._timeout and stall.seconds > self._timeout + _GRACE:
                self._gave_up = f"the event loop was blocked for {stall.seconds:.0f} s: ended"
                self._interrupt(tell, stall)
                break
        if shown != len(self.outcomes):
            show(len(self.outcomes), len(self._jobs))

    def _interrupt(self, tell: Callable[[str], None], stall: Stall) -> None:
        """As Ctrl-C does; a call of C's that does not listen ends the program without a report."""
        for _ in range(_INTERRUPTS):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if self._interrupted.wait(_INTERRUPT_SECONDS):
                return
        tell(f"it cannot be interrupted; ended without a report: {_where(stall)}")
        os._exit(1)

    def _lost(self) -> list[Outcome]:
        """Runs without an end."""
        now, ended = time.monotonic(), {outcome.job.run for outcome in self.outcomes}
        out = []
        for job in self._jobs:
            if job.run not in ended:
                begin = self._begun.get(job.run, now)
                out.append(Outcome(job, "lost", begin, now - begin))
        return out

    async def _main(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        before = _population()
        self._clients = HttpClients()
        self._watchdog.start()
        runs = [asyncio.create_task(self._one(job)) for job in self._jobs]
        await asyncio.gather(*runs)
        self._watchdog.stop()
        del runs
        await self._clients.close()
        self._left = await _left(before)

    def _unhandled(self, loop: Any, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        self._background[_failure(error).message if error else str(context.get("message"))] += 1

    async def _one(self, job: Job) -> None:
        begin = self._begun[job.run] = time.monotonic()
        task = asyncio.create_task(_guarded(self._make, job, self._kwargs(job)))
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

    def _kwargs(self, job: Job) -> dict[str, Any]:
        return {
            "base_url": self._base_url(job.run),
            "api_key": self._api_key,
            "http_client": self._clients.new(),
        }


async def _guarded(make: Callable[[], Any], job: Job, kwargs: Mapping[str, Any]) -> Any:
    """The run, on a copy of its row; what would end the program ends the run alone."""
    try:
        return await make().run(copy.deepcopy(dict(job.row)), **kwargs)
    except SystemExit as error:
        raise _Exited(f"exit({error})").with_traceback(error.__traceback__) from None


def _where(stall: Stall) -> str:
    found, _ = causes([stall])
    return f"{found[0].blocking}: {found[0].blocking.call}" if found else "unknown"


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
    value = task.result()
    if asyncio.iscoroutine(value):  # without an await: told as a mistake, once
        value.close()
    return Outcome(job, "returned", begin, seconds, value)


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
    ours = {"MainThread", "rlx-attending", "rlx-watchdog", "asyncio"}
    return Counter(stem for stem in stems if stem not in ours)


def _sockets() -> int:
    """Open sockets of this process; 0 where the system does not tell."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count
