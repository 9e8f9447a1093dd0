"""The capacity formula and the transitions that must be refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.rollout import staleness
from rlx.rollout.staleness import Limits, Staleness, StalenessViolation


@pytest.mark.parametrize(
    ("state", "limits", "expected"),
    [
        (Staleness(), Limits(8, 0, 64), 8),  # synchronous: one batch
        (Staleness(), Limits(8, 2, 64), 24),  # (η + 1)·B inputs at the start
        (Staleness(), Limits(8, 2, 10), 10),  # concurrency is the tighter bound
        (Staleness(running=10), Limits(8, 2, 10), 0),
        (Staleness(running=4, accepted=20), Limits(8, 2, 64), 0),
        (Staleness(version=1, consumed=1, running=4, accepted=20), Limits(8, 2, 64), 8),
        (Staleness(), Limits(8, 2, 0), 1),  # C below 1 counts as 1
        (Staleness(running=2), Limits(8, 2, 1), 0),  # never negative
        (Staleness(), Limits(8, 2, 64, 2), 16),  # two batches are all there will be
        (
            Staleness(version=8, consumed=8, accepted=75, running=3),
            Limits(8, 2, 64, 10),
            2,
        ),
        (
            Staleness(version=3, consumed=3, accepted=30),
            Limits(8, 2, 64, 3),
            0,
        ),  # more than enough
    ],
)
def test_capacity(state, limits, expected):
    assert staleness.capacity(state, limits) == expected


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 6), st.none() | st.integers(0, 9))
def test_capacity_equals_the_floor_form(batch, eta, version, more):
    """The N-th prompt may start exactly when ⌊(N − 1)/B⌋ ≤ min(v + η, T − 1)."""
    limits = Limits(batch, eta, 10**6, None if more is None else version + more)
    last = version + eta if more is None else min(version + eta, version + more - 1)
    state = Staleness(version=version, consumed=version, accepted=version * batch)
    n = state.accepted
    while staleness.capacity(state, limits):
        state, n = staleness.admit(state, limits), n + 1
        assert (n - 1) // batch <= last
    assert n // batch > last


def test_filtering_does_not_let_the_lag_grow():
    """At 60 % acceptance after 20 steps as many batches are admitted as without a filter.

    Counting attempts instead of accepted groups would admit 11 batches where 3 are allowed.
    """
    limits = Limits(10, 2, 10**6)
    state = Staleness()
    for version in range(21):
        state = staleness.publish(state, version)
        for i in range(10**6):
            if not staleness.capacity(state, limits):
                break
            state = staleness.admit(state, limits)
            state = staleness.end(state, "rejected" if i % 5 >= 3 else "accepted")
        if version < 20:
            state = staleness.consume(state, limits)
    assert state.accepted - state.consumed * 10 == 3 * 10
    assert state.rejected > 100


def test_failures_and_rejections_give_the_place_back():
    limits = Limits(2, 0, 8)
    state = staleness.admit(staleness.admit(Staleness(), limits), limits)
    assert staleness.capacity(state, limits) == 0
    assert staleness.capacity(staleness.end(state, "failed"), limits) == 1
    assert staleness.capacity(staleness.end(state, "rejected"), limits) == 1
    skipped = staleness.end(state, "skipped")
    assert staleness.capacity(skipped, limits) == 1
    assert (skipped.failed, skipped.skipped) == (1, 1)
    assert staleness.capacity(staleness.end(state, "accepted"), limits) == 0


def test_resume_counts_what_was_consumed_and_what_is_buffered():
    state = staleness.resume(version=7, buffered=3, limits=Limits(4, 1, 100))
    assert (state.accepted, state.consumed, state.version) == (31, 7, 7)
    assert staleness.capacity(state, Limits(4, 1, 100)) == (1 + 7 + 1) * 4 - 31


@pytest.mark.parametrize(
    "illegal",
    [
        lambda limits: staleness.end(Staleness(), "accepted"),
        lambda limits: staleness.end(Staleness(), "rejected"),
        lambda limits: staleness.end(Staleness(), "failed"),
        lambda limits: staleness.end(Staleness(), "skipped"),
        lambda limits: staleness.publish(Staleness(version=2, consumed=3), 1),
        lambda limits: staleness.publish(Staleness(version=2, consumed=3), 4),
        lambda limits: staleness.consume(Staleness(accepted=1), limits),
        lambda limits: staleness.admit(Staleness(running=2), limits),
    ],
)
def test_illegal_transitions_raise(illegal):
    with pytest.raises(StalenessViolation):
        illegal(Limits(2, 0, 8))
