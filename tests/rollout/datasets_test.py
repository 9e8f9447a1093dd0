"""Groups made of rows: which tokens are trained on, in which order they come, what is refused."""

import asyncio
import itertools

import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet.client import NoFleet
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import buffer as buffers
from rlx.rollout.data import Cursor
from rlx.rollout.datasets import AnswerWorkflow, end_token
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits
from rlx.rollout.workflows import RLVR, Prompts, Task
from rlx.run import dataset_rows

ROW = {"question": "20 + 52?", "completion": "so 72", "good": "72", "bad": "I guess 70", "id": 9}


@pytest.fixture
def prompts(tokenizer):
    return Prompts(tokenizer, max_prompt_tokens=100)


@pytest.fixture
def end(tokenizer):
    return tokenizer.eos_token_id


def run(workflow, row=ROW):
    return asyncio.run(workflow.run(NoFleet(), Task(row, 5, 77)))


def assert_trained(trajectory, prompt, text, tokenizer):
    """Exactly the answer's tokens and its end token are trained on, and nobody sampled them."""
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    p, n = len(prompt), len(ids)
    assert trajectory.tokens.tolist() == prompt + ids
    assert trajectory.loss_mask.tolist() == [False] * p + [True] * n
    assert trajectory.versions.tolist() == [-1] * (p + n)
    assert trajectory.behaviour_logprobs.tolist() == [0.0] * (p + n)
    assert trajectory.tokens.dtype == trajectory.versions.dtype == np.int32
    assert (trajectory.stop_reason, trajectory.completion) == ("stop", text)


def test_a_demonstration_is_one_trajectory_and_its_answer_is_trained(prompts, tokenizer, end):
    workflow = AnswerWorkflow(prompts, None, ("completion",), end=end)
    group = run(workflow)
    (only,) = group.trajectories
    assert_trained(only, prompts.ids(ROW), "so 72", tokenizer)
    assert only.prompt == "<|user|>20 + 52?<|end|><|assistant|>"
    assert (group.group_id, group.row, group.oldest_version) == (5, ROW, -1)
    assert only.trajectory_id == "5.0"


def test_a_pair_is_the_chosen_and_then_the_rejected_answer(prompts, tokenizer, end):
    first, second = run(AnswerWorkflow(prompts, None, ("good", "bad"), end=end)).trajectories
    assert_trained(first, prompts.ids(ROW), "72", tokenizer)
    assert_trained(second, prompts.ids(ROW), "I guess 70", tokenizer)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert (first.trajectory_id, second.trajectory_id) == ("5.0", "5.1")


def test_an_empty_answer_teaches_to_end(prompts, end):
    workflow = AnswerWorkflow(prompts, None, ("completion",), end=end)
    (only,) = run(workflow, {**ROW, "completion": ""}).trajectories
    assert (only.num_trained, only.tokens[-1]) == (1, end)


def test_one_key_is_no_pair(prompts, end):
    with pytest.raises(UserError, match="both 'good'"):
        AnswerWorkflow(prompts, None, ("good", "good"), end=end)


def test_asked_for_completions_it_generates_as_rlvr_does(prompts, end, fake_fleet):
    pool = RewardPool("gsm8k", timeout=20.0)
    fleet, row = fake_fleet(turns=0), {**ROW, "answer": "72"}
    workflow = AnswerWorkflow(prompts, RLVR(prompts, Sampling(), pool, 4), ("completion",), end=end)
    greedy = Sampling(temperature=0.0)
    try:
        asking = workflow.run(fleet, Task(row, 0, 3, greedy, n=1, priority=1))
        group = asyncio.run(asking)
        assert len(group.trajectories) == 1
        assert fleet.calls == [(prompts.ids(row), Sampling(temperature=0.0, seed=3), 1, 1)]
        assert group.oldest_version == 0
        assert len(pool.drain_spans()) == 1
    finally:
        pool.close()


def fitting(rows, workflow, name="data.train", overlong="error"):
    return dataset_rows.fitting(rows, name, workflow.check, overlong)


def test_too_long_answers_name_the_row_and_both_numbers(prompts, end):
    rows = [ROW, {**ROW, "completion": "x" * 20, "bad": "y" * 30}]
    with pytest.raises(
        UserError, match=r"completion of row 2 of data.train has 21 tokens.*max_new_tokens is 20"
    ):
        fitting(rows, AnswerWorkflow(prompts, None, ("completion",), end=end, max_new_tokens=20))
    short = AnswerWorkflow(prompts, None, ("completion",), end=end, max_new_tokens=20)
    assert fitting(rows, short, overlong="skip") == [ROW]
    assert (
        fitting(rows, AnswerWorkflow(prompts, None, ("completion",), end=end, max_new_tokens=21))
        == rows
    )
    prompt = len(prompts.ids(ROW))
    both = 2 * prompt + 3 + 31
    pairs = AnswerWorkflow(prompts, None, ("good", "bad"), end=end, max_tokens=both - 1)
    with pytest.raises(UserError, match=rf"good and bad of row 2 of data.eval have {both} tokens"):
        fitting(rows, pairs, "data.eval")
    with pytest.raises(UserError, match=r"bad of group 5 has 31 tokens"):
        run(AnswerWorkflow(prompts, None, ("good", "bad"), end=end, max_new_tokens=30), rows[1])
    fitting(rows, AnswerWorkflow(prompts, None, ("good", "bad"), end=end, max_tokens=both))


def test_an_answer_ends_as_the_template_ends_it_if_engines_stop_there(tokenizer):
    end, user = tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    assert end_token(tokenizer, (7, end)) == end
    with pytest.raises(UserError, match=r"'<\|end\|>'.*correct generation_config.json"):
        end_token(tokenizer, (7,))
    template, eos = tokenizer.chat_template, tokenizer.eos_token
    try:
        tokenizer.chat_template = template.replace("<|end|>", "<|user|>")
        assert end_token(tokenizer, (end, user)) == user
        assert end_token(tokenizer, (end,)) == end, "the template's own would never stop an engine"
    finally:
        tokenizer.chat_template, tokenizer.eos_token = template, eos


def make_executor(workflow, rows, limits):
    executor = Executor(workflow, Cursor(rows, seed=1), limits, NoFleet())
    executor.start()
    return executor


@pytest.mark.parametrize("staleness", [0, 2])
def test_batches_are_the_rows_in_order_epoch_after_epoch_also_after_a_restart(
    prompts, end, staleness
):
    rows = [{"question": f"{i}?", "completion": str(i)} for i in range(6)]
    workflow, limits = (
        AnswerWorkflow(prompts, None, ("completion",), end=end),
        Limits(4, staleness, 64),
    )
    expected = [str(Cursor(rows, seed=1).row(i)["completion"]) for i in range(20)]
    executor, found = make_executor(workflow, rows, limits), []
    try:
        executor.set_version(0)
        for step in itertools.count(1):
            batch = executor.collect(timeout=10.0)
            found += [t.completion for g in batch for t in g.trajectories]
            assert [g.group_id for g in batch] == list(range(4 * step - 4, 4 * step))
            if step == 5:
                break
            if step == 2:  # what a checkpoint holds begins a new executor
                host, groups = executor.state(), buffers.groups(executor._buffer)
                executor.close()
                executor = make_executor(workflow, rows, limits)
                executor.restore(host, groups)
            executor.set_version(step)
        counters = executor.counters()
    finally:
        executor.close()
    assert found == expected
    assert counters["generated_tokens"] == counters["failed"] == counters["dropped"] == 0
