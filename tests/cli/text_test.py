"""Short texts for numbers: exact strings, because people and scripts read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.cli.text import divide_cells, duration, number, resample, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.417, "0.42 s"), (9.996, "10 s"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07"),
     (None, "–"), (float("nan"), "–"), (-1, "0.00 s")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (True, "1"), (0.73412, "0.734"), (0.0412, "0.0412"), (0.00412, "0.00412"),
     (0.000123, "1.2e-4"), (3.14159, "3.14"), (51.94, "51.9"), (999.6, "999.6"),
     (12345.6, "12,346"), (-0.5, "-0.500"), (999_949, "999,949"), (999_960, "1.0M"),
     (3_200_000, "3.2M"), (2.5e9, "2.5G"), (None, "–"), (float("inf"), "–")],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


def test_sparklines_show_the_shape_and_skip_gaps():
    assert sparkline([0, None, 1, float("nan"), 2], 10) == "▁▅█"
    assert sparkline(list(range(80)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3], 8) == "▁▁▁"
    assert sparkline([1, 2], 0) == sparkline([], 5) == ""


@given(st.lists(st.floats(0, 1e3), max_size=50), st.integers(0, 60))
def test_resampling_never_invents_values(values, count):
    points = resample(values, count)
    assert len(points) == min(len(values), count)
    assert all(min(values) - 1e-9 <= p <= max(values) + 1e-9 for p in points)


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=8), st.integers(0, 40))
def test_shares_fill_the_bar_exactly(parts, width):
    cells = divide_cells(parts, width)
    assert sum(cells) == width
    for part, count in zip(parts, cells, strict=True):
        assert abs(count - part / sum(parts) * width) <= 1
