"""Charts as SVG text: pure functions from numbers to HTML figures, coloured by the page's CSS.

Drawn here rather than by a plotting library so that one page carries fifteen of them in
a few hundred kilobytes, in the reader's own light or dark colours, and can be pointed at.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rlx.cli.text import duration, number

MAX_POINTS = 500  # a longer line is averaged down to that many
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 26  # room for the axes, user units


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
      color: CSS class, `c1`…`c8`.
      smooth: draw a running mean, with the values themselves faint behind it.
      dots: mark each value.
      steps, times: where the values lie, when not at the chart's own steps and seconds.
    """

    name: str
    values: Sequence[float | None]
    color: str = "c1"
    smooth: bool = False
    dots: bool = False
    steps: Sequence[float] | None = None
    times: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Scale:
    """A linear map from data to user units; with `clip`, no further than its upper end."""

    low: float
    high: float
    start: float
    end: float
    clip: bool = False

    def __call__(self, value: float) -> float:
        value = min(value, self.high) if self.clip else value
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(
    title: str,
    about: str,
    lines: Sequence[Line],
    steps: Sequence[float],
    times: Sequence[float | None],
    *,
    size: tuple[int, int] = (360, 190),
    span: tuple[float | None, float | None] = (None, None),
    form: Callable[[float | None], str] = number,
    robust: bool = False,
) -> str:
    """Lines over steps, and over wall time for the page's switch. Empty without a value.

    Args:
      steps, times: where the values lie; times in seconds.
      size: width and height in user units; text keeps its size at that width.
      span: least and greatest y that must be visible; None leaves it to the values.
      form: how values read in legend and tooltip.
      robust: a few much larger values (a first step that compiles) are cut at the top edge.
    """
    lines = [line for line in lines if any(v is not None for v in line.values)]
    if not lines:
        return ""
    drawn = [_thin(line, steps, times) for line in lines]
    values = [v for line in drawn for v in line.values if v is not None]
    low, high = _extent(values, span)
    if robust:
        high = min(high, _usual(values))
    y_ticks = ticks(low, high, max(2, size[1] // 50))
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    y = Scale(low, high, size[1] - _BOTTOM, _TOP, clip=robust)
    variants = [_plot("step", drawn, [line.steps or [] for line in drawn], y, y_ticks, size)]
    if any(t is not None for line in drawn for t in line.times or []):
        variants.append(
            _plot("time", drawn, [line.times or [] for line in drawn], y, y_ticks, size)
        )
    points = {
        "y": [y.low, y.high, y.start, y.end],
        "lines": [
            {"name": line.name, "color": line.color, "steps": line.steps, "times": line.times,
             "values": line.values, "text": [form(v) for v in line.values]}
            for line in drawn
        ],
    }  # fmt: skip
    keys = [(line.color, line.name, form(_last(line.values))) for line in lines]
    return figure(title, about, "".join(variants), keys, points)


def bar_chart(
    title: str,
    about: str,
    bars: Sequence[tuple[str, float, str]],
    *,
    size: tuple[int, int] = (360, 190),
) -> str:
    """Vertical bars of shares: (label, share in 0…1, tooltip), each with its percentage on top."""
    if not bars:
        return ""
    width, height = size
    top = max(share for _, share, _ in bars) or 1.0
    y = Scale(0, top, height - _BOTTOM, _TOP + 16)
    slot = (width - 24) / len(bars)
    thick = min(slot * 0.72, 64)
    parts = []
    for index, (label, share, tip) in enumerate(bars):
        x = 12 + slot * (index + 0.5)
        parts.append(
            f'<g data-tip="{escape(tip)}">'
            f'<rect class="bar lag{min(index, 5)}" x="{x - thick / 2:.1f}" y="{y(share)}" '
            f'width="{thick:.1f}" height="{y.start - y(share):.1f}" rx="3"/>'
            f'<text class="value" x="{x:.1f}" y="{y(share) - 6:.1f}">{percent(share)}</text>'
            f'<text class="tick mid" x="{x:.1f}" y="{height - 9}">{escape(label)}</text></g>'
        )
    base = f'<line class="axis" x1="12" x2="{width - 12}" y1="{y.start}" y2="{y.start}"/>'
    return figure(title, about, _svg(size, base + "".join(parts), title))


def stacked_bars(
    title: str,
    about: str,
    layers: Sequence[tuple[str, str, Sequence[float]]],
    steps: Sequence[float],
    *,
    size: tuple[int, int] = (548, 220),
    form: Callable[[float | None], str] = duration,
) -> str:
    """A stack of (name, color, values) at every step; neighbours are averaged to save room, and
    a few much higher stacks are cut at the top edge."""
    if not layers or not steps:
        return ""
    width, height = size
    most = (width - _LEFT - _RIGHT) // 5
    parts = _parts(len(steps), most)
    means = [[_mean(values[a:b]) or 0.0 for a, b in parts] for _, _, values in layers]
    totals = [sum(column) for column in zip(*means, strict=True)]
    top = min(max(totals), _usual(totals)) or 1.0
    y_ticks = ticks(0.0, top, 4)
    y = Scale(0.0, max(top, y_ticks[-1]), height - _BOTTOM, _TOP, clip=True)
    slot = (width - _LEFT - _RIGHT) / len(parts)
    gap = min(1.5, slot * 0.2)
    body = [_y_axis(y, y_ticks, width, form)]
    for i, (a, b) in enumerate(parts):
        named = [f"{name} {form(m[i])}" for (name, _, _), m in zip(layers, means, strict=True)]
        where = f"step {steps[a]:g}" + (f"–{steps[b - 1]:g}" if b - a > 1 else "")
        body.append(f'<g data-tip="{escape(where)}&#10;{escape(chr(10).join(named))}">')
        base = 0.0
        for (_, color, _), mean in zip(layers, means, strict=True):
            upper = base + mean[i]
            tall = y(base) - y(upper)
            if tall > 0:
                body.append(
                    f'<rect class="{color}" x="{_LEFT + i * slot:.1f}" y="{y(upper)}" '
                    f'width="{slot - gap:.1f}" height="{tall:.1f}"/>'
                )
            base = upper
        body.append("</g>")
    x = Scale(steps[0] - 0.5, steps[-1] + 0.5, _LEFT, width - _RIGHT)
    body.append(_x_axis(x, ticks(steps[0], steps[-1], 6, whole=True), size, "step", "{:g}".format))
    keys = [(color, name, form(_mean(values))) for name, color, values in layers]
    return figure(title, about, _svg(size, "".join(body), title), keys)


def share_bar(label: str, parts: Iterable[tuple[str, str, float]], note: str = "") -> str:
    """One horizontal bar of the whole: (name, color, share), the names on hover and beside it."""
    parts = [(name, color, share) for name, color, share in parts if share > 0.0005]
    cells = "".join(
        f'<span class="{color}" style="flex-grow:{share:.4f}" '
        f'data-tip="{escape(name)} {percent(share)}"></span>'
        for name, color, share in parts
    )
    keys = "".join(
        f'<li><i class="{color}"></i>{escape(name)} <b>{percent(share)}</b></li>'
        for name, color, share in parts
    )
    note = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<div class="share"><h4>{escape(label)}{note}</h4><div class="shares">{cells}</div>'
        f'<ul class="legend">{keys}</ul></div>'
    )


def figure(
    title: str,
    about: str,
    body: str,
    keys: Sequence[tuple[str, str, str]] = (),
    points: dict | None = None,
) -> str:
    """A card with heading, legend of (color, name, latest) and the points JavaScript reads."""
    items = "".join(
        f'<li><i class="{color}"></i>{escape(name)} <b>{escape(value)}</b></li>'
        for color, name, value in keys
    )
    legend = f'<ul class="legend">{items}</ul>' if keys else ""
    data = f'<script type="application/json">{embed(points)}</script>' if points else ""
    return (
        f'<figure class="card"><figcaption><h3>{escape(title)}</h3><p>{escape(about)}</p>{legend}'
        f'</figcaption><div class="plot">{body}</div>{data}</figure>'
    )


def grid(columns: str, cards: Sequence[str]) -> str:
    """Cards side by side, `two` or `three` a row; empty ones are left out."""
    cards = [card for card in cards if card]
    return f'<div class="grid {columns}">{"".join(cards)}</div>' if cards else ""


def embed(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def percent(share: float) -> str:
    """`0.3 %`, `12 %`."""
    return f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f} %"


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round numbers that cover low…high (inside it when `whole`)."""
    size = (high - low) / max(count, 1)
    if size <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= size * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def time_ticks(high: float, count: int) -> list[float]:
    """Seconds from 0 to `high` at steps people read: 1, 2, 5, 10, 15, 30, 60, …"""
    sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200]
    step = next((s for s in sizes if high / s <= count), 86400 * math.ceil(high / 86400 / count))
    return [float(i * step) for i in range(int(high // step) + 1)]


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Exponential running mean over about a fifteenth of the run, unbiased at its start."""
    keep = 1 - 1 / max(1.0, len(values) / 30)
    total = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if value is not None else None)
    return means


def _plot(
    kind: str,
    lines: Sequence[Line],
    places: Sequence[Sequence[float | None]],
    y: Scale,
    y_ticks: Sequence[float],
    size: tuple[int, int],
) -> str:
    known = [p for place in places for p in place if p is not None]
    high = max(known, default=1.0)
    low = 0.0 if kind == "time" else min(known, default=0.0)
    if high <= low:
        low, high = low - 1, high + 1
    x = Scale(low, high, _LEFT, size[0] - _RIGHT)
    body = [_y_axis(y, y_ticks, size[0], number)]
    if kind == "time":
        form, at = _clock, time_ticks(high, size[0] // 64)
    else:
        form, at = "{:g}".format, ticks(low, high, size[0] // 64, whole=True)
    body.append(_x_axis(x, at, size, "step" if kind == "step" else "wall time", form))
    for line, place in zip(lines, places, strict=True):
        points = [(p, v) for p, v in zip(place, line.values, strict=True) if p is not None]
        means = smooth([v for _, v in points]) if line.smooth else [v for _, v in points]
        if line.smooth:
            body.append(_path([(x(p), v if v is None else y(v)) for p, v in points], line, "raw"))
        at_means = [
            (x(p), None if m is None else y(m)) for (p, _), m in zip(points, means, strict=True)
        ]
        body.append(_path(at_means, line, "line"))
        if line.dots or sum(v is not None for _, v in at_means) == 1:
            body.extend(
                f'<circle class="dot {line.color}" cx="{px}" cy="{py}" r="3"/>'
                for px, py in at_means
                if py is not None
            )
    cross = f'<line class="cross" y1="{_TOP}" y2="{size[1] - _BOTTOM}"/>'
    guide = f'<g class="guide" hidden="hidden">{cross}</g>'
    attributes = f' class="by-{kind}" data-x="{x.low},{x.high},{x.start},{x.end}"'
    return _svg(size, "".join(body) + guide, kind, attributes)


def _path(points: Sequence[tuple[float, float | None]], line: Line, kind: str) -> str:
    """A polyline that breaks where a value is missing."""
    data, pen = [], "M"
    for px, py in points:
        if py is None:
            pen = "M"
            continue
        data.append(f"{pen}{px:g} {py:g}")
        pen = "L"
    return f'<path class="{kind} {line.color}" d="{"".join(data)}"/>'


def _y_axis(y: Scale, at: Sequence[float], width: int, form: Callable[[float], str]) -> str:
    decimals = max((len(f"{t:.10f}".rstrip("0").split(".")[1]) for t in at), default=0)
    plain = max(abs(t) for t in at) < 1000 and decimals <= 4 and form is number
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(t)}" y2="{y(t)}"/>'
        f'<text class="tick end" x="{_LEFT - 7}" y="{y(t) + 3.5}">'
        f"{f'{t:.{decimals}f}' if plain else _short(t) if form is number else form(t)}</text>"
        for t in at
    )


def _x_axis(
    x: Scale, at: Sequence[float], size: tuple[int, int], name: str, form: Callable[[float], str]
) -> str:
    y = size[1] - _BOTTOM
    labels = "".join(
        f'<text class="tick mid" x="{x(t)}" y="{y + 17}">{escape(form(t))}</text>'
        for t in at
        if x(t) < size[0] - _RIGHT - 24 - 4 * len(name)
    )
    return (
        f'<line class="axis" x1="{_LEFT}" x2="{size[0] - _RIGHT}" y1="{y}" y2="{y}"/>{labels}'
        f'<text class="tick end" x="{size[0] - _RIGHT}" y="{y + 17}">{name}</text>'
    )


def _svg(size: tuple[int, int], body: str, label: str, attributes: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label)}"'
        f"{attributes}>{body}</svg>"
    )


def _short(value: float) -> str:
    """Axis numbers: 12000 → 12k, 0.00005 → 5e-5."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:g}"


def _clock(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else duration(seconds)


def _thin(line: Line, steps: Sequence[float], times: Sequence[float | None]) -> Line:
    """`line` with its places, averaged down to MAX_POINTS."""
    steps = list(line.steps if line.steps is not None else steps)
    times = list(line.times if line.times is not None else times)
    parts = _parts(len(line.values), MAX_POINTS)
    values = [_mean(line.values[a:b]) for a, b in parts]
    return Line(line.name, values, line.color, line.smooth, line.dots,
                [steps[b - 1] for _, b in parts],
                [times[b - 1] if b <= len(times) else None for _, b in parts])  # fmt: skip


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """0…count cut into at most `most` equal consecutive ranges."""
    most = min(count, most)
    edges = [round(i * count / max(most, 1)) for i in range(most + 1)]
    return [(edges[i], edges[i + 1]) for i in range(most)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _last(values: Sequence[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


def _usual(values: Sequence[float]) -> float:
    """A height above which values are so rare and so large that they would flatten the rest."""
    return 2.5 * sorted(values)[int(0.9 * (len(values) - 1))]


def _extent(
    values: Sequence[float], span: tuple[float | None, float | None]
) -> tuple[float, float]:
    """Least and greatest y to show, never equal."""
    low = min(values) if span[0] is None else min(*values, span[0])
    high = max(values) if span[1] is None else max(*values, span[1])
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-9):
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    return low, high
