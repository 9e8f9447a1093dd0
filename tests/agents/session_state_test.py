"""Sessions of applications as a state machine: what hypothesis finds possible is as told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.agents.session_state import Denied, SessionEvent, advance

IDS = ("a", "b", "c")
KINDS = {
    "open": st.builds(lambda slot: {"key": "k", "task": "", "slot": slot}, st.integers(-1, 3)),
    "answer": st.builds(lambda name: {"completion": name}, st.sampled_from(IDS)),
    "reward": st.builds(
        lambda value: {"value": value},
        st.one_of(st.floats(-1, 1), st.dictionaries(st.sampled_from(IDS), st.floats(-1, 1))),
    ),
    "end": st.builds(lambda by: {"by": by}, st.sampled_from(("application", "idle", "admin"))),
    "take": st.builds(
        lambda how: {"how": how, "why": ""}, st.sampled_from(("trained", "exported", "dropped"))
    ),
}
EVENTS = st.lists(
    st.sampled_from(sorted(KINDS)).flatmap(lambda k: st.tuples(st.just(k), KINDS[k])), max_size=30
)


def fold(events):
    """(state, events that were taken, reasons of the others)"""
    state, taken, refused = None, [], []
    for time, (kind, data) in enumerate(events):
        event = SessionEvent(kind, "s", float(time), data)
        try:
            state = advance(state, event)
            taken.append(event)
        except Denied as error:
            refused.append((kind, state, error.reason))
    return state, taken, refused


@given(EVENTS)
def test_events_come_in_the_order_of_a_session_whatever_is_tried(events):
    state, taken, refused = fold(events)
    kinds = [event.event for event in taken]
    assert kinds[:1] in ([], ["open"])
    assert kinds.count("open") <= 1
    assert kinds.count("end") <= 1
    if "end" in kinds:
        assert "answer" not in kinds[kinds.index("end") :]
    if "take" in kinds:
        assert "end" in kinds[: kinds.index("take")]
        assert not {"reward", "answer"} & set(kinds[kinds.index("take") :])
        assert len({event.data["how"] for event in taken if event.event == "take"}) == 1
    for kind, before, reason in refused:
        if before is None:
            assert reason == "unknown"
        elif kind == "answer":
            assert (reason, before.stage) in (("ended", "ended"), ("ended", "taken"))
        elif kind == "open":
            assert reason == "open"
    if state:
        answers = [e.data["completion"] for e in taken if e.event == "answer"]
        assert state.completions == tuple(dict.fromkeys(answers))
        assert state.touched == taken[-1].time


@given(EVENTS)
def test_the_last_reward_holds_and_those_of_completions_add_up(events):
    state, taken, _ = fold(events)
    expected = None
    for event in taken:
        if event.event == "reward":
            value = event.data["value"]
            if isinstance(value, dict):
                expected = {**(expected if isinstance(expected, dict) else {}), **value}
            else:
                expected = value
    assert (state.reward if state else None) == expected


def test_a_reward_names_its_session_s_own_completions():
    state = advance(None, SessionEvent("open", "s", 0.0, {"key": "k", "task": "", "slot": -1}))
    with pytest.raises(Denied, match="nothing was generated"):
        advance(state, SessionEvent("reward", "s", 1.0, {"value": 1.0}))
    state = advance(state, SessionEvent("answer", "s", 1.0, {"completion": "a"}))
    with pytest.raises(Denied, match="no completion 'b'"):
        advance(state, SessionEvent("reward", "s", 2.0, {"value": {"a": 1.0, "b": 0.0}}))
