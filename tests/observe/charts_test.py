"""Charts: the values a reader trusts, averaged, smoothed and scaled before the page draws them."""

import json

import pytest

from rlx.observe.charts import Line, line_chart, shares, smooth


def test_a_line_keeps_its_values_and_their_gaps():
    axes = [1, 2, 3, 4], [1.0, 2.0, None, 4.0]
    chart = line_chart("T", "about", [Line("a", [0.0, None, 1.0, 0.5])], axes, low=0, high=1)
    (line,) = chart["lines"]
    assert line["values"] == [0.0, None, 1.0, 0.5]
    assert (line["steps"], line["times"]) == axes
    assert line["means"] is None
    assert line["latest"] == "0.500"
    assert (chart["low"], chart["high"], chart["top"]) == (0, 1, None)


def test_a_line_may_have_places_of_its_own():
    evaluated = Line("e", [0.5, 0.75], dots=True, steps=[0, 10], times=[0.0, None])
    chart = line_chart("T", "", [Line("a", [None] * 3), evaluated], ([1, 2, 3], [1.0, 2.0, 3.0]))
    (line,) = chart["lines"]
    assert (line["name"], line["steps"], line["times"]) == ("e", [0, 10], [0.0, None])


def test_long_lines_are_averaged_and_stay_small():
    values = [float(i % 2) for i in range(20_000)]
    chart = line_chart("T", "", [Line("a", values)], (range(20_000), [None] * 20_000))
    assert len(json.dumps(chart)) < 20_000
    (line,) = chart["lines"]
    assert set(line["values"]) == {0.5}, "means of 0, 1, 0, 1, … are all a half"
    assert line["steps"][-1] == 19_999


def test_no_values_no_chart():
    assert line_chart("T", "", [Line("a", [None])], ([1], [None])) is None
    assert line_chart("T", "", [], ([1], [None]), stacked=True) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 1e9])
def test_a_single_step_is_a_chart(value):
    chart = line_chart("T", "", [Line("a", [value], smooth=True)], ([1], [None]), cut=True)
    assert chart["lines"][0]["values"] == chart["lines"][0]["means"] == [value]
    assert chart["top"] is None or chart["top"] >= value
    assert line_chart("T", "", [Line("wait", [value])], ([1], [None]), stacked=True)


def test_a_few_much_larger_values_are_cut():
    compiling = [90.0, *[1.0] * 40]
    chart = line_chart("T", "", [Line("a", compiling)], (range(41), [None] * 41), cut=True)
    assert chart["top"] == 2.5
    layers = [Line("wait", compiling), Line("train", [1.0] * 41)]
    chart = line_chart("T", "", layers, (range(41), [None] * 41), cut=True, stacked=True)
    assert chart["top"] == 5.0, "what counts is how high the stack is"


def test_the_legend_of_a_stack_has_means():
    layers = [Line("wait", [1.0, 2.0]), Line("train", [3.0, 3.0])]
    chart = line_chart("T", "", layers, ([1, 2], [None] * 2), unit="s", stacked=True)
    assert [line["latest"] for line in chart["lines"]] == ["1.500 s", "3 s"]


def test_shares_are_of_the_whole_and_leave_out_what_cannot_be_seen():
    found = shares({"train": 3.0, "wait": 1.0, "log": 1e-6}, 4.0, lambda name: f"c-{name}")
    assert found == [("c-train", "train", 0.75, "75 %"), ("c-wait", "wait", 0.25, "25 %")]
    assert shares({"idle": 0.0}, 0.0, str) == []


def test_the_running_mean_is_unbiased_at_its_start():
    assert smooth([2.0, None, 2.0] * 50)[:4] == pytest.approx([2.0, None, 2.0, 2.0])
    assert smooth([1.0, 5.0]) == [1.0, 5.0], "a short run is shown as it is"
