"""Who did what when: spans of trainer, servers, rewards and publishes on one clock.

Saved as a Chrome trace, which https://ui.perfetto.dev opens. The clock is CLOCK_MONOTONIC in
nanoseconds, which all processes of one machine share, so a server's spans need no
translation. Memory is bounded: the oldest events are let go, and their number is kept.
"""

import heapq
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlx.observe.jsonl import jsonable, write_atomically

PROCESSES = ("trainer", "server", "teacher", "rewards", "publish", "evaluation")  # top to bottom


class Span(NamedTuple):
    """Something that lasted. `name` is its kind: spans of one kind never nest in each other."""

    process: str
    track: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Mark(NamedTuple):
    """Something without duration: an instant (phase `i`) or a counter's new values (`C`)."""

    process: str
    track: str
    name: str
    phase: str
    at_ns: int
    args: dict[str, Any]


class Timeline:
    """Records spans from any thread; `save` may be called at any time, also repeatedly."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, capacity: int = 200_000):
        """`clock` gives nanoseconds; `capacity` is how many events are kept."""
        self._clock = clock
        self._events: deque[Span | Mark] = deque(maxlen=capacity)
        self._recorded = 0
        self._lock = threading.Lock()

    @contextmanager
    def span(self, process: str, name: str, *, track: str = "main", **args: Any) -> Iterator[None]:
        """Records the time the block takes, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(process, track, name, start, self._clock(), **args)

    def add(
        self, process: str, track: str, name: str, start_ns: int, end_ns: int, **args: Any
    ) -> None:
        """Records a span measured elsewhere. A negative duration counts as none."""
        self._record(Span(process, track, name, start_ns, max(start_ns, end_ns), args))

    def instant(self, process: str, name: str, *, track: str = "main", **args: Any) -> None:
        """Marks this moment."""
        self._record(Mark(process, track, name, "i", self._clock(), args))

    def counter(self, process: str, name: str, **values: float) -> None:
        """Draws `values` as a graph over time from this moment on."""
        self._record(Mark(process, "main", name, "C", self._clock(), values))

    @property
    def discarded(self) -> int:
        """How many events were let go because the timeline was full."""
        with self._lock:
            return self._recorded - len(self._events)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the trace, replacing the file atomically. 200,000 events take about 2 s."""
        with self._lock:
            events, discarded = list(self._events), self._recorded - len(self._events)
        write_atomically(path, b"".join(_document(events, discarded)))

    def _record(self, event: Span | Mark) -> None:
        with self._lock:
            self._events.append(event)
            self._recorded += 1


def assign_lanes(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Gives each span of one track a lane on which it overlaps nothing it must not.

    A viewer draws a lane's spans as a stack: one must contain the next. A span goes on the
    first lane that is free, or inside spans of other names that contain it wholly; requests
    that happen to lie within each other have the same name and so sit side by side.

    Returns:
      (span, lane) sorted by start, lanes from 0.
    """
    lanes: list[list[Span]] = []  # per lane the spans open at this moment, outermost first
    free: list[int] = []  # lanes without an open span
    busy: list[tuple[int, int]] = []  # (end of the outermost span, lane)
    outermost: Counter[str] = Counter()  # names at the bottom of the busy lanes
    placed = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        while busy and busy[0][0] <= span.start_ns:
            lane = heapq.heappop(busy)[1]
            outermost[lanes[lane][0].name] -= 1
            lanes[lane].clear()
            heapq.heappush(free, lane)
        lane = -1
        if outermost[span.name] < len(busy):  # else no lane can hold it inside
            lane = next((i for i in sorted(i for _, i in busy) if _fits(lanes[i], span)), -1)
        if lane < 0:
            if not free:
                heapq.heappush(free, len(lanes))
                lanes.append([])
            lane = heapq.heappop(free)
            heapq.heappush(busy, (span.end_ns, lane))
            outermost[span.name] += 1
        lanes[lane].append(span)
        placed.append((span, lane))
    return placed


def _fits(stack: list[Span], span: Span) -> bool:
    """Whether `span` lies inside all open spans of a lane, none of them of its own kind."""
    while len(stack) > 1 and stack[-1].end_ns <= span.start_ns:
        stack.pop()
    return stack[-1].end_ns >= span.end_ns and all(s.name != span.name for s in stack)


def process_order(process: str) -> tuple[int, int, str]:
    """Sorts processes as PROCESSES does, `server 2` before `server 10`."""
    kind, _, number = process.partition(" ")
    rank = PROCESSES.index(kind) if kind in PROCESSES else len(PROCESSES)
    return rank, int(number) if number.isdigit() else -1, process


def _document(events: list[Span | Mark], discarded: int) -> Iterator[bytes]:
    """The trace as JSON with an event a line."""
    about = {"clock": "CLOCK_MONOTONIC", "discarded_events": discarded}
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)},\n'.encode()
    separator = b'"traceEvents": [\n'
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    for event in _trace_events(events, discarded):
        yield separator + encode(event).encode()
        separator = b",\n"
    yield (separator if not events else b"") + b"\n]}\n"


def _trace_events(events: list[Span | Mark], discarded: int) -> Iterator[dict[str, Any]]:
    processes = sorted({event.process for event in events}, key=process_order)
    pids = {process: number for number, process in enumerate(processes, 1)}
    tracks: dict[tuple[str, str], list[Span]] = {}
    marks: list[Mark] = []
    for event in events:
        own = tracks.setdefault((event.process, event.track), [])
        own.append(event) if isinstance(event, Span) else marks.append(event)
    for process, pid in pids.items():
        yield _name("process", pid, 0, process)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0,
               "args": {"sort_index": pid}}  # fmt: skip
    tids: dict[tuple[str, str], int] = {}
    next_tid = Counter(dict.fromkeys(pids.values(), 1))
    for (process, track), spans in tracks.items():
        pid = pids[process]
        placed = assign_lanes(spans)
        first = tids[process, track] = next_tid[pid]
        count = max((lane for _, lane in placed), default=0) + 1
        next_tid[pid] += count
        for lane in range(count):
            yield _name("thread", pid, first + lane, f"{track} {lane + 1}" if lane else track)
        for span, lane in placed:
            yield _complete(span, pid, first + lane)
    for mark in marks:
        yield _mark(mark, pids[mark.process], tids[mark.process, mark.track])
    if discarded:
        text = f"{discarded} earlier events were discarded"
        start = min(e.start_ns if isinstance(e, Span) else e.at_ns for e in events)
        yield {"ph": "i", "s": "g", "name": text, "pid": 1, "tid": 1, "ts": start / 1000}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    event = {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": span.start_ns / 1000,
             "dur": (span.end_ns - span.start_ns) / 1000}  # fmt: skip
    return event | {"args": jsonable(span.args)} if span.args else event


def _mark(mark: Mark, pid: int, tid: int) -> dict[str, Any]:
    event = {"ph": mark.phase, "name": mark.name, "pid": pid, "tid": tid,
             "ts": mark.at_ns / 1000, "args": jsonable(mark.args)}  # fmt: skip
    return event | {"s": "t"} if mark.phase == "i" else event
