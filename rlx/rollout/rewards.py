r"""Reward functions and how a config names one.

A reward function is `fn(prompt, completion, prompt_ids, completion_ids, **row) -> float`, where
`row` is the dataset row (so its `answer` arrives as `answer=`). It runs in a worker process
(`reward_pool.py`); math-verify and sympy are imported there, on first use.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlx.base import UserError
from rlx.config import unknown
from rlx.rollout import numbers

RewardFunction = Callable[..., Any]  # a float; the pool checks it

_PARSE_SECONDS = 2  # math-verify's own limits, so that sympy on odd text is a 0, not a failure
_VERIFY_SECONDS = 2


def gsm8k(
    prompt: str,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **row: Any,
) -> float:
    r"""1 when the completion's final number equals the answer's, else 0.

    Both are read alike: `#### 72`, else the last `\boxed{72}`, else the last number; with
    signs, currency, thousands separators, percent, units, decimals and fractions, compared as
    exact fractions.

    Args:
      answer: the number, or a whole solution that ends in `#### 72`.
    """
    wanted = numbers.read_answer(str(answer))
    return float(wanted is not None and numbers.read_answer(completion) == wanted)


def math(
    prompt: str,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **row: Any,
) -> float:
    r"""1 when math-verify finds the completion's final expression equal to the answer, else 0.

    Args:
      answer: LaTeX or plain text of the expression alone, or a solution with `\boxed{…}`,
        `$…$` or `#### …` in it.
    """
    return float(_equal(_as_latex(str(answer)), completion))


def arithmetic(
    prompt: str,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: Any,
    **row: Any,
) -> float:
    r"""1 when the content of the completion's last `\boxed{…}` equals the answer, else 0.

    Integers are compared as such, everything else by math-verify (which takes milliseconds).
    """
    box = numbers.last_box(completion)
    if box is None:
        return 0.0
    wanted, got = _integer(str(answer)), _integer(box)
    if wanted is not None and got is not None:
        return float(wanted == got)
    return float(_equal(_as_latex(str(answer)), f"\\boxed{{{box}}}"))


REWARDS: dict[str, RewardFunction] = {"gsm8k": gsm8k, "math": math, "arithmetic": arithmetic}


def resolve(name: str) -> RewardFunction:
    """The reward function called `name`: a key of REWARDS, or `module:function`.

    Raises:
      UserError: no such name, module or function.
    """
    if ":" not in name:
        if name not in REWARDS:
            raise unknown("reward.name", name, REWARDS)
        return REWARDS[name]
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"reward.name={name!r}: cannot import {module_name!r} ({error}); "
            "is its directory on PYTHONPATH?"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward.name={name!r}: {module_name} has no function {function_name!r}")
    return function


def check_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises UserError for the first row that reward `name` could never give 1 for.

    An `answer` without a number would make `gsm8k` return 0 for ever without a word.
    """
    if name != "gsm8k":
        return
    for index, row in enumerate(rows):
        if numbers.read_answer(str(row["answer"])) is None:
            raise UserError(
                f"row {index + 1}: the answer {str(row['answer'])[-60:]!r} holds no number; "
                "mend the row, or set reward.name=math for symbolic answers"
            )


def _integer(text: str) -> int | None:
    digits = text.strip().removeprefix("-")
    short = digits.isascii() and digits.isdigit() and len(digits) <= 400
    return int(text) if short and text.strip().count("-") <= 1 else None


def _as_latex(answer: str) -> str:
    """`answer` in a form whose whole content math-verify reads as one expression."""
    if "####" in answer:
        answer = answer.rpartition("####")[2].strip()
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _equal(gold: str, text: str) -> bool:
    """math-verify on two texts. Its limits use SIGALRM, which only a main thread can have;
    elsewhere the pool's own timeout is the limit."""
    import math_verify

    alarm = threading.current_thread() is threading.main_thread()
    parse_limit, verify_limit = (_PARSE_SECONDS, _VERIFY_SECONDS) if alarm else (0, 0)  # 0: none
    wanted = math_verify.parse(gold, parsing_timeout=parse_limit)
    got = math_verify.parse(text, parsing_timeout=parse_limit)
    return bool(math_verify.verify(wanted, got, timeout_seconds=verify_limit))
