"""Interactions and rewards become trajectories; sessions reuse tokens."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.agents import trajectories
from rlx.agents.sessions import Interaction, Sessions
from rlx.base import Group, RewardParts
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.train import packing


def made(number, prompt, said, parent=None, stop="stop", version=3):
    """Tokens are the numbers given; the text of token t is `<t>`."""
    completion = Completion(
        np.array(said, np.int32),
        -np.arange(1, len(said) + 1, dtype=np.float32),
        np.full(len(said), version, np.int32),
        stop,
    )
    return Interaction(
        f"c{number}", 0, np.array(prompt, np.int32), text(prompt), completion, text(said),
        text(said), parent,
    )  # fmt: skip


def text(ids):
    return "".join(f"<{i}>" for i in ids)


def encode(written, images=()):
    return [int(part) for part in written.strip("<>").split("><") if part]


TALK = (  # two turns of one conversation, and one aside
    made(0, [1, 2], [10, 11], version=3),
    made(1, [5], [50]),
    made(2, [1, 2, 10, 11, 3, 4], [12], parent=0, stop="length", version=4),
)


def test_a_conversation_is_one_sequence_with_its_observations_masked():
    aside, talk = trajectories.of_run(TALK, 0.5, "7.1", agent="A")  # as they end
    assert talk.tokens.tolist() == [1, 2, 10, 11, 3, 4, 12]
    assert talk.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert talk.behaviour_logprobs.tolist() == [0, 0, -1, -2, 0, 0, -1]
    assert talk.versions.tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert talk.turn_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (talk.tokens.dtype, talk.behaviour_logprobs.dtype) == (np.int32, np.float32)
    assert (talk.versions.dtype, talk.turn_ids.dtype) == (np.int32, np.int32)
    assert (talk.reward, talk.stop_reason, talk.agent) == (0.5, "length", "A")
    assert (talk.prompt, talk.completion) == ("<1><2>", "<10><11><3><4><12>")
    assert aside.tokens.tolist() == [5, 50]
    assert aside.reward == 0.5  # the run's: all that it said led to it
    assert [t.trajectory_id for t in (aside, talk)] == ["7.1.0", "7.1.1"]
    (only,) = trajectories.of_run(TALK[:1], 1, "7.1")
    assert only.trajectory_id == "7.1"


def test_the_turns_of_a_trajectory_are_found_again():
    _, talk = trajectories.of_run(TALK, 0.5, "7.1")
    assert trajectories.turns(talk) == [([1, 2], [10, 11]), ([3, 4], [12])]


@pytest.mark.parametrize("export", trajectories.EXPORTS)
def test_a_recorded_sample_ends_with_what_the_agent_was_answered_last(export):
    class Tokenizer:
        def decode(self, ids, skip_special_tokens=False):
            return text(ids)

    rows = trajectories.of_run(TALK, 0.5, "7.1", agent="A", export=export)
    record = trajectories.record(rows, Tokenizer())
    assert (record["completion"], record["stop_reason"]) == ("<12>", "length")


def test_rewards_by_completion_land_on_their_own_tokens():
    value = {"c2": 1.0, "c0": 0.5}
    options = {"turn_discount": 0.5, "export": "individual"}
    first, aside, second = trajectories.of_run(TALK, value, "7.1", **options)
    assert [t.tokens.tolist() for t in (first, second, aside)] == [
        [1, 2, 10, 11], [1, 2, 10, 11, 3, 4, 12], [5, 50],
    ]  # fmt: skip
    assert second.loss_mask.tolist() == [False] * 6 + [True]
    assert [t.reward for t in (first, second, aside)] == [0.5 + 0.5 * 1.0, 1.0, 0.0]
    assert set(second.turn_ids.tolist()) == {1}
    assert trajectories.outcome(TALK, value) == 1.0
    assert trajectories.outcome(TALK, {"c0": 0.5}) == 0.5
    assert first.info["run_reward"] == 1.0


def test_no_part_of_a_reward_takes_the_place_of_the_reward():
    value = RewardParts(0.5, {"run_reward": 9.0, "reward/style": 0.25})
    for row in trajectories.of_run(TALK, value, "7.1"):
        assert (row.run_reward, row.info["reward/style"]) == (0.5, 0.25)


def test_a_number_can_be_shared_out_by_completion_too():
    found = trajectories.of_run(TALK, 1, "7.1", turn_discount=0.9, export="individual")
    assert [t.reward for t in found] == pytest.approx([0.9, 1.0, 1.0])


def test_two_that_go_on_from_one_place_share_nothing_trained():
    fork = made(3, [1, 2, 10, 11, 9], [13], parent=0)
    found = trajectories.of_run([*TALK, fork], 1.0, "0.0")
    assert sum(t.num_trained for t in found) == 2 + 1 + 1 + 1
    assert found[2].tokens.tolist() == [1, 2, 10, 11, 9, 13]
    assert found[2].loss_mask.sum() == 1


def test_a_tree_s_row_has_each_turn_s_return_and_concat_the_last_one_s():
    value = {"c2": 1.0, "c0": 0.5}
    _, talk = trajectories.of_run(TALK, value, "7.1", turn_discount=0.5)
    assert (talk.turn_rewards, talk.reward) == ((), 1.0)  # 0.5 + 0.5·1 in both turns
    _, talk = trajectories.of_run(TALK, value, "7.1")
    assert (talk.turn_rewards, talk.reward) == ((1.5, 1.0), 1.5)
    aside, talk = trajectories.of_run(TALK, value, "7.1", export="concat")  # as they end
    assert (talk.turn_rewards, talk.reward, aside.reward) == ((), 1.0, 0.0)
    assert talk.num_trained == 3


@st.composite
def runs(draw):
    """Forests of completions, some of them choices of one request, with a run's value."""
    found = []
    for number in range(draw(st.integers(1, 9))):
        again = found and draw(st.integers(0, 3)) == 0
        if again:  # another choice of the last request
            asked, parent, name = found[-1].prompt_tokens, found[-1].parent, found[-1].completion_id
        else:
            parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
            name = f"c{number}"
            head = found[parent] if parent is not None else None
            before = [*head.prompt_tokens, *head.completion.tokens] if head else []
            asked = [*before, *(1000 * (number + 1) + k for k in range(draw(st.integers(1, 3))))]
        said = [100 * (number + 1) + k for k in range(draw(st.integers(1, 3)))]
        made_now = made(number, asked, said, parent)
        choice = found[-1].choice + 1 if again else 0
        found.append(replace(made_now, completion_id=name, choice=choice))
    names = sorted({i.completion_id for i in found})
    by_id = st.dictionaries(st.sampled_from(names), st.floats(-2, 2, width=32), min_size=1)
    return found, draw(st.one_of(st.floats(-2, 2, width=32), by_id)), draw(st.floats(0, 1))


def oracle(interactions, value, discount):
    """The returns by recursion over children, as the docstring of `turn_returns` defines them."""
    below = {k: [c for c, i in enumerate(interactions) if i.parent == k]
             for k in range(len(interactions))}  # fmt: skip

    def height(k):
        return max((1 + height(c) for c in below[k]), default=0)

    def later(k):  # what the completions after k are worth to it
        own = {interactions[c].completion_id for c in below[k]}
        shared = sum(value.get(name, 0.0) for name in own)
        return discount * (shared + sum(later(c) for c in below[k]))

    if not isinstance(value, dict):
        return [discount ** height(k) * value for k in below]
    return [value.get(interactions[k].completion_id, 0.0) + later(k) for k in below]


@settings(deadline=None)
@given(runs(), st.sampled_from(trajectories.EXPORTS))
def test_every_trained_token_has_its_own_return_however_a_run_is_exported(run, export):
    interactions, value, discount = run
    returns = oracle(interactions, value, discount)
    options = {"turn_discount": discount, "export": export}
    found = trajectories.of_run(interactions, value, "0.0", **options)
    flat = packing.flatten([Group(0, tuple(found))])
    trained = flat.tokens["loss_mask"]
    tokens, owners = flat.tokens["tokens"][trained], flat.tokens["sequence_ids"][trained]
    got = list(zip(tokens.tolist(), flat.sequences["rewards"][owners].tolist(), strict=True))
    ends = [k for k in range(len(interactions)) if all(i.parent != k for i in interactions)]
    want = []
    if export == "concat":
        for end in ends:
            k = end
            while k is not None:
                want += [(t, returns[end]) for t in interactions[k].completion.tokens]
                k = interactions[k].parent
    else:
        want = [(t, returns[k]) for k, i in enumerate(interactions) for t in i.completion.tokens]
        assert len(set(tokens.tolist())) == len(tokens)  # each once
    assert [t for t, _ in sorted(got)] == [t for t, _ in sorted(want)]
    worth = [[r for _, r in sorted(pairs)] for pairs in (got, want)]
    np.testing.assert_allclose(*worth, rtol=1e-6, atol=1e-9)
    assert set(flat.sequences["run_ids"][: len(flat.owners)]) == {0}
    asked = sum(len(i.prompt_tokens) + len(i.completion.tokens) for i in interactions)
    assert flat.num_tokens <= asked
    for t in found:  # every row is a conversation as the model saw it
        steps = np.flatnonzero(np.diff(t.turn_ids)) + 1
        assert all(b - a == 1 for a, b in pairwise(sorted(set(t.turn_ids.tolist()))))
        assert not t.loss_mask[steps].any()  # a turn begins with what was asked


def test_a_prompt_that_goes_on_keeps_the_sampled_tokens():
    session = Sessions().open(Sampling(seed=0))
    # The model drew 1 and 0 where the tokenizer would have written 10.
    early = Interaction("c", 0, np.array([1, 2], np.int32), "<1><2>",
                        made(0, [], [1, 0]).completion, "<10>", "<10>")  # fmt: skip
    session.interactions.append(early)
    tokens, parent = session.prompt("<1><2><10><3>", encode)
    assert (tokens.tolist(), parent) == ([1, 2, 1, 0, 3], 0)
    session.interactions.append(made(1, [1, 2, 1, 0, 3], [4], parent=0))
    longest = session.interactions[1]
    tokens, parent = session.prompt(longest.full_text + "<6>", encode)
    assert (tokens.tolist(), parent) == ([1, 2, 1, 0, 3, 4, 6], 1)
    assert session.prompt("<1><2><99>", encode)[1] is None
    assert tokens.dtype == np.int32


def test_keys_are_unguessable_and_remembered_when_they_ended():
    sessions = Sessions()
    one, two = (sessions.open(Sampling(seed=0)) for _ in range(2))
    assert one.key != two.key
    assert len(one.key) > 30
    sessions.end(one)
    assert sessions.ended(one.key)
    assert not sessions.ended(two.key)
    assert sessions.find(one.key) is None
    assert sessions.find(two.key) is two
