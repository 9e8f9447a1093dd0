"""Read a run's files for its report; broken or missing ones leave gaps."""

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.observe.timeline import Span, read
from rlx.system.jsonl import has_step, read_json, read_jsonl

MAX_SAMPLE_FILES = 400  # of a longer run, the first and the last half of this many


@dataclass(frozen=True)
class Run:
    """The records of one run, in order of step."""

    path: Path
    metrics: list[dict[str, Any]]  # metrics, evals: objects of metrics.jsonl and eval.jsonl
    evals: list[dict[str, Any]]
    samples: list[dict[str, Any]]  # transcripts of rollouts/, oldest first
    skipped: list[dict[str, Any]]  # rows of skipped.jsonl, which failed in every attempt, each once
    spans: list[Span]  # those of timeline.json, by start, outer ones before those inside them
    config: dict[str, Any]  # config, environment: of the last of `starts`
    environment: dict[str, Any]
    starts: list[dict[str, Any]]  # of starts.jsonl that made the steps, oldest first; or the newest
    total: float | None  # steps that the newest start wants; None if unknown
    plan: dict[str, Any]  # plan.json: what was expected of the run
    ended_at: float  # when metrics.jsonl was last written, seconds since the epoch; 0 if unknown

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


def load(workdir: str | os.PathLike, samples: bool = True) -> Run:
    """Read a WORKDIR, transcripts and timeline for `samples` only; UserError for no run."""
    path = Path(workdir)
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give the WORKDIR of a run")
    metrics, names = path / "metrics.jsonl", ("metrics.jsonl", "eval.jsonl", "config.json")
    if not any((path / name).exists() for name in names):
        raise UserError(f"{path} has no {', '.join(names)}; give the WORKDIR of a run")
    steps = _by_step(read_jsonl(metrics))
    # Runs of older releases have no numbered starts; these files describe the first one.
    first = {name: read_json(path / f"{name}.json") for name in ("config", "environment")}
    starts: dict[Any, dict[str, Any]] = {None: first}
    for start in read_jsonl(path / "starts.jsonl"):
        if isinstance(number := start.get("start"), int):
            starts[number] = {**first, **{name: value for name, value in start.items() if value}}
    # Each epoch skips a row again; its last time counts.
    skipped = {tuple(str(r.get(key)) for key in ("which", "set", "row")): r
               for r in read_jsonl(path / "skipped.jsonl")}  # fmt: skip
    newest = list(starts.values())[-1]
    chain = [starts.get(n, first) for n in dict.fromkeys(r.get("start") for r in steps)] or [newest]
    return Run(
        path=path.resolve(), metrics=steps, evals=_by_step(read_jsonl(path / "eval.jsonl")),
        samples=_samples(path / "rollouts") if samples else [], skipped=[*skipped.values()],
        spans=_spans(read_json(path / "timeline.json")) if samples else [],
        config=chain[-1]["config"], environment=chain[-1]["environment"], starts=chain,
        total=finite(lookup(newest, "config.total_steps")), plan=read_json(path / "plan.json"),
        ended_at=metrics.stat().st_mtime if metrics.exists() else 0.0,
    )  # fmt: skip


def gaps(records: Iterable[Mapping[str, Any]], last: int) -> str:
    """Return the steps up to `last` without a record: `steps 4–7, 9`; "" for none."""
    steps = {record.get("step") for record in records}
    missing = [step for step in range(1, last + 1) if step not in steps]
    runs = itertools.groupby(enumerate(missing), lambda pair: pair[1] - pair[0])
    parts = [[step for _, step in run] for _, run in runs]
    text = ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)
    return f"step{'s' * (len(missing) > 1)} {text}" if text else ""


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """Return the value under a dotted key; None if it is missing."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def finite(value: Any) -> float | None:
    """Return `value` as a float, or None if it is no finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records by step; of two for one step the later written counts."""
    steps = {r["step"]: r for r in records if has_step(r)}
    return [steps[step] for step in sorted(steps)]


def _samples(directory: Path) -> list[dict[str, Any]]:
    files, half = sorted(directory.glob("step-*.jsonl")), MAX_SAMPLE_FILES // 2
    files = files if len(files) <= MAX_SAMPLE_FILES else files[:half] + files[-half:]
    rows = [row for file in files for row in read_jsonl(file)]
    texts = (("completion", str), ("prompt", str | None))
    return [r for r in rows if has_step(r) and all(isinstance(r.get(k), t) for k, t in texts)]


def _spans(trace: Mapping[str, Any]) -> list[Span]:
    spans = (span for span in read(trace) if span.end_ns > span.start_ns)
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
