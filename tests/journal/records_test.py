"""Groups come back equal: arrays with their dtypes, texts, rows, turns, a teacher's logprobs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import Group, Trajectory
from rlx.journal import records

_text = st.text(max_size=20)  # lone surrogates too: JSON escapes them, and UTF-8 has none
_row = st.dictionaries(_text, st.one_of(_text, st.integers(), st.booleans(), st.none()), max_size=3)


@st.composite
def _trajectory(draw):
    size = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    sizes = rng.integers(0, 3, size).astype(np.int32)
    masks = {"kept_sizes": sizes, "kept": rng.integers(0, 256, sizes.sum()).astype(np.uint8)}
    return Trajectory(
        **draw(st.sampled_from([{}, masks])),
        tokens=rng.integers(0, 2**31 - 1, size).astype(np.int32),
        loss_mask=rng.random(size) < 0.5,
        behaviour_logprobs=-rng.random(size).astype(np.float32),
        versions=rng.integers(-1, 9, size).astype(np.int32),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        stop_reason=draw(st.sampled_from(["stop", "length"])),
        trajectory_id=draw(_text),
        turn_ids=draw(st.sampled_from([None, np.arange(size, dtype=np.int32)])),
        reference_logprobs=draw(st.sampled_from([None, -rng.random(size).astype(np.float32)])),
        agent=draw(_text),
        prompt=draw(_text),
        completion=draw(_text),
        info=draw(st.dictionaries(_text, st.floats(allow_nan=False), max_size=2)),
        baseline=draw(st.floats(allow_nan=False, allow_infinity=False)),
    )


_groups = st.lists(
    st.builds(
        Group,
        st.integers(0, 10**9),
        st.lists(_trajectory(), max_size=3).map(tuple),
        _row,
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(groups=_groups)
def test_round_trip(groups):
    assert_equal(records.loads(records.dumps(groups)), groups)


def assert_equal(back, groups):
    assert [g.group_id for g in back] == [g.group_id for g in groups]
    assert [g.row for g in back] == [g.row for g in groups]
    for old_group, new_group in zip(groups, back, strict=True):
        for old, new in zip(old_group.trajectories, new_group.trajectories, strict=True):
            for name in Trajectory.__slots__:
                was, now = getattr(old, name), getattr(new, name)
                if isinstance(was, np.ndarray):
                    assert now.dtype == was.dtype
                    assert np.array_equal(now, was)
                else:
                    assert now == was


def test_a_row_that_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        records.dumps([Group(0, (), {"image": object()})])


def test_the_turns_of_a_conversation_are_read_as_they_were_written():
    tokens = np.arange(4, dtype=np.int32)
    mask = np.array([False, True, False, True])
    one = Trajectory(
        tokens, mask, -mask.astype(np.float32), np.where(mask, 3, -1).astype(np.int32), 1.5, "stop",
        "0.0", turn_ids=np.array([0, 0, 1, 1], np.int32), turn_rewards=(1.5, 0.1),
        said=((0, 2), (5, 7)),
    )  # fmt: skip
    spans = tuple(np.array([[0, 2], [5, 7]]))
    numpys = replace(one, turn_rewards=(np.float64(1.5), np.float32(0.1)), said=spans)
    for written in (one, numpys):
        (group,) = records.loads(records.dumps([Group(0, (written,))]))
        (read,) = group.trajectories
        assert (read.turn_rewards, read.said) == (tuple(written.turn_rewards), one.said)
        assert read.run_id == "0.0"
