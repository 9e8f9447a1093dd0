"""Real worker processes: what they compute, and how they are killed."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool, problem
from tests.fixtures.commands import ended

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def importable_by_workers():
    """Spawned workers inherit sys.path."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module")
def running_pool():
    with closing(RewardPool("reward_functions:echo", workers=1, timeout=1.0)) as pool:
        pool.start()
        yield pool


@pytest.fixture
def echo(running_pool):
    return running_pool


def call(completion, answer="x", **row):
    return RewardCall("p", completion, [1], [2, 3], {"question": "q7", "answer": answer, **row})


def compute(pool, *completions, **row):
    graded = asyncio.run(pool.grade([call(c, **row) for c in completions]))
    return graded.rewards, pool.drain_spans()


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
    assert ended(span.pid, 20.0)
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


def test_a_failure_is_one_line_with_the_users_file_and_the_workers_traceback_as_a_note(echo):
    file = rf"\({HERE}/reward_functions.py, line \d+\)"
    for how, match in (("raise", f"LookupError: no such thing {file}"), ("nan", f"nan; .* {file}")):
        with pytest.raises(RewardError, match=match) as caught:
            compute(echo, how)
        assert "\n" not in str(caught.value)
        if how == "raise":
            assert 'reward_functions.py", line' in caught.value.__notes__[0]
    with pytest.raises(RewardError, match=rf"killed after 1 s .* {file}"):
        compute(echo, "loop")


def test_an_idle_worker_that_is_killed_is_replaced(echo):
    _, (span,) = compute(echo, "a")
    os.kill(span.pid, signal.SIGKILL)
    assert ended(span.pid, 20.0)
    with contextlib.suppress(RewardError):  # the pool may not know yet
        compute(echo, "a")
    assert compute(echo, "a")[0] == [1.0]


def test_arguments_and_kinds_of_numbers():
    row = {"answer": "yes", "prompt": "a column that would clash", "completion_ids": 3}
    weights = {"length": 1.0, "truth": 0.5, "few": -2}
    with closing(
        RewardPool({f"reward_functions:{n}": w for n, w in weights.items()}, timeout=20.0)
    ) as pool:
        calls = [RewardCall("p", "four", [1], [2, 3], row), RewardCall("p", "yes", [1], [2], row)]
        graded = pool.compute(calls)
        assert graded.infos[0] == {"reward/length": 4.2, "reward/truth": 0.0, "reward/few": 4.0}
        assert graded.infos[1] == {"reward/length": 3.1, "reward/truth": 1.0, "reward/few": 3.0}
        assert graded.rewards == pytest.approx([4.2 - 8.0, 3.1 + 0.5 - 6.0])
        assert len(pool.drain_spans()) == 1
    assert RewardPool({}).compute(calls).rewards == [0.0, 0.0]


def pool_of(path, source, *names, **options):
    path.write_text(source)
    return closing(RewardPool({f"{path}:{name}": 1.0 for name in names}, **options))


ASYNC = """
import asyncio

async def meet(prompt, completion, prompt_ids, completion_ids, answer):
    here.append(completion)
    while len(here) < 3:
        await asyncio.sleep(0.01)
    if completion == "raise":
        raise OSError("judge is away")
    if completion == "hang":
        await asyncio.Event().wait()
    await asyncio.sleep(0.4 if completion == "late" else 0)
    return float(len(completion))

here = []
"""


def test_an_async_function_gets_the_completions_of_a_group_at_once(tmp_path):
    with pool_of(tmp_path / "mine.py", ASYNC, "meet", timeout=20.0) as pool:
        assert compute(pool, "late", "one", "three")[0] == [4.0, 3.0, 5.0]
        match = r"completion 1 \('raise'\).*OSError: judge is away \(.*mine.py, line 9\)"
        with pytest.raises(RewardError, match=match):
            compute(pool, "late", "raise", "three")
        assert compute(pool, "a")[0] == [1.0], "what was cut off does not come back"


def test_the_limit_of_an_async_function_names_the_completion_that_hangs(tmp_path):
    wanted = pytest.raises(RewardError, match=r"killed after 1 s.* 1 \('hang'\).*mine.py, line 4")
    with pool_of(tmp_path / "mine.py", ASYNC, "meet", timeout=1.0) as pool, wanted:
        compute(pool, "late", "hang", "three")


def test_what_begins_together_has_one_limit_however_the_others_end(tmp_path):
    source = """
import asyncio
async def wait(prompt, completion, prompt_ids, completion_ids):
    await asyncio.sleep(float(completion))
    return 1.0
"""
    wanted = pytest.raises(RewardError, match=r"killed after 2 s.* 1 \('3'\).*mine.py, line 3")
    with pool_of(tmp_path / "mine.py", source, "wait", timeout=2.0) as pool, wanted:
        compute(pool, "1.5", "3")


GROUPS = """
def rank(prompts, completions):
    if "raise" in completions:
        return [1.0, missing]
    if "short" in completions:
        return [1.0]
    if "nan" in completions:
        return [0.0, float("nan")]
    if "none" in completions:
        return None
    if "number" in completions:
        return 0.5
    if "yields" in completions:
        return (missing for _ in completions)
    return [float(sorted(completions).index(c)) for c in completions]

async def judge(completions, answer, completion_ids, **columns):
    assert answer == ["x"] * len(completions) and columns["question"] == ["q7"] * len(completions)
    return [len(ids) for ids in completion_ids]

def together(prompts, completions):
    import time
    time.sleep(0.7)
    return [0.0] * len(completions)
"""


def test_a_function_with_plural_arguments_gets_a_group_in_one_call(tmp_path):
    with pool_of(tmp_path / "mine.py", GROUPS, "rank", "judge", timeout=20.0) as pool:
        graded = pool.compute([call(c) for c in ("b", "c", "a")])
        assert [info["reward/rank"] for info in graded.infos] == [1.0, 2.0, 0.0]
        assert [info["reward/judge"] for info in graded.infos] == [2.0, 2.0, 2.0]
        assert graded.rewards == [3.0, 4.0, 2.0]
        for how, match in (
            ("raise", r"the group of row.*q7.*NameError.*mine.py, line 4\)"),
            ("short", r"the group of row.*q7.*1 rewards were returned for 2 completions.*line 2\)"),
            ("nan", r"completion 1 \('nan'\).*q7.*returned nan.*mine.py, line 2\)"),
            ("none", r"the group of row.*None was returned for 2 completions; return a.*line 2\)"),
            ("number", r"the group of row.*0.5 was returned for 2 completions; return a.*line 2\)"),
            ("yields", r"the group of row.*q7.*NameError.*mine.py, line 14\)"),
        ):
            with pytest.raises(RewardError, match=rf"mine.py:rank' failed on {match}"):
                compute(pool, "b", how)


def test_a_group_in_one_call_has_the_time_of_all_its_completions(tmp_path):
    with pool_of(tmp_path / "mine.py", GROUPS, "together", timeout=0.5) as pool:
        assert compute(pool, "a", "b", "c", "d")[0] == [0.0] * 4
        with pytest.raises(RewardError, match=r"after 0.5 s \(.* of each completion\) on the grou"):
            compute(pool, "a")


@pytest.mark.parametrize(
    "number",
    [0, 1, True, 0.5, np.float32(0.5), np.float64(2), np.int8(3), np.bool_(True), Fraction(1, 3)],
)
def test_numbers_of_any_kind_are_rewards(number):
    assert problem(number) is None


def test_a_hard_answer_is_a_zero_and_costs_no_worker():
    with closing(RewardPool("math", workers=1, timeout=30.0)) as pool:
        texts = (r"\boxed{1/2}", r"\boxed{(x+y+z+1)^{200}(x-y)^{200}}", r"\boxed{9^{9^9}}", "0.5")
        calls = [call(text, answer=r"\frac{1}{2}") for text in texts]
        graded = pool.compute(calls)
    assert graded.rewards == [1.0, 0.0, 0.0, 1.0]
    assert len(pool.drain_spans()) == 1  # one task: nothing was killed and tried again alone


def test_workers_look_for_modules_in_their_parents_order(tmp_path, monkeypatch):
    """setuptools appends a directory of its own copies, which must not hide what is installed."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late/ml_collections.py").write_text("raise ImportError('hidden by a late copy')")
    (tmp_path / "own.py").write_text(
        "from ml_collections import ConfigDict\ndef right(*_, **__): return float(bool(ConfigDict))"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "late")])
    with closing(RewardPool(f"{tmp_path}/own.py:right", workers=1, timeout=60.0)) as pool:
        pool.start()
        assert compute(pool, "any")[0] == [1.0]
