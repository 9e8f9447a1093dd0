"""The reward `code`: right programs get 1, wrong, endless and cheating ones 0, in a real worker."""

from contextlib import closing

import pytest

from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.sandbox.sandbox import SandboxOptions
from rlx.workers.worker_process import WorkerLimits

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
PROGRAMS = {
    "return a + b": 1.0,
    "return a - b": 0.0,
    "while True: pass": 0.0,
    "import os; os._exit(0)": 0.0,
    "raise SystemExit": 0.0,
    "return a +": 0.0,
    "return open('/etc/shadow')": 0.0,
}


def graded(completions: list[str], tests: str | list[str] = TESTS) -> list[float]:
    calls = [RewardCall("", text, [], [], {"answer": tests}) for text in completions]
    limits = WorkerLimits(sandbox=SandboxOptions(require="none"))
    with closing(RewardPool("code", timeout=300.0, limits=limits)) as pool:
        return pool.compute(calls).rewards


def test_a_program_is_worth_what_its_tests_say():
    fenced = [f"So:\n```python\ndef add(a, b):\n    {line}\n```" for line in PROGRAMS]
    loose = "def add(a, b): return a + b"
    two = f"{fenced[1]}\nNo:\n```py\n{loose}\n```"
    data = '```json\n{"a": 1}\n```\n'
    others = [f"{data}{fenced[0]}", f"{fenced[0]}\nIt prints:\n```text\n3\n```", f"{data}{loose}"]
    assert graded([*fenced, loose, two]) == [*PROGRAMS.values(), 0.0, 1.0]
    assert graded(others) == [1.0, 1.0, 0.0]  # blocks of other languages
    assert graded(fenced[:2], TESTS.split("\n")) == [1.0, 0.0]  # one by one, as MBPP has them
    assert graded([fenced[0].replace("```python", "```Python")]) == [1.0]
    thought = f"<think>{fenced[0]}"
    wrong = f"{thought}</think>No code."
    assert graded([thought, wrong, f"{thought}</think>{fenced[1]}"]) == [0.0, 0.0, 0.0]
    assert graded([f"<think>{fenced[1]}</think>{fenced[0]}"]) == [1.0]


def test_the_config_s_sandbox_is_the_worker_s():
    calls = [RewardCall("", "```\n1\n```", [], [], {"answer": ""})]
    limits = WorkerLimits(sandbox=SandboxOptions(kind="nowhere.py:Remote"))
    pool = RewardPool("code", timeout=300.0, limits=limits)
    with closing(pool), pytest.raises(RewardError, match=r"sandbox\.kind.*no file nowhere\.py"):
        pool.compute(calls)
