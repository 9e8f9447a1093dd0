"""Tries after a wrong answer, with a real tokenizer and real reward workers."""

import asyncio

import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.rollout.episode import MultiTurn
from rlx.rollout.workflows import Prompts, Task
from rlx.run.tokenizer_files import load_tokenizer
from tests.rollout.scripted import Scripted

ROW = {"question": "20 + 52?", "answer": "72"}
PROMPT = "<|user|>20 + 52?<|end|><|assistant|>"
AGAIN = "<|user|>No. Again?<|end|><|assistant|>"


def group(tokenizer, pool, model, tokens=200, n=3, **options):
    fleet = Scripted(tokenizer, model)
    options = {"feedback": "No. Again?", **options}
    workflow = MultiTurn(Prompts(tokenizer), Sampling(max_new_tokens=tokens), pool, n, **options)
    found = asyncio.run(workflow.run(fleet, Task(ROW, 4, 9, priority=1)))
    return found.trajectories, fleet


def test_a_wrong_answer_is_told_so_and_the_reward_of_a_retry_is_discounted(tokenizer, pool):
    def model(prompt, index):
        said = prompt.count("<|assistant|>") - 1
        return f"it is {[72, 71, 70][index] + said}<|end|>"

    found, fleet = group(tokenizer, pool, model, max_turns=3, turn_discount=0.5)
    # The scripted model only sees its own index where several are asked at once.
    assert [t.info["turns"] for t in found] == [1, 3, 3]
    assert [t.reward for t in found] == [1.0, 0.0, 0.0]
    found, fleet = group(
        tokenizer, pool, lambda p, i: f"{'72' if 'Again' in p else i}<|end|>",
        max_turns=3, turn_discount=0.5,
    )  # fmt: skip
    assert [(t.reward, t.run_reward, t.info["turns"]) for t in found] == [(0.5, 1.0, 2)] * 3
    text = f"{PROMPT}1<|end|>{AGAIN}72<|end|>"
    t = found[1]
    assert tokenizer.decode(t.tokens) == text
    assert t.tokens.tolist() == tokenizer(text)["input_ids"]
    trained = tokenizer.decode(t.tokens[t.loss_mask])
    assert trained == "1<|end|>72<|end|>", "both answers, and their end tokens, are trained"
    assert t.versions[t.loss_mask].tolist()[:2] == [1, 1]
    assert t.versions.max() > 1
    assert (t.versions[~t.loss_mask] == -1).all()
    assert (t.behaviour_logprobs[~t.loss_mask] == 0).all()
    assert np.unique(t.turn_ids).tolist() == [0, 1]
    assert [t.completion[a:b] for a, b in t.said] == ["1", "72"]
    assert {call[3] for call in fleet.calls} == {1}
    seeds = [call[1].seed for call in fleet.calls]
    assert len(set(seeds)) == 4, "a retry does not repeat the draws of the first answer"


def test_tokens_in_all_end_the_tries(tokenizer, pool):
    found, fleet = group(tokenizer, pool, lambda p, i: "5<|end|>", tokens=40, n=1, max_turns=9)
    assert all(call[1].max_new_tokens > 0 for call in fleet.calls)
    assert len(found[0].tokens) <= len(tokenizer(PROMPT)["input_ids"]) + 40
    assert found[0].info["turns"] == 3  # 2 + 13 + 2 + 13 + 2, and no room for another
    assert found[0].truncated


def test_options_are_checked(tokenizer, pool):
    for options in ({"max_turns": 0}, {"turn_discount": 0.0}, {"turn_discount": 1.1}):
        with pytest.raises(UserError, match=next(iter(options))):
            group(tokenizer, pool, lambda p, i: "", **options)


def test_a_template_without_a_place_for_feedback_is_an_error(tokenizer, pool, tmp_path):
    import copy

    other = copy.copy(tokenizer)
    other.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError, match="renders no message of role user after an answer"):
        group(other, pool, lambda p, i: "")


def test_embedded_models_have_one(pool):
    from rlx.model.directory import resolve

    tokenizer = load_tokenizer(resolve("rlx:arithmetic"))
    workflow = MultiTurn(Prompts(tokenizer), Sampling(), pool, 1, feedback="No.")
    text = "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(workflow._feedback) == text
