"""RLVR with a real tokenizer and real reward workers; only the fleet is stood in for."""

import asyncio
import copy
from contextlib import nullcontext

import numpy as np
import pytest

from rlx.base import UserError, info_means
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rewards.reward_pool import RewardError
from rlx.rollout.workflows import RLVR, Overlong, Prompts, Task
from rlx.run import dataset_rows

ROW = {"question": "20 + 52?", "answer": "#### 72", "level": 1}


class Script:
    """A fleet that answers with given texts, all sampled by version 3."""

    def __init__(self, tokenizer, *texts, stop_reason="stop"):
        self.tokenizer, self.texts, self.stop_reason = tokenizer, texts, stop_reason
        self.asked = None

    async def generate(self, prompt_tokens, sampling, n, *, priority=0):
        self.asked = (list(prompt_tokens), sampling, n, priority)
        return [self.completion(text) for text in self.texts[:n]]

    def completion(self, text):
        ids = self.tokenizer(text)["input_ids"]
        return Completion(
            tokens=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), 3, np.int32),
            stop_reason=self.stop_reason,
        )


def run(workflow, fleet, row=ROW, **options):
    return asyncio.run(workflow.run(fleet, Task(row, 5, 77, **options)))


def test_prompt_is_the_rendered_template(tokenizer):
    assert Prompts(tokenizer).text(ROW) == "<|user|>20 + 52?<|end|><|assistant|>"
    system = Prompts(tokenizer, system_prompt="Be brief.")
    text = "<|system|>Be brief.<|end|><|user|>20 + 52?<|end|><|assistant|>"
    assert system.text(ROW) == text
    chat = Prompts(tokenizer, system_prompt="No.", question_key="messages")
    messages = [{"role": "user", "content": "20 + 52?"}]
    assert chat.text({"messages": messages}) == text.replace("Be brief.", "No.")
    messages = [{"role": "system", "content": "Be brief."}, *messages]
    assert chat.text({"messages": messages}) == text, "a system message of its own stays alone"
    ids = system.ids(ROW)
    assert tokenizer.decode(ids) == text
    assert len(ids) == 5 + len("Be brief.") + len("20 + 52?")


def test_group(tokenizer, pool):
    texts = ("so 72<|end|>", "so 71<|end|>", "\\boxed{72.00} €<|end|>")
    fleet = Script(tokenizer, *texts)
    workflow = RLVR(Prompts(tokenizer), Sampling(temperature=0.7, max_new_tokens=9), pool, 3)
    group = run(workflow, fleet)

    prompt = Prompts(tokenizer).ids(ROW)
    assert fleet.asked == (prompt, Sampling(temperature=0.7, max_new_tokens=9, seed=77), 3, 0)
    assert (group.group_id, group.row) == (5, ROW)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0]
    assert [t.info for t in group.trajectories] == [{"reward/gsm8k": r} for r in (1.0, 0.0, 1.0)]
    assert info_means(group.trajectories) == {"reward/gsm8k": pytest.approx(2 / 3)}
    assert [t.trajectory_id for t in group.trajectories] == ["5.0", "5.1", "5.2"]
    assert [t.completion for t in group.trajectories] == ["so 72", "so 71", "\\boxed{72.00} €"]
    for text, t in zip(texts, group.trajectories, strict=True):
        sampled = tokenizer(text)["input_ids"]
        p, n = len(prompt), len(sampled)
        assert t.tokens.tolist() == prompt + sampled
        assert t.loss_mask.tolist() == [False] * p + [True] * n
        assert t.versions.tolist() == [-1] * p + [3] * n
        assert t.behaviour_logprobs.tolist() == [0.0] * p + [-float(i + 1) for i in range(n)]
        dtypes = (t.tokens.dtype, t.loss_mask.dtype, t.behaviour_logprobs.dtype, t.versions.dtype)
        assert dtypes == (np.int32, np.bool_, np.float32, np.int32)
        assert t.prompt == Prompts(tokenizer).text(ROW)
        assert (t.stop_reason, t.truncated, t.num_trained) == ("stop", False, n)

    (span,) = pool.drain_spans()
    assert span.start_ns < span.end_ns
    assert pool.drain_spans() == []


def test_evaluation_overrides_sampling_number_and_priority(tokenizer, pool):
    fleet = Script(tokenizer, "72", "72", stop_reason="length")
    workflow = RLVR(Prompts(tokenizer), Sampling(), pool, 2)
    group = run(workflow, fleet, sampling=Sampling(temperature=0.0), n=1, priority=-1)
    assert fleet.asked[1:] == (Sampling(temperature=0.0, seed=77), 1, -1)
    assert len(group.trajectories) == 1
    assert group.trajectories[0].truncated


def test_an_empty_completion(tokenizer, pool):
    (found,) = run(
        RLVR(Prompts(tokenizer), Sampling(), pool, 1), Script(tokenizer, "")
    ).trajectories
    assert (found.num_trained, found.reward, found.oldest_version) == (0, 0.0, -1)


def test_a_reward_that_raises_names_the_row(tokenizer, pool):
    row = {"question": "20 + 52?", "level": 1}  # gsm8k needs an answer
    with pytest.raises(RewardError, match=r"(?s)'gsm8k' failed on completion 0.*20 \+ 52.*answer"):
        run(RLVR(Prompts(tokenizer), Sampling(), pool, 1), Script(tokenizer, "72"), row)


def fitting(rows, prompts, name="data.train", overlong="error"):
    return dataset_rows.fitting(rows, name, prompts.check, overlong)


def test_prompts_over_a_limit_name_the_row_and_both_numbers(tokenizer):
    rows = [ROW, {"question": "word " * 30, "answer": "1"}]
    limited = Prompts(tokenizer, max_prompt_tokens=100)
    with pytest.raises(
        UserError,
        match=r"prompt of row 2 of data.train has 153 tokens, data.max_prompt_tokens is 100",
    ):
        fitting(rows, limited)
    assert fitting(rows, limited, overlong="skip") == [ROW]
    with pytest.raises(
        UserError, match=r"overlong=skip leaves no row of data.train: the prompt of"
    ):
        fitting(rows[1:], limited, overlong="skip")
    assert fitting([], limited, overlong="skip") == []
    with pytest.raises(UserError, match=r"prompt of group 5 has 153 tokens"):
        run(RLVR(limited, Sampling(), None, 1), Script(tokenizer, "72"), rows[1])
    context = Prompts(tokenizer, max_prompt_tokens=1000, max_model_len=153)
    with pytest.raises(UserError, match=r"row 2 of data.eval has 153 tokens, the model's context"):
        fitting(rows, context, "data.eval")
    fitting(rows, Prompts(tokenizer, max_prompt_tokens=153, max_model_len=154))


def test_multi_byte_text_is_not_mistaken_for_short(tokenizer):
    """A character may be four tokens of a byte-level tokenizer."""
    limited = Prompts(tokenizer, max_prompt_tokens=70)
    with pytest.raises(UserError, match="has 83 tokens"):
        fitting([{"question": "\U0001d7db" * 20, "answer": "1"}], limited)


@pytest.mark.parametrize("limit", [20, 40])
def test_a_row_is_refused_by_its_tokens_also_where_it_holds_the_template_s_marks(tokenizer, limit):
    prompts, found = Prompts(tokenizer, max_prompt_tokens=limit), set()
    for marks in (0, 1, 9):
        for size in range(limit + 2):
            row = {"question": "7" * size + "<|end|>" * marks, "answer": "1"}
            count = len(Prompts(tokenizer).ids(row))
            found.add(count > limit)
            with pytest.raises(Overlong) if count > limit else nullcontext():
                prompts.check(row, "row 3")
    assert found == {True, False}


def test_messages_that_the_template_refuses_name_the_row(tokenizer):
    strict = copy.copy(tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"fails on row 1 of data.train .*roles must alternate"):
        fitting([ROW], Prompts(strict), overlong="skip")
