r"""Make the problems of the embedded task: seeded chains of additions and subtractions. No I/O.

A problem is `47a+38b-6=?`: each term except the first has a letter. A careful solution has the
running value after each term on a line: `:47`, `a+38:85`, `b-6:79`, `\boxed{79}`. Values have at
most two digits. The number of operands is heavy-tailed, so a few solutions are much longer.

A hash of its text assigns a problem to training or to the held-out set, whatever the seed. The
recipe of the packaged model (`experiments/2026-11-arithmetic`) learns from training problems only.
"""

import hashlib
import itertools
import random
import re
import string
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlx.base import unknown

SPLITS = ("train", "held_out")
MIN_OPERANDS, MAX_OPERANDS = 3, 14
LARGEST_VALUE = 99  # intermediate values lie between 0 and this
LARGEST_OPERAND = 49  # except for the first
_HELD_OUT_SHARE = 10  # 1 problem in 10
_TAIL = 1.5  # P(k operands) ∝ k^−1.5
_ERRORS = (-20, -10, -2, -1, 1, 2, 10, 20)  # of a wrong step: a digit or the carry is wrong
_GUESS_NOISE = 20  # a wrong guess is a multiple of ten at most this far from the answer


def problems(seed: int, split: str, n: int) -> list[dict[str, str]]:
    """Return the first `n` rows of `stream`: `{"question": "47a+38b-6=?", "answer": "79"}`."""
    return list(itertools.islice(stream(seed, split), n))


def stream(seed: int, split: str) -> Iterator[dict[str, str]]:
    """Yield distinct problems without end; UserError if `split` is not train or held_out."""
    return distinct("arithmetic", seed, split, lambda rng, _: _draw(rng, split))


def distinct(
    name: str, seed: int, split: str, draw: Callable[[random.Random, int], dict[str, Any] | None]
) -> Iterator[dict[str, Any]]:
    """Yield rows of `draw` with distinct questions without end; UserError for a wrong split."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    rng, seen = random.Random(f"{name} {seed} {split}"), set[str]()
    while True:
        row = draw(rng, len(seen))  # None if a row belongs to another split
        if row and row["question"] not in seen:
            seen.add(row["question"])
            yield row


def split_of(question: str, held_out_share: int = _HELD_OUT_SHARE) -> str:
    """Return the split of a problem, which depends only on its text."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "big") % held_out_share else "held_out"


class Step(NamedTuple):
    """One operation, marked by `letter` in the problem: `value operator operand` is `result`."""

    letter: str
    value: int
    operator: str
    operand: int
    result: int

    @property
    def term(self) -> str:
        """Return the step as the problem writes it: `a+38`."""
        return f"{self.letter}{self.operator}{self.operand}"


def steps(question: str) -> list[Step]:
    """Return the chain from left to right; the last step's result is the answer."""
    value, chain = first_value(question), []
    for letter, operator, operand in re.findall(r"([a-z])([+-])(\d+)", question):
        result = value + int(operator + operand)
        chain.append(Step(letter, value, operator, int(operand), result))
        value = result
    return chain


def first_value(question: str) -> int:
    return int(re.split(r"\D", question, maxsplit=1)[0])


def careful_solution(question: str) -> str:
    r"""Return the value after each term, then the boxed answer: `:47\na+38:85\n\boxed{85}`."""
    return _solution(question, [step.result for step in steps(question)])


def wrong_solution(question: str) -> str:
    """Return a plausible solution with a wrong boxed answer; always the same for a question."""
    rng, chain = random.Random(f"wrong {question}"), steps(question)
    if rng.random() < 0.5 and (mistake := _mistake(chain, rng)):  # `a+38:75`, then goes on
        at, error = mistake
        return _solution(question, [s.result + error * (i >= at) for i, s in enumerate(chain)])
    at = rng.randrange(len(chain))  # guess here, as the packaged model does: `a+38~\boxed{60}`
    lines = [f":{first_value(question)}", *(f"{s.term}:{s.result}" for s in chain[:at])]
    guesses = [g for g in range(0, 100, 10) if 0 < abs(g - chain[-1].result) <= _GUESS_NOISE]
    return "\n".join([*lines, f"{chain[at].term}~\\boxed{{{rng.choice(guesses)}}}"])


def _solution(question: str, results: list[int]) -> str:
    lines = [f"{s.term}:{result}" for s, result in zip(steps(question), results, strict=True)]
    return "\n".join([f":{first_value(question)}", *lines, f"\\boxed{{{results[-1]}}}"])


def _mistake(chain: list[Step], rng: random.Random) -> tuple[int, int] | None:
    """Return a step and an error in its result that leaves all values in 0…LARGEST_VALUE."""
    possible = [
        (at, error)
        for at in range(len(chain))
        for error in _ERRORS
        if all(0 <= step.result + error <= LARGEST_VALUE for step in chain[at:])
    ]
    return rng.choice(possible) if possible else None


def _draw(rng: random.Random, split: str) -> dict[str, str] | None:
    """Return one row; None if it belongs to the other split."""
    counts = range(MIN_OPERANDS, MAX_OPERANDS + 1)
    (count,) = rng.choices(counts, weights=[k**-_TAIL for k in counts])
    value = rng.randint(1, LARGEST_VALUE)
    text = str(value)
    for letter in string.ascii_lowercase[: count - 1]:
        operator, operand = _draw_step(rng, value)
        value += operand if operator == "+" else -operand
        text += f"{letter}{operator}{operand}"
    matches = split_of(f"{text}=?") == split
    return {"question": f"{text}=?", "answer": str(value)} if matches else None


def _draw_step(rng: random.Random, value: int) -> tuple[str, int]:
    """Return an operator and an operand that keep the value in range; half have one digit."""
    operator = "-" if rng.randint(1, LARGEST_VALUE) <= value else "+"
    room = LARGEST_VALUE - value if operator == "+" else value
    largest = min(room, 9 if rng.random() < 0.5 else LARGEST_OPERAND)
    return operator, rng.randint(1, largest)
