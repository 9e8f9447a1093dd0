r"""Reward functions: their signature, GSM8K's own answers, and texts that must not break them."""

import json
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.rewards import rewards
from rlx.rewards.reward_pool import RewardCall, RewardPool

GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"


def gsm8k(completion, answer):
    return rewards.gsm8k("", completion, [], [], answer=answer, question="q")


def math(completion, answer):
    return rewards.math("", completion, [], [], answer=answer, question="q")


def arithmetic(completion, answer):
    return rewards.arithmetic("", completion, [], [], answer=answer, question="q")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so #### 72", "16 - 3 = 13\n#### 72", 1.0),
        (r"so \boxed{72.00}", "#### 72", 1.0),
        ("so 72 dollars.", 72, 1.0),
        ("so 1,080", "#### 1080", 1.0),
        ("so $0.75", r"\frac{3}{4}", 1.0),
        ("so 0.3", 0.3, 1.0),
        ("so 0.8", 0.1 + 0.7, 1.0),
        ("so 0.79", 0.1 + 0.7, 0.0),
        ("so 0.3", "0.30000001192092896", 1.0),
        ("so -72", "#### 72", 0.0),
        ("so 72.01", "#### 72", 0.0),
        ("no idea", "#### 72", 0.0),
        ("", "#### 72", 0.0),
        ("no number", "no number either", 0.0),
    ],
)
def test_gsm8k(completion, answer, reward):
    assert gsm8k(completion, answer) == reward


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository")
@pytest.mark.parametrize(("split", "count"), [("test", 1319), ("train", 7473)])
def test_every_answer_of_gsm8k_reads_as_itself_and_in_other_dress(split, count):
    text = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.rstrip("\n").split("\n")]
    assert len(rows) == count
    rewards.check_rows("gsm8k", rows)
    for row in rows[::4]:
        solution, _, number = row["answer"].rpartition("#### ")
        plain = number.replace(",", "")
        assert gsm8k(row["answer"], row["answer"]) == 1.0
        for text in (f"{solution}\nThe answer is {number}.", rf"\boxed{{{plain}}}", f"{plain}.00"):
            assert gsm8k(text, row["answer"]) == 1.0, (text, number)
        assert gsm8k(f"#### {int(plain) + 1}", row["answer"]) == 0.0


def _rows(split):
    text = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["answer"] for line in text.rstrip("\n").split("\n")]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository")
@pytest.mark.parametrize(
    "style", ["#### {}", "A: {}", "A: ${}", r"\boxed{{{}}}", "The answer is {}.", "It is {} pens."]
)
def test_sums_of_money_before_an_answer_do_not_hide_it(style):
    """`he pays $3*5=$<<3*5=15>>15` holds two signs of currency and no formula."""
    for row in _rows("test"):
        solution, _, number = row.rpartition("\n#### ")
        right, wrong = (f"{solution}\n{style.format(n)}" for n in (number, f"{number}1"))
        assert (math(right, number), math(wrong, number)) == (1.0, 0.0), right


@settings(max_examples=200, deadline=None)
@given(st.text(), st.one_of(st.text(), st.integers(), st.floats(), st.none()))
def test_gsm8k_takes_any_text(completion, answer):
    assert gsm8k(completion, answer) in (0.0, 1.0)


def test_math_works_outside_the_main_thread_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(math(r"\boxed{7}", "7")))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"47+38=85, \boxed{85}", "85", 1.0),
        (r"\boxed{085}", "85", 1.0),
        (r"\boxed{-5}", -5, 1.0),
        (r"\boxed{85.0}", "85", 1.0),
        (r"\boxed{\frac{170}{2}}", "85", 1.0),
        (r"\boxed{40+45}", "85", 1.0),
        (r"\boxed{84}", "85", 0.0),
        (r"\boxed{}", "85", 0.0),
        (r"\boxed{--85}", "-85", 0.0),
        ("85", "85", 0.0),  # the box is asked for
        (r"\boxed{85", "85", 0.0),
    ],
)
def test_arithmetic(completion, answer, reward):
    assert arithmetic(completion, answer) == reward


@settings(max_examples=40, deadline=None)
@given(st.integers(-999, 999), st.integers(-999, 999))
def test_arithmetic_short_cut_agrees_with_math_verify(got, wanted):
    assert arithmetic(rf"\boxed{{{got}}}", str(wanted)) == math(rf"\boxed{{{got}}}", str(wanted))


# The end of the processor time may come where Python drops it, a callback of the garbage collector;
# it comes again 0.05 s later, perhaps while a hook still formats the first one.
@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="\\boxed{}frac12^_$x+-/ #", max_size=30))
def test_math_and_arithmetic_take_any_text(text):
    with mock.patch.object(sys, "unraisablehook"):
        assert math(text, "85") in (0.0, 1.0)
        assert arithmetic(text, "85") in (0.0, 1.0)


def test_resolve():
    assert rewards.resolve("gsm8k") is rewards.gsm8k
    assert rewards.resolve("rlx.rewards.rewards:math") is rewards.math


def test_terms_are_pairs_of_a_name_and_a_weight_and_without_any_there_is_one():
    assert rewards.weights_of("gsm8k", ()) == {"gsm8k": 1.0}
    given = (("gsm8k", 1), ["mine.py:brevity", -0.1], ("a.b:c", 0.0))
    weights = rewards.weights_of("math", given)
    assert weights == {"gsm8k": 1.0, "mine.py:brevity": -0.1, "a.b:c": 0.0}
    assert list(weights) == ["gsm8k", "mine.py:brevity", "a.b:c"]


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            ("gsm8k", 1.0),
            r"reward.terms has 'gsm8k', wanted a name and a finite weight; write \(\(",
        ),
        ((("gsm8k",),), r"has \('gsm8k',\), wanted"),
        ((("gsm8k", "1"),), r"has \('gsm8k', '1'\), wanted"),
        ((("gsm8k", float("nan")),), r"has \('gsm8k', nan\), wanted"),
        ((("gsm8k", float("inf")),), r"has \('gsm8k', inf\), wanted"),
        ((("a.py:f", 1.0), ("b.py:f", 1.0)), "has 'f' twice, and each is logged by its name"),
    ],
)
def test_terms_that_cannot_be_added_are_refused(terms, message):
    with pytest.raises(UserError, match=message):
        rewards.weights_of("gsm8k", terms)


def test_a_reward_in_a_file_is_found_here_and_by_the_workers(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def score(prompt, completion, prompt_ids, completion_ids, **row):\n"
        "    return len(completion) / 10\n"
    )
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    assert rewards.resolve("../mine.py:score")("", "four", [], []) == 0.4
    pool = RewardPool("../mine.py:score")
    try:
        graded = pool.compute([RewardCall("", "four", [], [], {})])
    finally:
        pool.close()
    assert (graded.rewards, graded.infos) == ([0.4], [{"reward/score": 0.4}])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/mine.py:score", "there is no file nowhere/mine.py"),
        ("configs/gsm8k.py:score", "has no 'score'; it has get_config"),
        ("gsm8", "did you mean 'gsm8k'"),
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("json:no_function", "json has no 'no_function'"),
    ],
)
def test_resolve_names_what_is_wrong(name, message):
    with pytest.raises(UserError, match=message):
        rewards.resolve(name)


def test_answers_that_can_never_be_matched_are_found_before_the_run():
    rewards.check_rows("math", [{"answer": "x"}])
    with pytest.raises(UserError, match="row 2: the answer 'unknown' holds no number"):
        rewards.check_rows("gsm8k_unfinished", [{"answer": "#### 1"}, {"answer": "unknown"}])


def test_a_reward_s_parameters_are_the_columns_that_rows_need(tmp_path):
    assert {name: rewards.columns(name) for name in rewards.REWARDS} == {
        "gsm8k": ["answer"], "math": [], "arithmetic": ["answer"], "code": ["answer"],
        "gsm8k_unfinished": ["answer"], "math_unfinished": [],
        "reasoning_gym": ["question", "task"], "exact": ["answer"],
    }  # fmt: skip
    file = tmp_path / "mine.py"
    file.write_text("def score(p, c, pi, ci, level, *, answer='', steps, **row):\n    return 1.0\n")
    assert rewards.columns(f"{file}:score") == ["level", "steps"]
    file = tmp_path / "group.py"
    file.write_text("def score(completions, answer, *, prompts, level=1, **row):\n    return []\n")
    assert rewards.columns(f"{file}:score") == ["answer"]
