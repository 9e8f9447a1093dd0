"""The lengths of answers: the mean and the share at the limit are those that were asked for."""

import random

import pytest

from rlx.base import UserError
from rlx.plan.simulate import Lengths


@pytest.mark.parametrize(("mean", "cut"), [(7900, 0.12), (7900, 0.0), (1500, 0.01), (15000, 0.6)])
def test_mean_and_share_are_those_given(mean, cut):
    found = Lengths.fit(mean, 16384, cut)
    assert found.mean == pytest.approx(mean, rel=0.01)
    assert sum(n == 16384 for n in found.quantiles) / 1000 == pytest.approx(cut, abs=0.002)
    assert list(found.quantiles) == sorted(found.quantiles)
    generator = random.Random(0)
    drawn = [found.draw(generator) for _ in range(20_000)]
    assert sum(drawn) / 20_000 == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("mean", [1.0, 20000.0])
def test_a_mean_that_no_distribution_has_is_one_line(mean):
    with pytest.raises(UserError, match="give a mean between"):
        Lengths.fit(mean, 16384, 0.12)


@pytest.mark.parametrize("cut", [1.0, float("inf")])
def test_a_share_of_all_answers_is_one_line(cut):
    with pytest.raises(UserError, match="not below 1; give less"):
        Lengths.fit(500, 1024, cut)


def test_no_spread_is_wider_than_published_answers():
    found = Lengths.fit(650, 28_672, 0.002).quantiles
    assert sum(n == 28_672 for n in found) == 2
    assert found[840] / found[500] < 2.8, "a standard deviation of the body's logarithms is 1"


def test_measured_lengths_are_kept():
    assert Lengths.measured([3, 1, 2]).quantiles == (1.0, 2.0, 3.0)
