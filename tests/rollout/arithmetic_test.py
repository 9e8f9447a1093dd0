"""The problem generator: splits, seeds, ranges, tail, and the demonstrations' source."""

import re
import statistics
import string

import pytest

from rlx.base import UserError
from rlx.rewards import rewards
from rlx.rollout import arithmetic


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return arithmetic.problems(seed=0, split="train", n=3000)


def test_answers_are_right(rows):
    for row in rows:
        expression = row["question"].removesuffix("=?")
        assert re.fullmatch(r"\d+([a-z][+-]\d+)+", expression)
        letters = re.sub("[^a-z]", "", expression)
        assert letters == string.ascii_lowercase[: len(letters)]
        assert row["answer"] == str(eval(re.sub("[a-z]", "", expression)))


def test_every_value_stays_within_two_digits(rows):
    for row in rows:
        chain = arithmetic.steps(row["question"])
        assert arithmetic.MIN_OPERANDS <= len(chain) + 1 <= arithmetic.MAX_OPERANDS
        for step in chain:
            assert 0 <= step.value <= arithmetic.LARGEST_VALUE
            assert 0 <= step.result <= arithmetic.LARGEST_VALUE
            assert 1 <= step.operand <= arithmetic.LARGEST_OPERAND


def test_a_seed_gives_the_same_stream_and_a_longer_list_extends_it():
    short = arithmetic.problems(seed=3, split="train", n=20)
    assert short == arithmetic.problems(seed=3, split="train", n=50)[:20]
    assert short != arithmetic.problems(seed=4, split="train", n=20)
    assert arithmetic.problems(seed=3, split="train", n=0) == []


def test_no_problem_repeats_within_a_stream(rows):
    assert len({row["question"] for row in rows}) == len(rows)


def test_train_and_held_out_are_disjoint_whatever_the_seeds():
    # The shortest problems collide most easily, and 5,000 draws of one stream repeat hundreds of
    # another's: without the split by hash this finds common problems.
    train = {r["question"] for seed in range(3) for r in arithmetic.problems(seed, "train", 5000)}
    for seed in range(3):
        for row in arithmetic.problems(seed, "held_out", 500):
            assert row["question"] not in train
            assert arithmetic.split_of(row["question"]) == "held_out"


def test_careful_solutions_are_long_and_heavy_tailed(rows):
    lengths = sorted(len(arithmetic.careful_solution(row["question"])) for row in rows)
    assert lengths[0] >= 16
    assert 95 <= lengths[-1] <= 127
    assert lengths[int(0.95 * len(lengths))] > 2 * statistics.median(lengths)


def test_careful_solution_writes_every_step_then_the_boxed_answer():
    question = "47a+38b-6=?"
    assert arithmetic.careful_solution(question) == ":47\na+38:85\nb-6:79\n\\boxed{79}"
    assert arithmetic.steps(question) == [("a", 47, "+", 38, 85), ("b", 85, "-", 6, 79)]


def test_unknown_split_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'held_out'"):
        next(arithmetic.stream(0, "heldout"))


def test_a_wrong_solution_is_plausible_wrong_and_always_the_same():
    given_up = 0
    for row in arithmetic.problems(3, "train", 400):
        question = row["question"]
        wrong, careful = arithmetic.wrong_solution(question), arithmetic.careful_solution(question)
        assert wrong == arithmetic.wrong_solution(question)
        assert rewards.arithmetic("", wrong, [], [], answer=row["answer"]) == 0.0
        lines, right = wrong.split("\n"), careful.split("\n")
        assert lines[0] == right[0]
        if "~" in lines[-1]:
            given_up += 1
            at = len(lines) - 1
            assert lines[:at] == right[:at], "careful until it gives up"
            assert lines[at].split("~")[0] == right[at].split(":")[0]
        else:
            found = [int(line.split(":")[1]) for line in lines[:-1]]
            true = [int(line.split(":")[1]) for line in right[:-1]]
            errors = [a - b for a, b in zip(found, true, strict=True)]
            assert errors == sorted(errors, key=bool), "one mistake, carried through"
            assert len(set(errors) - {0}) == 1
            assert all(0 <= value <= arithmetic.LARGEST_VALUE for value in found)
            assert lines[-1] == f"\\boxed{{{found[-1]}}}"
    assert 150 < given_up < 250
