"""Sessions of applications as a state machine, under any order of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.agents.session_state import Denied, SessionState

OPEN = SessionState("s", 0.0, 0.0, "k", "", -1)
IDS = st.sampled_from(("a", "b", "c"))
REWARDS = st.one_of(st.floats(-1, 1), st.dictionaries(IDS, st.floats(-1, 1)))
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("add_answer"), st.tuples(IDS)),
        st.tuples(st.just("add_reward"), st.tuples(REWARDS)),
        st.tuples(st.just("end"), st.tuples(st.sampled_from(("application", "idle")))),
        st.tuples(
            st.just("take"),
            st.tuples(st.sampled_from(("trained", "exported", "dropped")), st.just("")),
        ),
    ),
    max_size=30,
)


def fold(requests):
    """(state, requests that were taken, (name, state, reason) of the others)"""
    state, taken, refused = OPEN, [], []
    for name, given_ in requests:
        try:
            state = getattr(state, name)(*given_)
            taken.append((name, *given_))
        except Denied as error:
            refused.append((name, state, error.reason))
    return state, taken, refused


@given(REQUESTS)
def test_changes_come_in_the_order_of_a_session_whatever_is_tried(requests):
    state, taken, refused = fold(requests)
    names = [name for name, *_ in taken]
    assert names.count("end") <= 1
    if "end" in names:
        assert "add_answer" not in names[names.index("end") :]
    if "take" in names:
        assert "end" in names[: names.index("take")]
        assert not {"add_reward", "add_answer"} & set(names[names.index("take") :])
        assert len({how for name, how, *_ in taken if name == "take"}) == 1
    for name, before, reason in refused:
        if name == "add_answer":
            assert (reason, before.stage) in (("ended", "ended"), ("ended", "taken"))
    answers = [completion for name, completion, *_ in taken if name == "add_answer"]
    assert state.completions == tuple(dict.fromkeys(answers))


@given(REQUESTS)
def test_the_last_reward_holds_and_those_of_completions_add_up(requests):
    state, taken, _ = fold(requests)
    expected = None
    for name, value, *_ in taken:
        if name == "add_reward":
            if isinstance(value, dict):
                expected = {**(expected if isinstance(expected, dict) else {}), **value}
            else:
                expected = value
    assert state.reward == expected


def test_a_reward_names_its_session_s_own_completions():
    with pytest.raises(Denied, match="has no answer yet"):
        OPEN.add_reward(1.0)
    with pytest.raises(Denied, match="no completion 'b'"):
        OPEN.add_answer("a").add_reward({"a": 1.0, "b": 0.0})
