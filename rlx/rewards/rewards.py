r"""The reward functions that come with rlx, and how a config names one.

A reward function is `fn(prompt, completion, prompt_ids, completion_ids, **row) -> float`, where
`row` is the dataset row (so its `answer` arrives as `answer=`); docs/extend.md has the other kinds.
The functions here return 0.0 or 1.0 on any text and bound their own work. An answer that takes too
long to compare gets 0, and no worker is killed.
"""

import ast
import asyncio
import inspect
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import isfinite
from typing import Any

from rlx.base import UserError
from rlx.cli import user_code
from rlx.environments import reasoning_tasks
from rlx.rewards import answers, equality, numbers
from rlx.sandbox.sandbox import ProgramLimits
from rlx.workers.worker_process import worker_sandbox

RewardFunction = Callable[..., Any]  # a float; the pool checks it
_FENCE = re.compile(r"```([\w+#.-]*)[ \t]*\n(.*?)```", re.DOTALL)  # language, block
_PYTHON = ("", "py", "python", "python3")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LIMITS = ProgramLimits(wall_seconds=3.0, cpu_seconds=3.0)


def gsm8k(
    prompt: str, completion: str, *ids: Sequence[int], answer: Any, unfinished: bool = False,
    **row: Any,
) -> float:  # fmt: skip
    r"""Return 1 when the completion's final number equals the answer's as a fraction, else 0.

    Both are read alike: `#### 72`, else the last `\boxed{72}`, else the last number.
    """
    gold = answers.final_number(str(answer))
    number = answers.final_number(answers.outside_thoughts(prompt, completion, unfinished))
    if gold is None or number is None:
        return 0.0
    return float(abs(gold - number) <= numbers.tolerance(numbers.read(str(answer)), None))


def math(
    prompt: str, completion: str, *ids: Sequence[int], answer: Any = None, solution: Any = None,
    unfinished: bool = False, **row: Any,
) -> float:  # fmt: skip
    r"""Return 1 when the completion's final answer equals the row's, else 0.

    The final answer is the last closed `\boxed{…}`, else what follows `####` or "answer is", else
    the last `$…$` or number (`answers.final_answers`). Numbers, percentages, units, choices,
    words, and tuples or sets of them are compared exactly, the rest by math-verify, within
    bounds (`equality.equal`). `answers.reference` reads the row's `answer` or `solution`.
    """
    gold = answers.reference(answer, solution)
    if gold is None:
        return 0.0
    readings = answers.final_answers(answers.outside_thoughts(prompt, completion, unfinished))
    return float(any(equality.equal(gold, reading) for reading in readings))


def arithmetic(prompt: str, completion: str, *ids: Sequence[int], answer: Any, **row: Any) -> float:
    r"""Return 1 when the completion's last `\boxed{…}` equals the answer as by `math`, else 0."""
    box = answers.last_box(answers.outside_thoughts(prompt, completion))
    return float(box is not None and equality.equal(answers.reference(answer) or "", box))


def exact(prompt: str, completion: str, *ids: Sequence[int], answer: Any, **row: Any) -> float:
    """Return 1 when the completion is the answer, whatever its case and spaces, else 0."""
    text = answers.outside_thoughts(prompt, completion)
    return float(text.lower().split() == str(answer).lower().split())


async def code(prompt: str, completion: str, *ids: Sequence[int], answer: Any, **row: Any) -> float:
    """Return 1 when the completion's last fenced block of Python passes the tests, else 0.

    Blocks in a thought do not count. The tests are `answer`, a text or a list of them. They are
    Python that is run after the program, in its names, and raises where it is wrong, such as
    `assert add(1, 2) == 3`. A program that ends before them passes none. It may still look for what
    they print at their end, or change what they call: tests in its own process judge no adversary.
    """
    words = answers.outside_thoughts(prompt, completion)
    if not (blocks := [text for kind, text in _FENCE.findall(words) if kind.lower() in _PYTHON]):
        return 0.0
    mark = secrets.token_hex(8)
    sandbox = await asyncio.shield(_sandbox(asyncio.get_running_loop()))
    tests = "\n".join([answer] if isinstance(answer, str) else answer)
    outcome = await sandbox.run(f"{blocks[-1]}\n{tests}\nprint({mark!r})", _LIMITS)
    return float(outcome.status == "ok" and outcome.text.endswith(f"{mark}\n"))


def reasoning_gym(
    prompt: str, completion: str, *ids: Sequence[int], question: str, task: Mapping[str, Any],
    **row: Any,
) -> float:  # fmt: skip
    r"""Return what the row's task of reasoning-gym gives the completion's answer, 0 to 1.

    The answer is the last `<answer>…</answer>`, else the last `\boxed{…}`, else the whole text.
    """
    text = answers.outside_thoughts(prompt, completion)
    tagged = _TAGGED.findall(text)
    answer = tagged[-1] if tagged else answers.last_box(text)
    return reasoning_tasks.score((text if answer is None else answer).strip(), question, task)


@cache
def _sandbox(loop: asyncio.AbstractEventLoop) -> asyncio.Future:
    """Return the worker's one sandbox once it is ready; it ends with the process."""
    return asyncio.ensure_future(worker_sandbox(("math",)).__aenter__(), loop=loop)


REWARDS: dict[str, RewardFunction] = {
    "gsm8k": gsm8k, "math": math, "arithmetic": arithmetic, "exact": exact, "code": code,
    "reasoning_gym": reasoning_gym,
    "gsm8k_unfinished": partial(gsm8k, unfinished=True),
    "math_unfinished": partial(math, unfinished=True),
}  # fmt: skip


# Rewards that are no function but a model's: config.reward.model, and config.reward.judge.
MODEL, JUDGE = "model", "judge"

# Arguments of a function that gets a whole group in one call, besides the row's columns.
OF_GROUP = ("prompts", "completions", "prompt_ids", "completion_ids")


def resolve(name: str) -> RewardFunction:
    """Return the reward `name`: a key of REWARDS, `module:name`, `FILE.py:name`; else UserError."""
    function = user_code.find("reward", name, REWARDS)
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"reward {name!r} is a {kind}, not a function; name a function")
    return function


def weights_of(name: str, terms: Iterable[Any]) -> dict[str, float]:
    """Return name → weight of each of `reward.terms`, or UserError; without any, of `name`: 1."""
    weights: dict[str, float] = {}
    for entry in terms:
        kinds = [type(part) for part in entry] if isinstance(entry, tuple | list) else []
        if kinds not in ([str, float], [str, int]) or not isfinite(entry[1]):
            problem = f"reward.terms has {entry!r}, wanted a name and a finite weight"
            raise UserError(f"{problem}; write (('gsm8k', 1.0), ('mine.py:brevity', 0.1))")
        label = entry[0].rpartition(":")[2]
        if label in [other.rpartition(":")[2] for other in weights]:
            problem = f"reward.terms has {label!r} twice, and each is logged by its name"
            raise UserError(f"{problem}; keep one, or rename a function")
        weights[entry[0]] = float(entry[1])
    return weights or {name: 1.0}


def columns(name: str) -> list[str]:
    """Return the keys that rows need for reward `name`: its parameters without a default."""
    parameters = inspect.signature(resolve(name)).parameters.values()
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind == p.KEYWORD_ONLY]
    if any(p.name == "completions" for p in parameters):
        placed, keywords = [], [p for p in (*placed, *keywords) if p.name not in OF_GROUP]
    # The first four are given by position, so they are no keys of the row.
    return [p.name for p in (*placed[4:], *keywords) if p.default is p.empty]


def answer_key(names: Iterable[str], key: str = "answer") -> str:
    """Return `key`, of the rows' answers, if rows must have it; else ""."""
    # Another key than the default was chosen, so the rows must have it.
    return key if key != "answer" or any("answer" in columns(name) for name in names) else ""


def check_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise UserError for the first row to which `name` gives 1 never, or always (no tests)."""
    name = name.removesuffix("_unfinished")
    for index, row in enumerate(rows if name in REWARDS else ()):
        answer = row.get("answer")
        shown = repr(str(answer)[-60:])
        if name == "code" and not _may_fail(answer):
            problem = f"row {index + 1} has no tests that a program could fail: {shown}"
            raise UserError(f"{problem}; write `assert f(1) == 2`, or set data.answer_key")
        if name in ("arithmetic", "exact") and (answer is None or not str(answer).strip()):
            raise UserError(f"row {index + 1} has no answer: {shown}; mend the row")
        if name == "gsm8k" and answers.final_number(str(answer)) is None:  # it would return 0
            remedy = "mend the row, or set reward.name=math for symbolic answers"
            raise UserError(f"row {index + 1}: the answer {shown} holds no number; {remedy}")
        if name == "math" and not answers.reference(answer, row.get("solution")):
            problem = f"answer={shown} is empty and solution holds no \\boxed{{…}}"
            raise UserError(f"row {index + 1} has no answer: {problem}; mend the row")


def _may_fail(tests: Any) -> bool:
    """Return whether tests are Python that checks or calls something, not only defines it."""
    try:
        body = ast.parse("\n".join(tests if isinstance(tests, list) else [tests])).body
    except (SyntaxError, TypeError, ValueError):
        return False
    steps = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    kinds = ast.Assert | ast.Call | ast.Raise
    return any(isinstance(node, kinds) for step in steps for node in ast.walk(step))


def float_answers(names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about answers that went through a float; "" where none did."""
    texts = [] if REWARDS.keys().isdisjoint(names) else [str(row.get("answer")) for row in rows]
    readings = [numbers.read(text) if 10 < len(text) < 40 else None for text in texts]
    floats = [number for number, reading in enumerate(readings) if reading and reading.error]
    return "" if not floats else (
        f"{len(floats)} of {len(rows)} answers went through a float, first row {floats[0] + 1}: "
        f"{texts[floats[0]]}; they compare to 6 places, answers kept as text exactly"
    )  # fmt: skip
