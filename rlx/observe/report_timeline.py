"""The timeline in the report: a few seconds drawn as lanes, and who was busy for how long."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape

from rlx.cli.text import duration
from rlx.observe.charts import share_bar
from rlx.observe.rundir import TraceSpan
from rlx.observe.timeline import process_order

COLORS = {
    "wait": "c-wait", "idle": "c-wait", "paused": "c-wait", "pause": "c-wait",
    "train": "c1", "train step": "c1", "step": "c-outer", "publish": "c4", "load": "c4",
    "version": "c4", "verify": "c7",
    "decode": "c3", "generate": "c3", "score": "c6", "prefill": "c7", "pack": "c7", "flatten": "c7",
    "reward": "c5", "evaluate": "c6", "evaluation": "c6", "eval": "c6", "checkpoint": "c8",
    "proximal": "c2", "gate": "c6", "other": "c-other",
}  # fmt: skip
_SPARE = ("c2", "c6", "c8", "c5", "c7")
_MAX_ROWS = 6  # of one process; further ones are only counted
_WAITING = ("wait", "idle", "paused", "pause")


@lru_cache(maxsize=10_000)
def kind(name: str) -> str:
    """What a span is, without the number of what it worked on: `load version 12` → `load`."""
    return re.sub(r"( version)?( #?[\d.]+)+$", "", name) or name


def color_of(name: str) -> str:
    """The CSS class of a phase or span; of an unknown name, always the same one."""
    key = kind(name).lower()
    known = COLORS.get(key) or COLORS.get(key.split()[0] if key.split() else "")
    return known or _SPARE[sum(key.encode()) % len(_SPARE)]


def overview(spans: Sequence[TraceSpan], seconds: float) -> str:
    """The first and the last `seconds` of the run as two drawings behind a switch."""
    if not spans:
        return ""
    start, end = spans[0].start, max(span.end for span in spans)
    length = min(seconds * 1e6, end - start) or 1.0
    names = Counter(kind(span.name) for span in spans)
    keys = "".join(
        f'<li><i class="{color_of(name)}"></i>{escape(name)}</li>'
        for name, _ in names.most_common(12)
    )
    views = (("last", end - length), ("first", start))
    drawn = "".join(
        f'<div class="plot wide view view-{name}">{_lanes(spans, at, at + length, start)}</div>'
        for name, at in views
    )
    return f'<ul class="legend">{keys}</ul>{drawn}'


def busy_shares(spans: Sequence[TraceSpan]) -> str:
    """A bar for each server: the share of the run that each kind of work took, rest idle."""
    servers = sorted(
        {s.process for s in spans if s.process.startswith(("server", "teacher"))}, key=process_order
    )
    if not servers:
        return ""
    start, end = spans[0].start, max(span.end for span in spans)
    bars = []
    for server in servers:
        own = [s for s in spans if s.process == server and s.name.lower() not in _WAITING]
        whole = (end - start) or 1.0
        kinds: dict[str, list[TraceSpan]] = {}
        for span in own:
            kinds.setdefault(kind(span.name), []).append(span)
        parts = [(n, color_of(n), covered(found) / whole) for n, found in kinds.items()]
        parts.sort(key=lambda part: -part[2])
        busy = covered(own) / whole
        if sum(share for _, _, share in parts) > busy * 1.02:  # kinds overlap: shares would not add
            parts = [("busy", "c3", busy)]
        bars.append(share_bar(server, [*parts, ("idle", "c-wait", max(0.0, 1 - busy))]))
    return "".join(bars)


def covered(spans: Iterable[TraceSpan]) -> float:
    """Microseconds in which at least one of the spans, sorted by start, was open."""
    total, reached = 0.0, float("-inf")
    for span in spans:
        if span.end > reached:
            total += span.end - max(span.start, reached)
            reached = span.end
    return total


def _lanes(spans: Sequence[TraceSpan], low: float, high: float, origin: float) -> str:
    """One drawing of low…high µs; times on its axis count from `origin`."""
    rows, hidden = _rows([s for s in spans if s.end > low and s.start < high])
    left, right, row_height = 104, 1120, 13
    scale = (right - left) / (high - low)
    body, y, shown = [], 8.0, None
    for process, row in rows:
        if process != shown:
            y += 8 if shown is not None else 0
            more = f" +{hidden[process]}" if hidden.get(process) else ""
            body.append(
                f'<text class="lane" x="0" y="{y + 10:g}">{escape(process)}'
                f'<tspan class="tick">{more}</tspan></text>'
            )
            shown = process
        for start, end, name, tip in _merged(row, 0.6 / scale):
            x0 = left + (max(start, low) - low) * scale
            x1 = left + (min(end, high) - low) * scale
            body.append(
                f'<rect class="{color_of(name)}" x="{x0:.1f}" y="{y:g}" '
                f'width="{max(x1 - x0, 0.6):.1f}" height="{row_height - 2}" rx="1.5" '
                f'data-tip="{escape(tip)}"/>'
            )
        y += row_height
    axis = _time_axis(low, high, origin, left, scale, y + 4)
    box = f'viewBox="0 0 1124 {y + 26:g}" role="img" aria-label="timeline"'
    return f"<svg {box}>{axis}{''.join(body)}</svg>"


def _rows(spans: Sequence[TraceSpan]) -> tuple[list[tuple[str, list[TraceSpan]]], Counter[str]]:
    """(process, spans) for each row to draw: a lane's nested spans go a row deeper.

    Returns the rows and, per process, how many more did not fit.
    """
    rows: dict[tuple[str, int, int], list[TraceSpan]] = {}
    open_spans: dict[tuple[str, int], list[TraceSpan]] = {}
    for span in spans:
        stack = open_spans.setdefault((span.process, span.lane), [])
        while stack and stack[-1].end <= span.start + 0.5:  # µs: sums of floats are not exact
            stack.pop()
        rows.setdefault((span.process, span.lane, len(stack)), []).append(span)
        stack.append(span)
    kept: list[tuple[str, list[TraceSpan]]] = []
    hidden: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for key in sorted(rows, key=lambda k: (process_order(k[0]), k[1], k[2])):
        count[key[0]] += 1
        if count[key[0]] > _MAX_ROWS:
            hidden[key[0]] += 1
        else:
            kept.append((key[0], rows[key]))
    return kept, hidden


def _merged(row: Sequence[TraceSpan], tiny: float) -> list[tuple[float, float, str, str]]:
    """(start, end, name, tooltip), neighbours too small to be seen apart made one."""
    boxes: list[tuple[float, float, str, str]] = []
    for span in row:
        if boxes and span.end - span.start < tiny and boxes[-1][2] == span.name:
            start, end, name, _ = boxes[-1]
            if span.start - end < tiny:
                boxes[-1] = (start, max(end, span.end), name, f"{name} (several)")
                continue
        args = ", ".join(f"{key} {value}" for key, value in list(span.args.items())[:4])
        tip = f"{span.name} {duration((span.end - span.start) / 1e6)}" + (
            f"\n{args}" if args else ""
        )
        boxes.append((span.start, span.end, span.name, tip))
    return boxes


def _time_axis(
    low: float, high: float, origin: float, left: float, scale: float, bottom: float
) -> str:
    length = (high - low) / 1e6
    sizes = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)
    step = next((s for s in sizes if length / s <= 10), length)
    first = int((low - origin) / 1e6 / step) + 1
    parts = []
    for index in range(first, first + 12):
        x = left + (index * step * 1e6 + origin - low) * scale
        if x > left + length * 1e6 * scale - 10:
            break
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom:g}"/>'
            f'<text class="tick mid" x="{x:.1f}" y="{bottom + 14:g}">{index * step:g} s</text>'
        )
    return "".join(parts)
