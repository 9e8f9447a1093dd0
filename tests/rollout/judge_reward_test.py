"""Trajectories with a judge: its question, the answer, and the reward with its score."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.agents.online_workflow import OnlineWorkflow
from rlx.environments.openenv_tasks import OpenEnvAgent
from rlx.environments.textarena_tasks import TextArenaAgent
from rlx.rollout.teacher_scores import JudgeRewarded
from rlx.rollout.workflows import Task


class Judge:
    """A judge that gives 0.5, and notes what it was asked."""

    def __init__(self):
        self.asked, self.closed = [], False

    async def grade(self, question, answer, reference):
        self.asked.append((question, answer, reference))
        return {"reward/judge": 0.5, "judge/tokens": 9.0}

    async def aclose(self):
        self.closed = True


def test_the_weighted_score_is_added_to_every_reward(fake_workflow, fake_fleet):
    judge = Judge()
    workflow = JudgeRewarded(fake_workflow(n=2), judge, -2.0)
    row = {"question": "2 + 2?", "answer": 4}
    found = asyncio.run(workflow.run(fake_fleet(), Task(row, 4, 7)))
    alone = asyncio.run(fake_workflow(n=2).run(fake_fleet(), Task(row, 4, 7)))
    for graded, was in zip(found.trajectories, alone.trajectories, strict=True):
        assert graded.reward == pytest.approx(was.reward - 1.0)
        assert graded.info["reward/judge"] == 0.5
        assert graded.info["judge/tokens"] == 9
    assert judge.asked == [("2 + 2?", t.completion, "4") for t in alone.trajectories]
    asyncio.run(workflow.aclose())
    assert judge.closed


def test_one_answer_without_a_score_ends_the_requests_for_the_others(fake_workflow, fake_fleet):
    class Failing(Judge):
        async def grade(self, question, answer, reference):
            await super().grade(question, answer, reference)
            try:
                if len(self.asked) > 1:
                    raise LookupError("no verdict")
                await asyncio.sleep(60)
            finally:
                ended.append(answer)

    async def run():
        workflow = JudgeRewarded(fake_workflow(n=2), Failing(), 1.0)
        with pytest.raises(LookupError, match="no verdict"):
            await workflow.run(fake_fleet(), Task({"question": "2 + 2?"}, 4, 7))
        return len(ended)

    ended = []
    assert asyncio.run(run()) == 2  # else a failed attempt asks on, and its retry too


def test_a_row_whose_answer_is_null_has_no_reference(fake_workflow, fake_fleet):
    judge = Judge()
    for row in ({"question": "2 + 2?", "answer": None}, {"question": "2 - 2?", "answer": 0}):
        workflow = JudgeRewarded(fake_workflow(n=1), judge, 1.0)
        asyncio.run(workflow.run(fake_fleet(), Task(row, 4, 7)))
    assert [reference for _, _, reference in judge.asked] == ["", "0"]


@pytest.mark.parametrize(
    "agent", [OnlineWorkflow.name, OpenEnvAgent.__name__, TextArenaAgent.__name__]
)
def test_where_a_row_is_a_stand_in_the_prompt_is_the_question(agent, fake_workflow, fake_fleet):
    class Sessions:
        """A session of an application, and a held-out question, of the run's one row."""

        async def run(self, fleet, task):
            group = await fake_workflow(n=2).run(fleet, task)
            asked, held_out = group.trajectories
            asked = dataclasses.replace(asked, agent=agent, prompt="Who are you?")
            return dataclasses.replace(group, trajectories=(asked, held_out))

    judge, row = Judge(), {"question": "What is 12 + 30?"}
    asyncio.run(JudgeRewarded(Sessions(), judge, 1.0).run(fake_fleet(), Task(row, 4, 7)))
    assert [question for question, _, _ in judge.asked] == ["Who are you?", "What is 12 + 30?"]


def test_messages_are_asked_as_text_and_turns_share_the_score(fake_workflow, fake_fleet):
    class Turns:
        async def run(self, fleet, task):
            asked = dataclasses.replace(task, row={"question": "hello"})
            group = await fake_workflow(n=1).run(fleet, asked)
            (only,) = group.trajectories
            turns = np.arange(len(only.tokens)) // 2
            rewards = tuple(range(turns[-1] + 1))
            only = dataclasses.replace(only, turn_ids=turns, turn_rewards=rewards)
            return dataclasses.replace(group, row=task.row, trajectories=(only,))

    judge = Judge()
    row = {"question": [{"role": "user", "content": "hello"}]}
    group = asyncio.run(JudgeRewarded(Turns(), judge, 2.0).run(fake_fleet(), Task(row, 4, 7)))
    assert group.trajectories[0].turn_rewards[:2] == (1.0, 2.0)
    assert judge.asked[0][0] == "user: hello"
    assert judge.asked[0][2] == ""
