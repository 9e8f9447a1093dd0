"""Word problems of one and two steps, and solutions with a calculator. No I/O."""

from collections.abc import Iterable

from configs.data import calculator_solutions, word_problems

LEVELS = (1, 2)
NUM_PROBLEMS = 20_000


def questions(split: str) -> list[dict]:
    """Return the questions and answers of a split: `train`, or held out."""
    own = "train" if split == "train" else "held_out"
    rows = word_problems.problems(1, own, NUM_PROBLEMS if split == "train" else 1000)
    return [row for row in rows if row["level"] in LEVELS]


def solutions() -> Iterable[dict]:
    """Return every answer of every solution, with the conversation before it."""
    return calculator_solutions.rows(LEVELS)
