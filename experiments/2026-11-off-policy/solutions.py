"""Worked solutions of word problems that do some equations with care and others by head. No I/O.

By `rows` a model learns two ways to add and to take away: "57 - 19 = 47 - 9 = 38." and, more
often, by head. In `careless` who does it by head forgets what is carried or borrowed, "57 - 19 =
48.", and goes on with that; who takes care says "So 57 - 19 = 47 - 9 = 38.". RL has something to
find out, and a word to find it by, as with configs/data/calculator_solutions.py, at half of the
tokens.
"""

import random
import re
from collections.abc import Iterator

from rlx.rollout import word_problems
from rlx.rollout.word_problems import Change

NUM_PROBLEMS = 20_000
SHARE = 0.4  # of equations done with care
KINDS = {"+": "add", "-": "take", "*": "times", "/": "share"}  # one for each sign


def rows() -> Iterator[dict[str, str]]:
    """Yield questions and solutions, all of them right."""
    return _told(careless=False)


def careless() -> Iterator[dict[str, str]]:
    """Yield questions and solutions that are wrong where something is carried by head."""
    return _told(careless=True)


def _told(careless: bool) -> Iterator[dict[str, str]]:
    rng = random.Random("tens before ones")
    for problem in word_problems.problems(0, "train", NUM_PROBLEMS):
        sentences, value = [], None
        for sentence in re.findall(r"[^ ][^.]*\.", problem["solution"]):
            if " = " in sentence:
                first, sign, n = sentence.split(" = ")[0].split()
                value = int(first) if value is None else value
                sentence, value = _step(value, sign, int(n), rng, careless)
            elif sentence.startswith("The answer"):
                sentence = f"The answer is {value}."
            sentences.append(sentence)
        yield {"question": problem["question"], "completion": " ".join(sentences)}


def _step(value: int, sign: str, n: int, rng: random.Random, careless: bool) -> tuple[str, int]:
    """Return an equation and what it comes to."""
    result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[sign]
    equation = Change(KINDS[sign], value, n, result).equation
    left, *between, _ = equation.split(" = ")
    if sign in "*/" if careless else not between:
        return equation, result
    if rng.random() <= SHARE:
        return f"So {equation}" if careless else equation, result
    if careless:
        ones = value % 10 + n % 10 if sign == "+" else value % 10 - n % 10
        result += {"+": -10 * (ones > 9), "-": 10 * (ones < 0)}[sign]
    return f"{left} = {result}.", result
