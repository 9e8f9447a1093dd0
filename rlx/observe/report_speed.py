"""Make the report's charts of phases, staleness and publishing, and draw its timeline.

The timeline is rows of boxes; their spans also show how busy each server was.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlx.cli.text import duration
from rlx.observe.charts import Line, Share, line_chart, mean, shares
from rlx.observe.rundir import Run, finite, lookup
from rlx.observe.timeline import Span, process_order

COLORS = {
    "wait": "c-wait", "idle": "c-wait", "paused": "c-wait", "pause": "c-wait",
    "train": "c1", "train step": "c1", "step": "c-outer", "publish": "c4", "load": "c4",
    "version": "c4", "verify": "c7",
    "decode": "c3", "generate": "c3", "score": "c6", "prefill": "c7", "pack": "c7", "flatten": "c7",
    "reward": "c5", "evaluate": "c6", "evaluation": "c6", "eval": "c6", "checkpoint": "c8",
    "proximal": "c2", "gate": "c6", "busy": "c3", "other": "c-other",
}  # fmt: skip
# Phase of a plan → key of metrics.jsonl. Publishing runs next to the others.
PHASES = {
    "step": "step_seconds", "train": "seconds.train", "wait": "seconds.wait",
    "generate": "server_busy_seconds", "publish": "publish_seconds",
}  # fmt: skip
_SPARE = ("c2", "c6", "c8", "c5", "c7")
_WAITING = ("wait", "idle", "paused", "pause")
_MAX_ROWS = 6  # of one process; further ones are only counted
_VISIBLE = 0.05  # percent of the width; narrower boxes melt into their neighbours
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)


def phase_totals(run: Run) -> dict[str, float]:
    """Return the seconds of the six longest phases over the run, longest first, and of `other`."""
    totals = Counter[str]()
    for record in run.metrics:
        totals.update(_phases(record))
    whole = float(totals.total())
    named = [pair for pair in totals.most_common() if pair[0] != "other"]
    large = {name: float(value) for name, value in named[:6] if value > 0.01 * whole}
    other = whole - sum(large.values())
    return large | {"other": other} if other > 1e-6 * whole else large


def measured_phases(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds a step of the phases that a plan predicts, where there are any.

    A server's mean is `generate`.
    """
    found = {}
    for phase, key in PHASES.items():  # the first step compiles
        values = [finite(lookup(record, key)) for record in records[1:] or records]
        if any(value is not None for value in values):
            found[phase] = sum(value or 0.0 for value in values) / len(values)
    return found


def planned(run: Run) -> dict[str, Any] | None:
    """Return planned and measured seconds of each phase, and where they differ most."""
    measured, plan = measured_phases(run.metrics), run.plan.get("seconds", {})
    both = [(name, plan[name], measured[name]) for name in PHASES if name in plan.keys() & measured]
    if not both:
        return None
    name, was, now = max(both[1:] or both, key=lambda row: abs(row[2] - row[1]))
    rows = [(phase, f"{duration(a)} planned, {duration(b)} measured") for phase, a, b in both]
    about = f"seconds a step; they differ most in {name}, by {duration(abs(now - was))}"
    return {"rows": rows, "about": f"{about}; the plan was {run.plan.get('allocation')}"}


def lag_shares(run: Run) -> list[Share]:
    """Return the share of trained tokens at each version lag."""
    counts: Counter[int] = Counter()
    for record in run.metrics:
        histogram = record.get("staleness_histogram")
        for lag, tokens in histogram.items() if isinstance(histogram, Mapping) else ():
            if str(lag).isdigit():
                counts[int(lag)] += int(finite(tokens) or 0)
    named = {f"lag {lag}": counts[lag] for lag in sorted(counts)}
    return shares(named, counts.total(), lambda name: f"lag{min(5, int(name[4:]))}")


def speed(run: Run) -> list[dict[str, Any]]:
    """Return the charts of staleness, seconds, tokens, utilisation, publishing and lost groups."""
    lags = [Line("max", run.series("staleness_max"), "c8"),
            Line("mean", run.series("staleness_mean"), "c1", smooth=True)]  # fmt: skip
    tokens = [Line("generated", run.series("generated_tokens_per_second"), "c3", smooth=True),
              Line("trained", run.series("consumed_tokens_per_second"), smooth=True)]  # fmt: skip
    states = (("rejected", "c2"), ("failed", "c5"), ("skipped", "c8"))
    groups = [Line(name, run.series(name), color) for name, color in states]
    lost, axes = any(value for line in groups for value in line.values), run.axes()
    charts = [
        line_chart("Staleness by step", "versions; the limit is never passed", lags, axes,
                   low=0, high=1),
        line_chart("Time of a step", "seconds of the trainer's phases", _step_times(run), axes,
                   low=0, unit="s", cut=True, stacked=True),
        line_chart("Tokens a second", "trained on, and generated by the fleet", tokens, axes,
                   low=0),
        line_chart("Utilisation (MFU)", "model FLOPs of an update, as a share of the peak",
                   [Line("MFU", run.series("mfu"), smooth=True)], axes, low=0),
        line_chart("Publishing",
                   "milliseconds the trainer stalls, until all have it, to load it",
                   _publishing(run), axes, low=0, unit="ms", cut=True),
        line_chart("Groups", "rejected, failed and skipped so far; all give their place back",
                   groups if lost else [], axes, low=0, high=1),
    ]  # fmt: skip
    return [chart for chart in charts if chart]


def _step_times(run: Run) -> list[Line]:
    """Return the seconds of each phase by step; short phases together are `other`."""
    named, steps = phase_totals(run), []
    for record in run.metrics:
        step = dict.fromkeys(named, 0.0)
        for name, value in _phases(record).items():
            kind = name if name in named else "other"
            step[kind] = step.get(kind, 0.0) + value
        steps.append(step)
    return [Line(phase, [step[phase] for step in steps], color_of(phase)) for phase in named]


def _publishing(run: Run) -> list[Line]:
    """Return the milliseconds of the trainer's stall, of delivery and of a server's load."""
    elapsed = {record["step"]: finite(record.get("elapsed_seconds")) for record in run.metrics}
    stall = [None if v is None else v * 1000 for v in run.series("seconds.publish")]
    lines = [Line("stall", stall, "c2", smooth=True)]
    for name, process, color in (("delivery", "publish", "c4"), ("load", "server", "c3")):
        costs: dict[int, list[float]] = {}
        for span in run.spans:
            version = finite(span.args.get("version"))
            if span.process.startswith(process) and version is not None:
                costs.setdefault(int(version), []).append((span.end_ns - span.start_ns) / 1e6)
        versions = sorted(costs)
        values, times = [mean(costs[v]) for v in versions], [elapsed.get(v) for v in versions]
        lines.append(Line(name, values, color, smooth=True, steps=versions, times=times))
    return lines


def _phases(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of a step; the rest of step_seconds is `other`."""
    found = record.get("seconds")
    seconds = found if isinstance(found, Mapping) else {}
    named = {str(name): max(0.0, finite(value) or 0.0) for name, value in seconds.items()}
    rest = (finite(record.get("step_seconds")) or 0.0) - sum(named.values())
    if named and rest > 0:
        return {**named, "other": named.get("other", 0.0) + rest}
    return named


def color_of(name: str) -> str:
    """Return the CSS class of a phase or span, always the same one for a name."""
    key = name.lower()
    known = COLORS.get(key) or COLORS.get(key.partition(" ")[0])
    return known or _SPARE[sum(key.encode()) % len(_SPARE)]


def overview(spans: Sequence[Span], seconds: float) -> dict[str, Any] | None:
    """Return the last and the first `seconds` of a run as rows, boxes and ticks; None for no spans.

    Spans are sorted by start, outer ones first. `keys` is a legend of the most frequent ones;
    `views` are drawings in percentages of the width.
    """
    if not spans:
        return None
    start, end = spans[0].start_ns, max(span.end_ns for span in spans)
    length = min(seconds * 1e9, end - start) or 1.0
    names = Counter(span.name for span in spans).most_common(12)
    views = {}
    for view, at in (("last", end - length), ("first", start)):
        ticks = list(_ticks((at - start) / 1e9, length / 1e9))
        views[view] = {"rows": _rows(spans, at, length), "ticks": ticks}
    keys = [{"color": color_of(name), "name": name, "latest": ""} for name, _ in names]
    return {"keys": keys, "views": views}


def busy_shares(spans: Sequence[Span]) -> dict[str, list[Share]]:
    """Return each server's shares of the run by kind of work, the rest idle."""
    servers = {s.process for s in spans if s.process.startswith(("server", "teacher"))}
    whole = max(s.end_ns for s in spans) - spans[0].start_ns if spans else 0.0
    found = {}
    for server in sorted(servers, key=process_order):
        own = [s for s in spans if s.process == server and s.name.lower() not in _WAITING]
        busy = covered(own)
        names = dict.fromkeys(span.name for span in own)
        work = {name: covered(span for span in own if span.name == name) for name in names}
        if sum(work.values()) > busy * 1.02:  # kinds overlap: their shares would not add up
            work = {"busy": busy}
        ranked = dict(sorted(work.items(), key=lambda item: -item[1]))
        found[server] = shares(ranked | {"idle": max(0.0, whole - busy)}, whole, color_of)
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the nanoseconds in which at least one of the spans, sorted by start, was open."""
    total, reached = 0.0, float("-inf")
    for span in spans:
        if span.end_ns > reached:
            total += span.end_ns - max(span.start_ns, reached)
            reached = span.end_ns
    return total


def _rows(spans: Sequence[Span], low: float, length: float) -> list[tuple[str, int, list]]:
    """Return (process, number of hidden rows, boxes of each row); inner spans are a row deeper."""
    rows: dict[tuple[str, int, int], list[Span]] = {}
    open_spans: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.end_ns <= low or span.start_ns >= low + length:
            continue
        stack = open_spans.setdefault((span.process, span.lane), [])
        while stack and stack[-1].end_ns <= span.start_ns + 500:  # saved floats are not exact
            stack.pop()
        rows.setdefault((span.process, span.lane, len(stack)), []).append(span)
        stack.append(span)
    drawn: dict[str, list[list[dict[str, Any]]]] = {}
    for key in sorted(rows, key=lambda k: (process_order(k[0]), k[1], k[2])):
        drawn.setdefault(key[0], []).append(_boxes(rows[key], low, length))
    return [(name, max(0, len(own) - _MAX_ROWS), own[:_MAX_ROWS]) for name, own in drawn.items()]


def _boxes(row: Sequence[Span], low: float, length: float) -> list[dict[str, Any]]:
    """Return the spans as boxes; neighbours of a kind too small to tell apart become one."""
    boxes: list[dict[str, Any]] = []
    for span in row:
        places = ((at - low) / length for at in (span.start_ns, span.end_ns))
        left, right = (round(100 * min(1.0, max(0.0, place)), 2) for place in places)
        last: dict[str, Any] = boxes[-1] if boxes else {"name": "", "left": 0.0, "width": 0.0}
        gap = left - last["left"] - last["width"]
        if last["name"] == span.name and right - left < _VISIBLE and gap < _VISIBLE:
            width = max(last["width"], right - last["left"])
            last.update(width=round(width, 2), tip=f"{span.name} (several)")
            continue
        args = ", ".join(f"{key} {value}" for key, value in list(span.args.items())[:4])
        tip = f"{span.name} {duration((span.end_ns - span.start_ns) / 1e9)}\n{args}".strip()
        boxes.append({"name": span.name, "color": color_of(span.name), "left": left,
                      "width": round(right - left, 2), "tip": tip})  # fmt: skip
    return boxes


def _ticks(low: float, length: float) -> Iterator[tuple[float, str]]:
    """Yield (percentage of the width, text) at round seconds in low…low + length."""
    step = next((size for size in _TICKS if length / size <= 10), length)
    for index in range(int(low / step) + 1, int(low / step) + 12):
        place = round(100 * (index * step - low) / length, 2)
        if place < 99:
            yield place, f"{index * step:g} s"
