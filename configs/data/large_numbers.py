"""Problems with numbers too large for mental arithmetic: `739*48-5160=?`. No I/O.

They have two or three operands. Factors have two or three digits, the others three to five.
A hash of the text holds a problem out, as in the embedded task.
"""

import random

from rlx.rollout.arithmetic import split_of

NUM_TRAIN, NUM_HELD_OUT = 20_000, 500
_LAST_OPERAND = 0.4  # the chance of a third operand
_PRODUCT = 0.35  # that the first two are multiplied


def rows(split):
    """Yield the problems of `train` or of `test`, with their answers; the same each time."""
    rng = random.Random(f"large numbers {split}")
    wanted, count = {"train": ("train", NUM_TRAIN), "test": ("held_out", NUM_HELD_OUT)}[split]
    seen = set()
    while len(seen) < count:
        expression = draw(rng)
        if split_of(expression) == wanted and expression not in seen:
            seen.add(expression)
            yield {"question": f"{expression}=?", "answer": str(value(expression))}


def draw(rng):
    """Return an expression of integers, `+`, `-` and `*`."""
    if rng.random() < _PRODUCT:
        text = f"{_number(rng, 2, 3)}*{_number(rng, 2, 3)}"
    else:
        text = f"{_number(rng, 3, 5)}{rng.choice('+-')}{_number(rng, 3, 5)}"
    if rng.random() < _LAST_OPERAND:
        text += f"{rng.choice('+-')}{_number(rng, 3, 5)}"
    return text


def value(expression):
    """Return the value of an expression of `draw`."""
    product, *terms = expression.replace("-", "+-").split("+")
    first, _, second = product.partition("*")
    return int(first) * int(second or 1) + sum(map(int, terms))


def _number(rng, least, most):
    digits = rng.randint(least, most)
    return rng.randrange(10 ** (digits - 1), 10**digits)
