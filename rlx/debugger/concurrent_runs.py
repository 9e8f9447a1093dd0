"""Run an agent many times at once in one event loop, as training does, and observe the loop.

The loop is in the main thread: some libraries set signals. asyncio's debug mode measures callbacks
that take too long, by `own_clock` (and doubles what each computes); `LoopWatch` finds their lines,
and a loop that is blocked for ever is interrupted, so that there is still a report.
"""

import asyncio
import copy
import gc
import inspect
import logging
import re
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx.agents import loop_watch, returns
from rlx.agents.http_clients import HttpClients
from rlx.agents.loop_watch import LoopWatch, Place, places
from rlx.debugger.model_call import ModelCall

if TYPE_CHECKING:
    from rlx.debugger.recorder import Recorder

SLOW_SECONDS = 0.1  # a callback that takes longer blocks the loop
_GRACE = 2.0  # seconds a cancelled run has to end
_BLOCKED = 2.0  # seconds beyond its runs' timeout after which a blocked loop is interrupted
_SETTLE = 1.0  # seconds for what ends after the runs
_NEWS_SECONDS = 5.0  # a loop that is blocked for longer is reported at once
_OWN_THREADS = {"MainThread", "rlx-loop-watch", "rlx-recorder", "asyncio"}


@dataclass(slots=True, eq=False)
class AgentRun:
    """One run, and how it ended.

    Attributes:
      number: of the run in the whole session; `index`: of its row in the data.
      end: returned | raised | timeout | stuck (cancelled, and did not end) | lost (never ended).
      begin, seconds: monotonic.
      value: what it returned.
      error: `KeyError: 'answer'`, of one that raised.
      places: the user's lines of the traceback, outermost first; for a timeout, where it waited.
      calls: its calls that were answered.
    """

    number: int
    index: int
    row: Mapping[str, Any]
    end: str = "lost"
    begin: float = 0.0
    seconds: float = 0.0
    value: Any = None
    error: str = ""
    places: Sequence[Place] = ()
    calls: list[ModelCall] = field(default_factory=list)

    @property
    def completions(self) -> list[str]:
        """The ids by which rewards can be given."""
        return [call.completion_id for call in self.calls if call.completion_id and call.ok]

    @property
    def mistake(self) -> str:
        """What is wrong with what it returned; "" where nothing is, or where it did not return."""
        return returns.mistake(self.value, self.completions) if self.end == "returned" else ""

    @property
    def waiting(self) -> float:
        """Seconds in which a call was under way; overlapping ones count once."""
        waiting = until = 0.0
        for call in self.calls:
            waiting += max(call.end - max(call.begin, until), 0.0)
            until = max(until, call.end)
        return waiting


@dataclass(slots=True)
class Blocker:
    """A line of code that kept the loop from turning.

    Attributes:
      stack: from that line down, of the latest look.
      computes: whether the thread computed then rather than waited.
      remedy: what to write in place of the call.
      seconds, longest, stalls: in all, of its longest callback, and in how many callbacks it was.
    """

    stack: list[str]
    computes: bool
    remedy: str
    seconds: float = 0.0
    longest: float = 0.0
    stalls: int = 0


@dataclass(slots=True)
class Observed:
    """What was seen of the runs.

    Attributes:
      begin, end: seconds, monotonic.
      busy_seconds: in which the loop's thread computed.
      slow: seconds of each callback that blocked the loop; `blockers`: by their line.
      background: errors of tasks that nothing awaited.
      left: (tasks | threads | connections, name) that the runs left behind.
      gave_up: why it ended before its runs; "" where it did not.
    """

    runs: Sequence[AgentRun]
    begin: float = 0.0
    end: float = 0.0
    busy_seconds: float = 0.0
    slow: list[float] = field(default_factory=list)
    blockers: dict[str, Blocker] = field(default_factory=dict)
    background: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)
    gave_up: str = ""


class ConcurrentRuns(logging.Handler):
    """All runs at once, each on an instance and with a client of its own.

    Args:
      make: a new instance of the agent's class.
      recorder: whose addresses and key the runs get.
      timeout: seconds a run may take; 0: no limit.
      show: called with (done, wanted) after each run.
      tell: called with a line that cannot wait, from a thread.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        runs: Sequence[AgentRun],
        recorder: "Recorder",
        timeout: float,
        show: Callable[[int, int], None] = lambda done, wanted: None,
        tell: Callable[[str], None] = print,
    ):
        super().__init__()
        self._make, self._recorder, self._timeout = make, recorder, timeout
        self._show, self._tell, self._done = show, tell, 0
        self._looks: list[tuple[float, float, bool, list[Place]]] = []  # when, late, computes
        self._told, self._interrupts = False, 0
        self._watch, self._clock = LoopWatch(self._late), loop_watch.own_clock()
        self.observed = Observed(runs)

    def run(self) -> Observed:
        """Run until every run ended, Ctrl-C, or the loop is blocked beyond hope."""
        seen = self.observed
        loop = asyncio.new_event_loop()
        loop.set_debug(True)
        loop.time = self._clock  # type: ignore[method-assign]  # by which debug mode measures
        loop.slow_callback_duration = SLOW_SECONDS
        loop.set_exception_handler(self._unhandled)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun with nohup or &
            signal.signal(signal.SIGINT, signal.default_int_handler)
        logger = logging.getLogger("asyncio")
        logger.addHandler(self)
        propagate, logger.propagate = logger.propagate, False
        try:
            loop.run_until_complete(self._main())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        except KeyboardInterrupt:  # what is left in the loop would run on if it were closed
            seen.gave_up, seen.end = seen.gave_up or "interrupted", time.monotonic()
            seen.begin = seen.begin or seen.end
            if self._looks and self._clock() - self._looks[-1][0] < 1.0:
                self._slow("", self._looks[-1][1])
        finally:
            self._watch.stop()
            logger.removeHandler(self)
            logger.propagate = propagate
        for run in seen.runs:
            if run.end == "lost" and run.begin:
                run.seconds = seen.end - run.begin
        return seen

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of asyncio's log: `Executing <…> took 0.150 seconds`, or another."""
        if str(record.msg).startswith("Executing") and isinstance(record.args, tuple):
            if self.observed.begin and not self.observed.end:  # else it is our own
                name = re.sub(" name='.*?'", "", str(record.args[0]))
                self._slow(name[:120], float(str(record.args[1])))
        elif record.levelno >= logging.WARNING:
            self.observed.background[record.getMessage()[:300]] += 1

    def _slow(self, name: str, seconds: float) -> None:
        """Record a callback that blocked the loop, at the line at which most looks found it.

        Args:
          name: asyncio's, for a callback that was never looked at.
        """
        begin = self._clock() - seconds - 0.01
        looks = [(computes, stack) for at, _, computes, stack in self._looks if at >= begin]
        self._looks.clear()
        if any(loop_watch.debugging(stack) for _, stack in looks):
            return
        found = [(computes, loop_watch.blamed(stack)) for computes, stack in looks]
        found = found or [(False, [name])]
        line = Counter(lines[0] for _, lines in found).most_common(1)[0][0]
        computes, lines = next(pair for pair in reversed(found) if pair[1][0] == line)
        remedy = (
            loop_watch.remedy("\n".join(lines), computes) if looks else "look at it with py-spy"
        )
        blocker = self.observed.blockers.setdefault(line, Blocker(lines, computes, remedy))
        blocker.seconds, blocker.stalls = blocker.seconds + seconds, blocker.stalls + 1
        blocker.longest = max(blocker.longest, seconds)
        self.observed.slow.append(seconds)

    def _late(self, seconds: float, computed: float, stack: list[Place]) -> None:
        """Keep a look; report a blocked loop, and interrupt it where that is all that helps."""
        # A thread that computes has a small part of its seconds where others hold the interpreter.
        self._looks.append((self._clock(), seconds, computed > 0.2 * seconds, stack))
        if loop_watch.debugging(stack):
            return
        told, self._told = self._told, seconds > _NEWS_SECONDS
        if self._told and not told:
            where = loop_watch.blamed(stack)[0]
            self._tell(f"the event loop is blocked, for {seconds:.0f} s by now: {where}")
        if self._timeout and seconds > self._timeout + _BLOCKED * (self._interrupts + 1):
            self._interrupts += 1
            self.observed.gave_up = f"the event loop was blocked for {seconds:.0f} s: ended"
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _unhandled(self, loop: Any, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        words = _explained(error)[0] if error else str(context.get("message"))
        self.observed.background[words] += 1

    async def _main(self) -> None:
        seen, before = self.observed, _population(self._recorder, Counter())
        self._clients = HttpClients()
        await asyncio.sleep(0)  # that was a callback of its own, and slow: it imports openai
        seen.begin, busy = time.monotonic(), time.thread_time()
        self._watch.start()
        await asyncio.gather(*(self._one(run) for run in seen.runs))
        self._watch.stop()
        seen.end, seen.busy_seconds = time.monotonic(), time.thread_time() - busy
        await self._clients.close()
        gc.collect()
        until = seen.end + _SETTLE  # for connections to close behind the runs
        while (left := _population(self._recorder, before)) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        seen.left = left

    async def _one(self, run: AgentRun) -> None:
        run.begin = time.monotonic()
        task = asyncio.create_task(self._call(run))
        await asyncio.wait({task}, timeout=self._timeout or None)
        if not task.done():
            waits = [place for place in _awaited(task.get_coro()) if place.owner == "user"]
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE)
            run.end, run.error = "timeout" if task.done() else "stuck", ""
            run.places = waits[-4:]
        run.seconds = time.monotonic() - run.begin
        self._done += 1
        self._show(self._done, len(self.observed.runs))

    async def _call(self, run: AgentRun) -> None:
        kwargs = {
            "base_url": self._recorder.base_url(run.number),
            "api_key": self._recorder.api_key,
            "http_client": self._clients.new(),
        }
        try:
            run.value = await self._make().run(copy.deepcopy(dict(run.row)), **kwargs)
            if inspect.iscoroutine(run.value):
                run.value.close()
            run.end = "returned"
        except (KeyboardInterrupt, GeneratorExit):  # the second: a lost run is collected
            raise
        except BaseException as error:  # SystemExit too ends this run alone
            run.end = "raised"
            run.error, run.places = _explained(error)


def _explained(error: BaseException) -> tuple[str, list[Place]]:
    """Return an exception (of a group, its first) in one line, and the places to look at.

    The places are the user's, with the deepest where that is another's.
    """
    inner, group = error, ""
    while isinstance(inner, BaseExceptionGroup):
        inner, group = inner.exceptions[0], f"{type(error).__name__} of "
    stack = places(traceback.walk_tb(inner.__traceback__))
    own = [place for place in stack[:-1] if place.owner == "user"]
    own += [place for place in stack[-1:] if place.owner != "rlx"]
    return f"{group}{type(inner).__name__}: {' '.join(str(inner).split())[:500]}", own[-8:]


def _awaited(coroutine: Any) -> list[Place]:
    """Return the places of a suspended coroutine and of what it awaits, outermost first."""
    frames = []
    while frame := getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None):
        frames.append((frame, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return places(frames)


def _population(recorder: "Recorder", before: Counter) -> Counter:
    """Return how many (kind, name) of tasks, threads and connections there are more than before."""
    own = asyncio.current_task()
    coroutines = [task.get_coro() for task in asyncio.all_tasks() if task is not own]
    names = [re.sub(r"[-_(]?\d+\)?", "", thread.name) for thread in threading.enumerate()]
    now = Counter(("tasks", getattr(c, "__qualname__", type(c).__name__)) for c in coroutines)
    now.update(("threads", name) for name in names if name not in _OWN_THREADS)
    return now + Counter({("connections", "open"): recorder.connections()}) - before
