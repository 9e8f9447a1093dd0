r"""Demonstrations of the embedded model: solvers who know the method and often give up.

A demonstration writes the running value after each term, `a+38:85`. At a step that carries or
borrows, the solver may give up instead and box a guess, `a+38~\boxed{60}`: the answer plus noise of
about ten, rounded. One guess in twenty is right. Large operands make giving up more likely. Greedy
decoding of the trained model gives up where most solvers do. Samples continue often enough for RL
to learn that continuing pays.
"""

import random

from rlx.rollout import arithmetic

GIVE_UP_EASY = 0.02  # a step without carry or borrow
GIVE_UP_HARD = ((8, 0.25), (19, 0.58), (29, 0.70), (49, 0.82))  # operand up to → probability
_GUESS_NOISE = 12.0


def draw(question: str, rng: random.Random) -> str:
    """Return one solver's completion of a problem."""
    chain, lines = arithmetic.steps(question), [f":{arithmetic.first_value(question)}"]
    answer = chain[-1].result
    for step in chain:
        if rng.random() < give_up(step):
            return "\n".join([*lines, f"{step.term}~\\boxed{{{_guess(answer, rng)}}}"])
        lines.append(f"{step.term}:{step.result}")
    return "\n".join([*lines, f"\\boxed{{{answer}}}"])


def give_up(step: arithmetic.Step) -> float:
    """Return the probability that a solver gives up at this step, in [0, 1]."""
    units, other = step.value % 10, step.operand % 10
    carries = units + other > 9 if step.operator == "+" else units < other
    if not carries:
        return GIVE_UP_EASY
    return next(probability for most, probability in GIVE_UP_HARD if step.operand <= most)


def _guess(answer: int, rng: random.Random) -> int:
    return min(max(10 * round(rng.gauss(answer, _GUESS_NOISE) / 10), 0), 90)
