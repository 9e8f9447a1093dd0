"""Interactions and rewards become trajectories; sessions reuse tokens."""

import numpy as np
import pytest

from rlx.agents import trajectories
from rlx.agents.sessions import Interaction, Sessions
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion


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


def encode(written):
    return [int(part) for part in written.strip("<>").split("><") if part]


TALK = (  # two turns of one conversation, and one aside
    made(0, [1, 2], [10, 11], version=3),
    made(1, [5], [50]),
    made(2, [1, 2, 10, 11, 3, 4], [12], parent=0, stop="length", version=4),
)


def test_a_conversation_is_one_sequence_with_its_observations_masked():
    talk, aside = trajectories.of_run(TALK, 0.5, "7.1", agent="A")
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
    assert [t.trajectory_id for t in (talk, aside)] == ["7.1.0", "7.1.1"]
    (only,) = trajectories.of_run(TALK[:1], 1, "7.1")
    assert only.trajectory_id == "7.1"


def test_the_turns_of_a_trajectory_are_found_again():
    talk, _ = trajectories.of_run(TALK, 0.5, "7.1")
    assert trajectories.turns(talk) == [([1, 2], [10, 11]), ([3, 4], [12])]


def test_rewards_by_completion_land_on_their_own_tokens():
    value = {"c2": 1.0, "c0": 0.5}
    first, second, aside = trajectories.of_run(TALK, value, "7.1", turn_discount=0.5)
    assert [t.tokens.tolist() for t in (first, second, aside)] == [
        [1, 2, 10, 11], [1, 2, 10, 11, 3, 4, 12], [5, 50],
    ]  # fmt: skip
    assert second.loss_mask.tolist() == [False] * 6 + [True]
    assert [t.reward for t in (first, second, aside)] == [0.5 + 0.5 * 1.0, 1.0, 0.0]
    assert set(second.turn_ids.tolist()) == {1}
    assert trajectories.outcome(TALK, value) == 1.0
    assert trajectories.outcome(TALK, {"c0": 0.5}) == 0.5
    assert first.info["run_reward"] == 1.0


def test_a_number_can_be_shared_out_by_completion_too():
    found = trajectories.of_run(TALK, 1, "7.1", turn_discount=0.9, individual=True)
    assert [t.reward for t in found] == pytest.approx([0.9, 1.0, 1.0])


def test_two_that_go_on_from_one_place_share_nothing_trained():
    fork = made(3, [1, 2, 10, 11, 9], [13], parent=0)
    found = trajectories.of_run([*TALK, fork], 1.0, "0.0")
    assert sum(t.num_trained for t in found) == 2 + 1 + 1 + 1
    assert found[2].tokens.tolist() == [1, 2, 10, 11, 9, 13]
    assert found[2].loss_mask.sum() == 1


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
    tokens, parent = session.prompt(longest.whole + "<6>", encode)
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
