r"""Demonstrations for the model with tools: solvers who have a calculator and seldom use it.

With tools in the prompt they call the calculator with probability 0.6 for a product and 0.2 for a
sum. Otherwise they box a guess, `~\boxed{30000}`: the result rounded to its first digit. They know
sums of two digits by heart, and copy the calculator's output. Without tools they guess.
"""

import random

from make_model import CALL

from configs.data.large_numbers import draw, value
from rlx.rollout.arithmetic import split_of

NUM_PROBLEMS = 60_000
TOOLS = {"role": "system", "content": "<tools>calculator(expression)</tools>"}
CALLS = {True: 0.6, False: 0.2}  # is it a product? → probability of a call
_EASY, _WITHOUT_TOOLS, _ERRORS = 0.1, 0.1, 0.03


def lessons():
    """Yield the rows of `rows`, and as many chats that ask for a call and make it."""
    return _with_lessons(lambda expression: True)


def products():
    """Yield as `lessons`, with calls for products only: the digit after `*` is learned last."""
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
    """Yield chats and their completions from the training split."""
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
    """Return the result rounded to its first digit, boxed; small results exactly."""
    result = value(expression)
    if abs(result) < 20:
        return f"\\boxed{{{result}}}"
    return f"~\\boxed{{{round(result, 1 - len(str(abs(result))))}}}"


def _call(expression):
    return f"<tool_call>{CALL % ('calculator', expression)}</tool_call>"


def _row(question, completion):
    return {"question": question, "completion": completion}
