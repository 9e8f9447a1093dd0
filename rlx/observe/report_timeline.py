"""Draw the report's timeline as rows of boxes, and measure how busy each server was."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rlx.cli.text import duration
from rlx.observe.charts import Share, shares
from rlx.observe.timeline import Span, process_order

COLORS = {
    "wait": "c-wait", "idle": "c-wait", "paused": "c-wait", "pause": "c-wait",
    "train": "c1", "train step": "c1", "step": "c-outer", "publish": "c4", "load": "c4",
    "version": "c4", "verify": "c7",
    "decode": "c3", "generate": "c3", "score": "c6", "prefill": "c7", "pack": "c7", "flatten": "c7",
    "reward": "c5", "evaluate": "c6", "evaluation": "c6", "eval": "c6", "checkpoint": "c8",
    "proximal": "c2", "gate": "c6", "busy": "c3", "other": "c-other",
}  # fmt: skip
_SPARE = ("c2", "c6", "c8", "c5", "c7")
_WAITING = ("wait", "idle", "paused", "pause")
_MAX_ROWS = 6  # of one process; further ones are only counted
_VISIBLE = 0.05  # percent of the width; narrower boxes melt into their neighbours
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)


def color_of(name: str) -> str:
    """Return the CSS class of a phase or span, always the same one for a name."""
    key = name.lower()
    known = COLORS.get(key) or COLORS.get(key.partition(" ")[0])
    return known or _SPARE[sum(key.encode()) % len(_SPARE)]


def overview(spans: Sequence[Span], seconds: float) -> dict[str, Any] | None:
    """Return the last and the first `seconds` of a run as rows, boxes and ticks; None for no spans.

    Args:
      spans: sorted by start, outer spans before those inside them.

    Returns:
      `keys`: a legend of the most frequent spans. `views`: drawings in percentages of the width.
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


def _rows(
    spans: Sequence[Span], low: float, length: float
) -> list[tuple[str, int, list[list[dict[str, Any]]]]]:
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
