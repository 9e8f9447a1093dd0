"""Record spans of trainer, servers, rewards and publishes, and save them as a Chrome trace.

https://ui.perfetto.dev opens the trace. The clock is CLOCK_MONOTONIC in nanoseconds, which all
processes of one machine share.
"""

import json
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlx.system.jsonl import jsonable, read_json, write_atomically

PROCESSES = ("trainer", "server", "teacher", "rewards", "publish", "evaluation")  # top to bottom


class Span(NamedTuple):
    """A stretch of time on a track; spans with the same name never nest."""

    process: str
    track: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]
    lane: int = 0  # of a viewer, on its track in `assign_lanes`, in its process in a saved trace


class Timeline:
    """Records spans, the newest `capacity` of them, from any thread."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,  # returns nanoseconds
        capacity: int = 200_000,
        earlier: Path | None = None,  # timeline of an earlier start, which this one continues
    ):
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._recorded = 0
        self._lock = threading.Lock()
        if earlier and earlier.exists():
            trace = read_json(earlier)
            spans = list(read(trace))
            # Another boot or host has another clock: the file's age says how long ago it ended.
            ago = max(0, time.time_ns() - earlier.stat().st_mtime_ns)
            later = clock() - ago - max((span.end_ns for span in spans), default=0)
            for span in spans:
                self.add(*span[:3], span.start_ns + later, span.end_ns + later, **span.args)
            about = trace.get("otherData")
            lost = about.get("discarded_events") if isinstance(about, dict) else 0
            self._recorded += lost if isinstance(lost, int) else 0

    @contextmanager
    def span(self, process: str, name: str, *, track: str = "main", **args: Any) -> Iterator[None]:
        """Record the time the block takes, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(process, track, name, start, self._clock(), **args)

    def add(self, process: str, track: str, name: str, start: int, end: int, **args: Any) -> None:
        """Record a span measured elsewhere, in ns. A negative duration counts as none."""
        with self._lock:
            self._spans.append(Span(process, track, name, start, max(start, end), args))
            self._recorded += 1

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace, replacing the file atomically. 200,000 spans take about 2 s."""
        with self._lock:
            spans, discarded = list(self._spans), self._recorded - len(self._spans)
        encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        events = ",\n".join(map(encode, _trace_events(spans, discarded)))
        about = encode({"clock": "CLOCK_MONOTONIC", "discarded_events": discarded})
        head = f'{{"displayTimeUnit":"ms","otherData":{about},\n"traceEvents":[\n'
        write_atomically(path, f"{head}{events}\n]}}\n".encode())


def assign_lanes(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of one track with their lanes, from 0, sorted by start.

    A viewer draws a lane's spans as a stack: one must contain the next. A span goes inside spans
    of other names that contain it, else on the first free lane.
    """
    lanes: list[list[Span]] = []  # per lane the spans open at this moment, outermost first
    placed = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        inside, free = -1, len(lanes)
        for lane, stack in enumerate(lanes):
            while stack and stack[-1].end_ns <= span.start_ns:
                stack.pop()
            if not stack:
                free = min(free, lane)
            elif stack[-1].end_ns >= span.end_ns and all(s.name != span.name for s in stack):
                inside = lane
                break
        if free == len(lanes) and inside < 0:
            lanes.append([])
        lane = free if inside < 0 else inside
        lanes[lane].append(span)
        placed.append(span._replace(lane=lane))
    return placed


def process_order(process: str) -> tuple[int, int, str]:
    """Return the key that sorts processes as PROCESSES does, `server 2` before `server 10`."""
    kind, _, number = process.partition(" ")
    rank = PROCESSES.index(kind) if kind in PROCESSES else len(PROCESSES)
    return rank, int(number) if number.isdigit() else -1, process


def read(trace: Mapping[str, Any]) -> Iterator[Span]:
    """Yield each readable span of a saved trace."""
    names, events = dict[Any, str](), trace.get("traceEvents")
    for event in events if isinstance(events, list) else []:
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            process, lane = event["pid"], event.get("tid", 0)
            if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
                key = process if event["name"] == "process_name" else (process, lane)
                names[key] = str(event["args"]["name"])
            elif event["ph"] == "X":
                start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
                track = re.sub(r" \d+$", "", names.get((process, lane), "main"))
                args = {**event.get("args", {})}
                labels = names.get(process, str(process)), track, str(event["name"])
                yield Span(*labels, start, start + length, args, lane)


def _trace_events(spans: list[Span], discarded: int) -> Iterator[dict[str, Any]]:
    processes = sorted({span.process for span in spans}, key=process_order)
    pids = {process: number for number, process in enumerate(processes, 1)}
    for process, pid in pids.items():
        yield _metadata("process_name", pid, 0, name=process)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    tracks: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        tracks.setdefault((span.process, span.track), []).append(span)
    next_tid = Counter(dict.fromkeys(pids.values(), 1))
    for (process, track), track_spans in tracks.items():
        pid, placed = pids[process], assign_lanes(track_spans)
        first, count = next_tid[pid], max(span.lane for span in placed) + 1
        next_tid[pid] += count
        for lane in range(count):
            name = f"{track} {lane + 1}" if lane else track
            yield _metadata("thread_name", pid, first + lane, name=name)
        for span in placed:
            event = {"ph": "X", "name": span.name, "pid": pid, "tid": first + span.lane,
                     "ts": span.start_ns / 1000,
                     "dur": (span.end_ns - span.start_ns) / 1000}  # fmt: skip
            yield event | {"args": jsonable(span.args)} if span.args else event
    if discarded:
        text = f"{discarded} earlier events were discarded"
        start = min(span.start_ns for span in spans) / 1000
        yield {"ph": "i", "s": "g", "name": text, "pid": 1, "tid": 1, "ts": start}


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
