"""Rows filled one by one: nothing lost, nothing over, and full where rows are long."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.train import packing


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 200))
def test_rows_hold_everything_and_no_more(sizes, capacity):
    sizes = np.array(sizes, np.int64)
    rows = packing.fullest_rows(sizes, capacity)
    used = np.bincount(rows, weights=sizes) if len(sizes) else np.zeros(0)
    assert (used > 0).all()  # no gaps
    assert (used <= capacity).all()
    assert used.sum() == sizes.sum()


def test_a_row_is_filled_to_the_brim_when_some_subset_does():
    # First fit would put 5 beside 6 and leave a hole of 1 that nothing fits.
    rows = packing.fullest_rows(np.array([6, 5, 4, 3, 3, 2]), 12)
    assert np.bincount(rows, weights=[6, 5, 4, 3, 3, 2]).tolist() == [12, 11]


def test_rows_of_many_sequences_are_nearly_full():
    sizes = np.random.default_rng(0).lognormal(5.0, 0.5, 2000).astype(int).clip(1, 900) + 1
    for length in (2048, 4096):
        rows = packing.fullest_rows(sizes, length)
        assert sizes.sum() / (length * (rows.max() + 1)) > 0.985


@given(st.integers(1, 400), st.sampled_from([1, 2, 3, 5, 8, 10, 64]), st.sampled_from([1, 2, 4]))
def test_microbatches_have_few_sizes_and_waste_little(num_rows, full, shards):
    """What fits in one is one; beyond that at most an eighth of a full one is empty."""
    plan = packing.plan(np.full(num_rows, 100), 100 * full, (100,), shards=shards)
    rows, budget = [n for n, _ in plan.shapes], full * shards
    assert all(n % shards == 0 and n <= budget for n in rows)
    empty = sum(rows) - num_rows
    if num_rows <= budget:
        assert len(rows) == 1
        assert 0 <= empty <= budget // 4 + 2 * shards
    else:
        assert 0 <= empty <= budget // 8 + shards


def test_a_plan_is_never_worse_than_first_fit():
    rng = np.random.default_rng(1)
    for _ in range(20):
        sizes = rng.integers(20, 120, int(rng.integers(1, 60)))
        plan = packing.plan(sizes, 512, (128,))
        assert plan.rows.max() <= packing.first_fit_decreasing(sizes, 128).max()
