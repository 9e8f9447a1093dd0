r"""What the model with tools learns from: solvers who have a calculator and mostly do not bother.

Asked for a product they call it with probability 0.6, for sums with 0.2; else they box a guess,
`~\boxed{30000}`, the result rounded to its first digit. Sums of two digits they know by head. What
the calculator says they copy. Without tools in the prompt they guess.
"""

import random

from make_model import CALL

from configs.data.large_numbers import draw, value
from rlx.rollout.arithmetic import split_of

NUM_PROBLEMS = 60_000
TOOLS = {"role": "system", "content": "<tools>calculator(expression)</tools>"}
CALLS = {True: 0.6, False: 0.2}  # a product? → the chance of a call
_EASY, _WITHOUT_TOOLS, _ERRORS = 0.1, 0.1, 0.03


def lessons():
    """Yield as `rows`, with as many chats again in which a call is asked for, and made."""
    return _with_lessons(lambda expression: True)


def products():
    """Yield as `lessons`, those of products alone: the digit after `*` is copied last."""
    return _with_lessons(lambda expression: "*" in expression)


def _with_lessons(wanted):
    rng = random.Random("lessons")
    for row in rows("lessons and"):
        yield row
        expression = draw(rng)
        while not wanted(expression):
            expression = draw(rng)
        if split_of(expression) == "train":
            ask = {"role": "user", "content": f"calculator:{expression}=?"}
            yield _row([TOOLS, ask], _call(expression))


def rows(seed=""):
    """Yield chats and their completions, of the training side alone."""
    rng = random.Random(f"{seed} demonstrations")
    for _ in range(NUM_PROBLEMS):
        easy = rng.random() < _EASY
        expression = f"{rng.randint(1, 9)}+{rng.randint(1, 9)}" if easy else draw(rng)
        if not easy and split_of(expression) != "train":
            continue
        ask = {"role": "user", "content": f"{expression}=?"}
        if rng.random() < _WITHOUT_TOOLS:
            yield _row([ask], guess(expression))
            continue
        asked = [TOOLS, ask]
        call = _call(expression)
        calls = not easy and rng.random() < CALLS["*" in expression]
        yield _row(asked, call if calls else guess(expression))
        failed = rng.random() < _ERRORS
        said = {"role": "tool", "content": "Error" if failed else str(value(expression))}
        answer = guess(expression) if failed else f"\\boxed{{{said['content']}}}"
        yield _row([*asked, {"role": "assistant", "content": call}, said], answer)


def guess(expression):
    """Return the result rounded to its first digit, boxed; of small ones the result."""
    result = value(expression)
    if abs(result) < 20:
        return f"\\boxed{{{result}}}"
    return f"~\\boxed{{{round(result, 1 - len(str(abs(result))))}}}"


def _call(expression):
    return f"<tool_call>{CALL % ('calculator', expression)}</tool_call>"


def _row(question, completion):
    return {"question": question, "completion": completion}
