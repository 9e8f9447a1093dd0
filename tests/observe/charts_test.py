"""Charts: the geometry a reader trusts, and nothing that breaks the page they stand in."""

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.observe.charts import (
    Line,
    Scale,
    bar_chart,
    embed,
    line_chart,
    smooth,
    stacked_bars,
    ticks,
    time_ticks,
)


def svgs(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


def points(path):
    return [tuple(map(float, p.split())) for p in re.findall(r"[ML]([^ML]+)", path)]


def test_a_line_goes_through_its_values_and_breaks_where_one_is_missing():
    chart = line_chart("T", "about", [Line("a", [0.0, None, 1.0, 0.5])], [1, 2, 3, 4],
                       [1.0, 2.0, 3.0, 4.0], span=(0, 1))  # fmt: skip
    by_step, by_time = svgs(chart)
    path = by_step.find(".//path[@class='line c1']").get("d")
    assert path.count("M") == 2
    (x0, y0), (x1, y1), (x2, y2) = points(path)
    assert x0 < x1 < x2
    assert y1 < y2 < y0, "a larger value must be drawn higher"
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.11)
    assert by_time.get("class") == "by-time"
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', chart).group(1))
    assert data["lines"][0]["values"] == [0.0, None, 1.0, 0.5]


def test_long_lines_are_averaged_and_stay_small():
    values = [float(i % 2) for i in range(20_000)]
    chart = line_chart("T", "", [Line("a", values)], list(range(20_000)), [None] * 20_000)
    assert len(chart) < 40_000
    (drawn,) = svgs(chart)
    heights = {y for _, y in points(drawn.find(".//path[@class='line c1']").get("d"))}
    assert len(heights) == 1, "means of 0, 1, 0, 1, … are all a half"


def test_no_values_no_chart():
    assert line_chart("T", "", [Line("a", [None])], [1], [None]) == ""
    assert bar_chart("T", "", []) == stacked_bars("T", "", [], [1]) == ""


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 1e9])
def test_a_single_step_is_a_visible_dot(value):
    (drawn,) = svgs(line_chart("T", "", [Line("a", [value], smooth=True)], [1], [None]))
    assert len(drawn.findall(".//circle")) == 1
    assert stacked_bars("T", "", [("wait", "c1", [value])], [1])


def test_bars_are_as_high_as_their_shares():
    (drawn,) = svgs(bar_chart("T", "", [("0", 0.25, "t"), ("1", 0.5, "<&>")]))
    low, high = (float(rect.get("height")) for rect in drawn.findall(".//rect"))
    assert high == pytest.approx(2 * low, abs=0.2)


def test_stacks_add_up():
    layers = [("wait", "c1", [1.0, 2.0]), ("train", "c2", [1.0, 2.0])]
    (drawn,) = svgs(stacked_bars("T", "", layers, [1, 2]))
    a, b, c, d = drawn.findall(".//rect")
    assert float(b.get("y")) + float(b.get("height")) == pytest.approx(float(a.get("y")))
    assert float(c.get("height")) == pytest.approx(2 * float(a.get("height")), abs=0.2)
    assert float(d.get("y")) < float(b.get("y"))


def test_names_and_data_cannot_leave_their_place():
    nasty = "</script><script>alert(1)</script>\u2028"
    chart = line_chart(nasty, nasty, [Line(nasty, [1.0])], [1], [None])
    assert "<script>" not in chart
    assert chart.count("</script>") == 1
    assert json.loads(embed({"a": nasty})) == {"a": nasty}
    for drawn in (
        stacked_bars("T", "", [(nasty, "c1", [1.0])], [1]),
        bar_chart("T", "", [(nasty, 1, nasty)]),
    ):
        assert "<script>" not in drawn


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 10))
def test_ticks_cover_the_range_with_round_steps(low, size, count):
    high = low + size
    at = ticks(low, high, count)
    if len(at) > 1:
        step = at[1] - at[0]
        assert at[0] <= low + step * 1e-3
        assert at[-1] >= high - step * 1e-3
        assert len(at) <= count + 3


def test_ticks_of_steps_and_time_are_what_people_count_in():
    assert ticks(1, 120, 5, whole=True) == [25, 50, 75, 100]
    assert ticks(1, 3, 6, whole=True) == [1, 2, 3]
    assert time_ticks(110, 6) == [0, 30, 60, 90]
    assert time_ticks(7200, 5) == [0, 1800, 3600, 5400, 7200]
    assert time_ticks(10 * 86400, 5)[1] == 2 * 86400


def test_the_running_mean_is_unbiased_at_its_start():
    assert smooth([2.0, None, 2.0] * 50)[:4] == pytest.approx([2.0, None, 2.0, 2.0])
    assert smooth([1.0, 5.0]) == [1.0, 5.0], "a short run is shown as it is"


def test_scale_maps_ends_to_ends_and_survives_an_empty_range():
    scale = Scale(10, 20, 100, 0)
    assert (scale(10), scale(15), scale(20)) == (100, 50, 0)
    assert Scale(1, 1, 0, 10)(1) == 0
