"""Which sequence a reward model values, and what becomes of the value."""

import asyncio
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.rollout.datasets import AnswerWorkflow
from rlx.rollout.teacher_scores import ModelRewarded
from rlx.rollout.workflows import Prompts, Task

ROW = {"question": "2 + 2?"}


class Values:
    """A reward model's fleet: the value after a token is the token / 10."""

    def __init__(self, error=None, scale=0.1):
        self.asked, self.error, self.scale = [], error, scale

    async def score(self, tokens, first, *, temperature=1.0, values=False):
        self.asked.append((tokens.tolist(), first, values))
        if self.error:
            raise self.error
        return tokens * np.float32(self.scale)


def run(workflow, fleet, **options):
    return asyncio.run(workflow.run(fleet, Task(ROW, 4, 7, **options)))


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.0)])
def test_the_weighted_value_of_the_last_token_is_added_in_evaluations_too(
    fake_workflow, fake_fleet, sampling
):
    judge = Values()
    rewarded = run(ModelRewarded(fake_workflow(n=3), judge, -2.0), fake_fleet(), sampling=sampling)
    alone = run(fake_workflow(n=3), fake_fleet(), sampling=sampling)
    for found, was in zip(rewarded.trajectories, alone.trajectories, strict=True):
        value = 0.1 * float(was.tokens[-1])
        assert found.info["reward/model"] == pytest.approx(value)
        assert found.reward == pytest.approx(was.reward - 2.0 * value)
        assert found.tokens is not None
    assert judge.asked == [(t.tokens.tolist(), len(t.tokens) - 1, True) for t in alone.trajectories]


def test_the_answers_that_rows_give_are_trained_on_and_not_valued(
    fake_workflow, fake_fleet, tokenizer
):
    pairs = AnswerWorkflow(Prompts(tokenizer), fake_workflow(), ("chosen", "rejected"), end=9)
    row, judge = {**ROW, "chosen": "so 4", "rejected": "so 5"}, Values()
    group = asyncio.run(ModelRewarded(pairs, judge, 1.0).run(fake_fleet(), Task(row, 4, 7)))
    assert [t.reward for t in group.trajectories] == [1.0, 0.0]
    assert not judge.asked


class Turns(NamedTuple):
    """A workflow whose one turn has a return of its own."""

    fake: Any

    async def run(self, fleet, task):
        group = await self.fake.run(fleet, task)
        own = [
            dataclasses.replace(t, turn_rewards=(0.5,), info={"run_reward": 0.25})
            for t in group.trajectories
        ]
        return dataclasses.replace(group, trajectories=tuple(own))


def test_the_value_counts_for_each_turn_that_has_a_return_of_its_own(fake_workflow, fake_fleet):
    group = run(ModelRewarded(Turns(fake_workflow(n=1)), Values(), 2.0), fake_fleet())
    (found,) = group.trajectories
    added = 2.0 * found.info["reward/model"]
    assert added != 0
    assert found.turn_rewards == pytest.approx((0.5 + added,))
    assert found.run_reward == pytest.approx(0.25 + added)


class Texts:
    """A workflow whose completions are texts of their own, the second one cut off."""

    def __init__(self, fake):
        self.fake = fake

    async def run(self, fleet, task):
        group = await self.fake.run(fleet, task)
        one, two = (
            dataclasses.replace(t, completion="so 4", stop_reason=reason)
            for t, reason in zip(group.trajectories, ("stop", "length"), strict=True)
        )
        return dataclasses.replace(group, trajectories=(one, two))


def test_another_tokenizer_reads_prompt_and_completion_as_texts(
    fake_workflow, fake_fleet, tokenizer
):
    judge, prompts = Values(), Prompts(tokenizer)
    run(ModelRewarded(Texts(fake_workflow(n=2)), judge, 1.0, prompts, end=9), fake_fleet())
    text = [*prompts.ids(ROW), *tokenizer("so 4")["input_ids"]]
    assert [tokens for tokens, *_ in judge.asked] == [[*text, 9], text]


def test_another_template_renders_prompt_and_completion_whole(
    fake_workflow, fake_fleet, tokenizer, monkeypatch
):
    template = tokenizer.chat_template.replace("{{ m.content }}", "{{ m.content | trim }}{{ '!' }}")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    judge, prompts = Values(), Prompts(tokenizer)
    run(ModelRewarded(Texts(fake_workflow(n=2)), judge, 1.0, prompts, end=256), fake_fleet())
    whole = tokenizer("<|user|>2 + 2?!<|end|><|assistant|>so 4!<|end|>")["input_ids"]
    assert [tokens for tokens, *_ in judge.asked] == [whole, whole[:-1]]


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Values(ValueError("too long")), "the reward model refuses trajectory 4.0: too lon"),
        (Values(UserError("no server")), "the reward model: no server"),
        (Values(scale=np.nan), "the reward model gives trajectory 4.0 scores that are not finite"),
    ],
)
def test_a_reward_model_that_fails_is_named(fake_workflow, fake_fleet, judge, message):
    with pytest.raises(UserError, match=message):
        run(ModelRewarded(fake_workflow(n=1), judge, 1.0), fake_fleet())


@pytest.mark.parametrize("name", ["online", "TextArenaAgent (textarena_tasks.py, line 36)"])
def test_a_model_with_prompts_of_its_own_cannot_read_rows_without_questions(name, tokenizer):
    class Online:
        async def run(self, fleet, task):
            raise NotImplementedError

    workflow = Online()
    workflow.name = name
    assert ModelRewarded(workflow, None, 1.0).name == name
    with pytest.raises(UserError, match=r"another tokenizer.* hold no question"):
        ModelRewarded(workflow, None, 1.0, Prompts(tokenizer))
