"""Real worker processes: what they compute, and how they are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool, problem

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def importable_by_workers():
    """Spawned workers inherit sys.path."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module")
def running_pool():
    pool = RewardPool("reward_functions:echo", workers=1, timeout=1.0)
    pool.start()
    yield pool
    pool.close()


@pytest.fixture
def echo(running_pool):
    return running_pool


def call(completion, answer="x", **row):
    return RewardCall("p", completion, [1], [2, 3], {"question": "q7", "answer": answer, **row})


def compute(pool, *completions):
    return asyncio.run(pool.rewards([call(c) for c in completions]))


def alive(pid):
    """True while the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
        return False


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_rewards_in_order_with_their_time(echo):
    before = time.monotonic_ns()
    rewards, (span,) = compute(echo, "a", "b", "slow")
    assert rewards == [1.0, 1.0, 1.0]
    assert before <= span.start_ns < span.end_ns <= time.monotonic_ns()
    assert span.end_ns - span.start_ns >= 400_000_000
    assert span.pid != os.getpid()


@pytest.mark.parametrize("how", ["loop", "stuck in C"])
def test_a_hanging_function_is_killed_and_named(echo, how):
    _, (span,) = compute(echo, "a")
    with pytest.raises(RewardError, match=rf"killed after 1 s.*completion 1 \('{how}'\).*q7"):
        compute(echo, "a", how, "b")
    wait_until(lambda: not alive(span.pid))
    assert compute(echo, "a")[0] == [1.0]


def test_a_slow_group_within_the_limit_of_each_completion_gets_its_rewards(echo):
    rewards, spans = compute(echo, "slow", "slow", "slow", "a")
    assert rewards == [1.0] * 4
    assert len(spans) == 1  # computed once


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "completion 1 .*q7.*LookupError: no such thing"),
        ("exit", "completion 1 .*SystemExit: 3"),
        ("die", r"died \(exit code -9\)"),
        ("nan", "completion 1 .*returned nan"),
        ("inf", "returned inf"),
        ("none", "returned None"),
        ("text", "returned '1.0'"),
        ("list", r"returned \[1.0, 0.0\]; a reward is a finite number"),
        ("array", r"returned array\(\[1.0*\.?\]\)"),
        ("huge", "returned 1e\\+39"),
        ("endless", "returned 1000000"),
    ],
)
def test_a_failure_names_function_row_and_reason(echo, how, message):
    with pytest.raises(RewardError, match=f"(?s)reward_functions:echo.*{message}"):
        compute(echo, "a", how, "b")
    assert compute(echo, "a")[0] == [1.0]


def test_the_traceback_of_the_worker_is_in_the_error(echo):
    with pytest.raises(RewardError, match=r'(?s)File ".*reward_functions.py", line \d+, in echo'):
        compute(echo, "raise")


def test_an_idle_worker_that_is_killed_is_replaced(echo):
    _, (span,) = compute(echo, "a")
    os.kill(span.pid, signal.SIGKILL)
    wait_until(lambda: not alive(span.pid))

    def works():
        try:
            return compute(echo, "a")[0] == [1.0]
        except RewardError:
            return False

    wait_until(works)


def test_arguments_and_kinds_of_numbers():
    row = {"answer": "yes", "prompt": "a column that would clash", "completion_ids": 3}
    pool = RewardPool("reward_functions:length", timeout=20.0)
    try:
        (value,), _ = asyncio.run(pool.rewards([RewardCall("p", "four", [1], [2, 3], row)]))
        assert value == 4.2
        pool.name = "reward_functions:truth"
        calls = [RewardCall("p", c, [], [], {"answer": "yes"}) for c in ("yes", "no")]
        assert asyncio.run(pool.rewards(calls))[0] == [1.0, 0.0]
        pool.name = "rlx.rewards.rewards:math"
        calls = [RewardCall("p", c, [], [], {"answer": "1/2"}) for c in (r"\boxed{0.5}", "no")]
        assert asyncio.run(pool.rewards(calls))[0] == [1.0, 0.0]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "number",
    [0, 1, True, 0.5, np.float32(0.5), np.float64(2), np.int8(3), np.bool_(True), Fraction(1, 3)],
)
def test_numbers_of_any_kind_are_rewards(number):
    assert problem(number) is None


PARENT = """
import asyncio, sys, threading
from rlx.rewards.reward_pool import RewardCall, RewardPool

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    pool = RewardPool("reward_functions:echo", timeout=1000.0)
    pool.start()
    _, (span,) = asyncio.run(pool.rewards([RewardCall("", "a", [], [], {"answer": ""})]))
    call = RewardCall("", sys.argv[2], [], [], {"answer": "", "marker": sys.argv[3]})
    threading.Thread(target=lambda: asyncio.run(pool.rewards([call])), daemon=True).start()
    print(span.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("busy_with", ["a", "stuck in C"])
def test_workers_die_with_a_killed_parent(tmp_path, busy_with):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    marker = tmp_path / "begun"
    command = [sys.executable, str(script), HERE, busy_with, str(marker)]
    environment = {**os.environ, "PYTHONPATH": str(Path(HERE).parents[1])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        worker = int(parent.stdout.readline())
        wait_until(marker.exists)
        assert alive(worker)
        parent.kill()
    try:
        wait_until(lambda: not alive(worker))
    finally:
        if alive(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_hard_answer_is_a_zero_and_costs_no_worker():
    pool = RewardPool("math", workers=1, timeout=30.0)
    try:
        texts = (r"\boxed{1/2}", r"\boxed{(x+y+z+1)^{200}(x-y)^{200}}", r"\boxed{9^{9^9}}", "0.5")
        calls = [call(text, answer=r"\frac{1}{2}") for text in texts]
        values, spans = asyncio.run(pool.rewards(calls))
    finally:
        pool.close()
    assert values == [1.0, 0.0, 0.0, 1.0]
    assert len(spans) == 1  # one task: nothing was killed and tried again alone
