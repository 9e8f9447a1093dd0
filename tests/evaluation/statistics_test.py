"""pass@k, maj@k, intervals and the table's rows, against counting by hand and by brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.evaluation import statistics
from rlx.evaluation.sample_files import QuestionOptions


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    drawn = [i < right for i in range(n)]
    subsets = list(itertools.combinations(drawn, k))
    expected = sum(any(s) for s in subsets) / len(subsets)
    assert statistics.pass_at_k(n, right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_the_share_of_right_samples():
    assert statistics.pass_at_k(32, 8, 1) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="k ≤ n"):
        statistics.pass_at_k(4, 1, 5)


def test_the_commonest_answer_wins_and_a_tie_goes_to_the_first():
    answers = ["5", "7", "7", None, "7", "5", "5", "7"]
    right = [a == "7" for a in answers]
    assert statistics.maj_at_k(answers, right, 4) == 1.0  # 7, then a tie that 7 began
    assert statistics.maj_at_k(answers, [a == "5" for a in answers], 4) == 0.0
    assert statistics.maj_at_k(["5", "7", "7", "5"], [True, False, False, True], 4) == 1.0
    assert statistics.maj_at_k([None, None], [True, True], 2) == 0.0


def test_an_interval_covers_the_mean_and_shrinks_with_questions():
    draws = np.random.default_rng(0)
    few, many = (draws.binomial(1, 0.4, n).astype(float) for n in (20, 2000))
    for values in (few, many):
        low, high = statistics.interval(values)
        assert low <= values.mean() <= high
    assert np.diff(statistics.interval(many)) < 0.2 * np.diff(statistics.interval(few))
    assert statistics.interval([1.0]) is None
    # of a normal mean: ± 1.96 standard errors
    assert np.diff(statistics.interval(many)) == pytest.approx(
        2 * 1.96 * many.std() / np.sqrt(len(many)), rel=0.1
    )


def _coverage(n, values, chances, share=True):
    """How often the interval of n questions holds their mean: the multinomial, summed exactly."""
    mean, covered = float(np.dot(values, chances)), 0.0
    for cuts in itertools.combinations(range(n + len(values) - 1), len(values) - 1):
        ends = (-1, *cuts, n + len(values) - 1)
        counts = [after - before - 1 for before, after in itertools.pairwise(ends)]
        chance, left = 1.0, n
        for count, p in zip(counts, chances, strict=True):
            chance, left = chance * math.comb(left, count) * p**count, left - count
        if chance > 1e-9:
            low, high = statistics.interval(np.repeat(values, counts), share)
            covered += chance * (low - 1e-12 <= mean <= high + 1e-12)
    return covered


@pytest.mark.parametrize(
    ("n", "p", "least"),
    [(200, 0.99, 0.94), (20, 0.95, 0.92), (20, 0.99, 0.98), (10, 0.5, 0.94), (50, 0.02, 0.91)],
)
def test_an_interval_of_right_and_wrong_covers_what_it_says(n, p, least):
    """A percentile bootstrap covers 86.5 % in the first row and 63.9 % in the second."""
    assert _coverage(n, (0.0, 1.0), (1 - p, p)) >= least


@pytest.mark.parametrize(
    ("values", "chances"),
    [((0, 0.5, 1), (0.01, 0.04, 0.95)), ((0, 0.9, 1), (0.02, 0.1, 0.88)),
     ((0.5, 1), (0.05, 0.95)), ((0, 0.25, 1), (0.8, 0.15, 0.05)), ((0, 0.5, 1), (0.25, 0.5, 0.25))],
)  # fmt: skip
def test_an_interval_of_shares_of_samples_covers_what_it_says(values, chances):
    assert _coverage(20, values, chances) >= 0.92


def test_an_interval_of_differences_covers_what_it_says():
    assert _coverage(20, (-1, 0, 1), (0.2, 0.5, 0.3), share=False) >= 0.94
    # Where no question was lost, the differences look like shares.
    assert _coverage(20, (-1, 0, 1), (0.02, 0.96, 0.02), share=False) >= 0.94


def test_the_intervals_ends_are_wilsons():
    low, high = statistics.interval([1.0] * 20)
    assert (low, high) == (pytest.approx(0.8389, abs=1e-4), 1.0)
    low, high = statistics.interval([0.0] * 20)
    assert (low, high) == (0.0, pytest.approx(0.1611, abs=1e-4))
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263
    found = statistics.interval([1.0] * 81 + [0.0] * 182)
    assert found == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    for values in ([0.5] * 20, [0.9, *[1.0] * 19]):  # not a point, and inside [0, 1]
        low, high = statistics.interval(values)
        assert 0 <= low < np.mean(values) < high <= 1


def test_an_interval_of_lengths_is_students():
    low, high = statistics.interval([10.0, 12.0, 14.0, 16.0, 18.0], share=False)
    assert (low, high) == (pytest.approx(14 - 3.926, abs=0.1), pytest.approx(14 + 3.926, abs=0.1))


def test_a_row_has_the_tables_columns_in_their_order():
    for name in ("temperature", "top_p", "n_samples"):
        with pytest.raises(UserError, match=f"--{name}=-1 is not from (0|1e-06) to"):
            QuestionOptions(**{name: -1})
    with pytest.raises(UserError, match="--top_p=0 is not from 1e-06 to 1"):  # no server takes it
        QuestionOptions(top_p=0)
    with pytest.raises(UserError, match="--temperature=nan is not from 0 to 100"):
        QuestionOptions(temperature=float("nan"))
    names = QuestionOptions(pass_at=(8, 16), maj_at=(16,)).columns
    assert names == (
        "greedy_length", "sample_length", "greedy_acc", "sample_pass@1", "pass@8", "pass@16",
        "maj@16",
    )  # fmt: skip
    greedy = {"reward": 1.0, "tokens": 10, "answer": "3"}
    samples = [{"reward": float(i < 4), "tokens": i, "answer": str(i < 4)} for i in range(16)]
    found = statistics.per_question(greedy, samples, (8, 16), (16,))
    assert found["sample_pass@1"] == 0.25
    assert found["pass@16"] == 1.0
    assert found["maj@16"] == 0.0
    row = statistics.row("gsm8k", [found, {**found, "greedy_acc": 0.0}], names)
    assert (row["dataset"], row["num_questions"]) == ("gsm8k", 2)
    assert (row["greedy_acc"], row["sample_length"]) == (0.5, 7.5)
    assert set(row["intervals"]) == set(names)
    text = statistics.text_table([row], names)
    assert text.splitlines()[0].split() == ["dataset", "num_questions", *names]
    assert text.splitlines()[1].split()[:5] == ["gsm8k", "2", "10.0", "7.5", "0.500"]


def test_a_k_beyond_the_samples_is_explained():
    with pytest.raises(UserError, match=r"pass@16 needs 16 samples .* n_samples=8"):
        statistics.check_samples(8, (8, 16), ())


@pytest.mark.parametrize(
    ("completions", "vote"),
    [
        (
            (r"so \boxed{1/2}", r"it is $\boxed{\frac{1}{2}}$", "#### 0.5", "the answer is 0.50."),
            "1/2",
        ),
        ((r"\boxed{1,200}", "#### $1200", "The answer is 1200 apples."), "1200"),
        ((r"\boxed{50\%}", "#### 50%"), "50%"),
        ((r"\boxed{(1, 2]}", r"\boxed{\left(1,2\right]}"), "(1,2]"),
        ((r"\boxed{\text{Sunday}}",), "Sunday"),
        ((r"I think \boxed{12", ""), None),
    ],
)
def test_answers_that_say_the_same_vote_together(completions, vote):
    assert [statistics.ballot(completion) for completion in completions] == [vote] * len(
        completions
    )


def test_models_stand_beneath_one_another_by_data_set():
    rows = [
        {"model": model, "dataset": name, "num_questions": 2, "greedy_acc": 0.5}
        for model in ("a", "longer")
        for name in ("x", "y")
    ]
    lines = statistics.text_table(rows, ("greedy_acc",)).splitlines()
    found = [line.split()[:2] for line in lines]
    assert found == [["model", "dataset"], ["a", "x"], ["longer", "x"], ["a", "y"], ["longer", "y"]]
    assert statistics.text_table(rows[:2], ("greedy_acc",)).startswith("dataset  num_questions")
