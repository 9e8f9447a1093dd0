"""Read a run's files back for its report; broken or missing ones leave gaps."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlx.base import UserError
from rlx.observe.jsonl import has_step, read_json, read_jsonl

_VERSION = re.compile(r"(?:(.+) )?version (\d+)")  # in the names of older runs' spans
MAX_SAMPLE_FILES = 400  # of a longer run, the first and the last half of this many


@dataclass(frozen=True)
class Run:
    """The records of one run, in order of step.

    Attributes:
      metrics, evals: the objects of metrics.jsonl and eval.jsonl.
      samples: transcripts of rollouts/, oldest first.
      skipped: the rows of skipped.jsonl, which no attempt got through, each once.
      spans: complete events of timeline.json, by start; times in microseconds.
      ended_at: when metrics.jsonl was last written, seconds since the epoch; 0 if unknown.
    """

    path: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    spans: list["TraceSpan"] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    ended_at: float = 0.0

    def series(self, key: str) -> list[float | None]:
        """Return one metric over the steps, None where missing; `a.b` reads key b of dict a."""
        return [finite(lookup(record, key)) for record in self.metrics]

    def axes(self) -> tuple[list[float], list[float | None]]:
        """Return the places of a series' values: steps, and seconds of the run."""
        return [record["step"] for record in self.metrics], self.series("elapsed_seconds")

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a config value by its dotted name."""
        value = lookup(self.config, key)
        return default if value is None else value


class TraceSpan(NamedTuple):
    """One complete event: a box on a lane of a process."""

    process: str
    lane: int
    name: str
    start: float  # µs
    end: float  # µs
    args: Mapping[str, Any]


def load(workdir: str | os.PathLike) -> Run:
    """Read the files of a WORKDIR.

    Raises:
      UserError: when it is not a directory, or nothing in it is a run's.
    """
    path = Path(workdir)
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give the WORKDIR of a run")
    metrics = path / "metrics.jsonl"
    if not any((path / name).exists() for name in ("metrics.jsonl", "eval.jsonl", "config.json")):
        raise UserError(
            f"{path} has no metrics.jsonl, eval.jsonl or config.json; give the WORKDIR of a run"
        )
    return Run(
        path=path.resolve(),
        metrics=_by_step(read_jsonl(metrics)),
        evals=_by_step(read_jsonl(path / "eval.jsonl")),
        samples=_samples(path / "rollouts"),
        skipped=_by_row(read_jsonl(path / "skipped.jsonl")),
        spans=_spans(read_json(path / "timeline.json")),
        config=read_json(path / "config.json"),
        environment=read_json(path / "environment.json"),
        ended_at=metrics.stat().st_mtime if metrics.exists() else 0.0,
    )


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted key; None if it is missing."""
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def finite(value: Any) -> float | None:
    """Return `value` as a float, or None if it is no finite number."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records by step; of two for one step the later written counts."""
    steps = {r["step"]: r for r in records if has_step(r)}
    return [steps[step] for step in sorted(steps)]


def _by_row(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return skipped rows by their last time; each epoch skips them again."""
    return list({(str(r.get("which")), str(r.get("row"))): r for r in records}.values())


def _samples(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("step-*.jsonl"))
    if len(files) > MAX_SAMPLE_FILES:
        half = MAX_SAMPLE_FILES // 2
        files = files[:half] + files[-half:]
    rows = [row for file in files for row in read_jsonl(file)]
    return [
        r
        for r in rows
        if has_step(r)
        and isinstance(r.get("completion"), str)
        and isinstance(r.get("prompt"), str | None)
    ]


def _spans(trace: Mapping[str, Any]) -> list[TraceSpan]:
    """Return the complete events by start, outer ones before those inside them."""
    events = trace.get("traceEvents")
    events = [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []
    processes = {
        event.get("pid"): str(lookup(event, "args.name"))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    spans = []
    for event in events:
        start, length = finite(event.get("ts")), finite(event.get("dur"))
        if event.get("ph") != "X" or start is None or not length:
            continue
        process = processes.get(event.get("pid"), str(event.get("pid")))
        name, args = str(event.get("name")), event.get("args")
        args = args if isinstance(args, dict) else {}
        if version := _VERSION.fullmatch(name):
            name, args = version[1] or process, {"version": int(version[2])} | args
        lane = event.get("tid", 0)
        spans.append(TraceSpan(process, lane, name, start, start + length, args))
    return sorted(spans, key=lambda span: (span.start, -span.end))
