"""Make charts as dicts of JSON types: lines thinned, smoothed and scaled.

The template writes a chart's heading and legend, report.js draws its lines with uPlot.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlx.cli.text import number, visible

MAX_POINTS = 500  # longer lines are averaged down to this many values
_MAX_BARS = 98  # the eye cannot separate more stacked bars


Axes = tuple[Sequence[float], Sequence[float | None]]  # steps and seconds of values


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float | None]  # one for each step; None where a step has none
    color: str = "c1"  # CSS class, `c1`…`c8`
    smooth: bool = False  # draw a running mean, and the values themselves faint behind it
    dots: bool = False  # mark each value
    steps: Sequence[float] | None = None  # steps, times: places of the values; None: the axes'
    times: Sequence[float | None] | None = None
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None  # lows, highs


def line_chart(
    title: str,
    about: str,
    lines: Sequence[Line],
    axes: Axes,
    *,
    low: float | None = None,  # low, high: a y that must be visible; None leaves it to the values
    high: float | None = None,
    unit: str = "",  # follows each value in the legend and under the pointer
    cut: bool = False,  # end below a few much larger values (a first step that compiles)
    stacked: bool = False,  # draw bars on one another; the legend shows means, not last values
) -> dict[str, Any] | None:
    """Return a chart of lines over steps and over wall time; None without a value."""
    nonempty = [line for line in lines if any(value is not None for value in line.values)]
    series = [_line_json(line, axes, unit, stacked) for line in nonempty]
    if not series:
        return None
    heights = [value for line in series for value in line["values"] if value is not None]
    if stacked:
        heights = [sum(column) for column in zip(*(line["values"] for line in series), strict=True)]
    usual = 2.5 * sorted(heights)[int(0.9 * (len(heights) - 1))]
    return {
        "title": title, "about": about, "lines": series, "low": low, "high": high, "unit": unit,
        "stacked": stacked, "top": usual if cut and usual > 0 else None,
    }  # fmt: skip


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Return the exponential running mean over about 1/15 of `values`, unbiased at the start."""
    keep = 1 - 1 / max(1.0, len(values) / 30)
    total = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if value is not None else None)
    return means


class Share(NamedTuple):
    """A part of a whole for a bar and its legend: CSS class, name, share in 0…1."""

    color: str
    name: str
    share: float
    latest: str  # the share as the legend shows it


def shares(amounts: Mapping[str, float], total: float, color: Callable[[str], str]) -> list[Share]:
    """Return each amount's share of `total`; leave out shares too small to be seen."""
    parts = {name: amount / (total or 1.0) for name, amount in amounts.items()}
    return [Share(color(n), n, part, percent(part)) for n, part in parts.items() if part > 0.0005]


def percent(share: float) -> str:
    """Format a share in 0…1: `0.3 %`, `12 %`."""
    return f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f} %"


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None without one."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _line_json(line: Line, axes: Axes, unit: str, stacked: bool) -> dict[str, Any]:
    """Return the line as JSON; consecutive values are averaged where there are too many."""
    steps, times = (axes[0] if line.steps is None else line.steps), line.times or axes[1]
    count = min(len(line.values), _MAX_BARS if stacked else MAX_POINTS)
    edges = [round(i * len(line.values) / count) for i in range(count + 1)]
    values, *bands = (
        [mean(side[a:b]) for a, b in itertools.pairwise(edges)]
        for side in (line.values, *(line.band or ()))
    )
    latest = mean(values) if stacked else next(v for v in reversed(values) if v is not None)
    short, means, *band = (  # six digits are more than a chart shows
        [value if value is None else float(f"{value:.6g}") for value in series]
        for series in (values, smooth(values), *bands)
    )
    return {
        "name": visible(line.name), "color": line.color, "dots": line.dots,
        "steps": [steps[b - 1] for b in edges[1:]], "times": [times[b - 1] for b in edges[1:]],
        "values": short, "means": means if line.smooth else None, "band": band,
        "latest": f"{number(latest)} {unit}".strip(),
    }  # fmt: skip
