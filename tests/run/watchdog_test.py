"""A hang is reported in one line and ended by a signal: with a simulated clock, and for real."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.cli.hangs import Sign, look
from tests.fixtures.commands import FEW, FLOAT32, path_without_torch

LEAST = {"a": 10.0, "b": 10.0}
PATIENCE = 300.0  # seconds, of a busy machine, until a run has begun


def watch(marks, every=1.0, least=10.0):
    """The times at which a sign with these marks is reported, looked at `every` second."""
    state, said = {}, []
    for i, mark in enumerate(marks):
        sign = Sign(mark, lambda: "late")
        state, lines = look(state, i * every, {"a": sign}, {"a": least})
        said += [i * every] * len(lines)
    return said


def test_a_sign_that_stays_is_reported_and_seldom_again():
    assert watch([0] * 200) == [10, 40, 160]
    assert watch([*range(100)]) == []
    assert watch([None] * 100) == [], "it has nothing to do"


def test_what_is_slow_is_late_after_a_multiple_of_what_was_measured():
    """Twenty seconds that ended by themselves: the next are late after a hundred."""
    assert watch([0] * 20 + [1] * 99) == [10]
    assert watch([0] * 20 + [1] * 102) == [10, 120]


def test_a_time_that_is_known_counts_from_its_begin():
    _, lines = look({}, 100.0, {"b": Sign("x", lambda: "b", since=85.0)}, LEAST)
    assert lines == ["b, for 15 s"]


@given(st.lists(st.integers(0, 2), max_size=60))
def test_whatever_moves_within_its_least_is_never_reported(marks):
    changed = [(i, mark) for i, mark in enumerate(marks)]
    assert watch(changed) == []
    assert all(at >= 10 for at in watch(marks))


HANGS = '''
import time
from rlx.rollout.workflows import RLVR


class Blocks(RLVR):
    async def run(self, fleet, task):
        if task.group_id > 5:
            time.sleep(1e6)  # workflow
        return await super().run(fleet, task)


def hold():
    """Lock a mutex twice in C, by calls that keep the interpreter and that no signal ends."""
    import ctypes

    lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)


class Hook:
    def on_step(self, step, record):
        time.sleep(1e6)  # hook


class Search:
    name, description = "search", "Searches."
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}

    def run(self, q):
        time.sleep(1e6)  # tool


class Tools(RLVR):
    """More calls than there are threads for."""

    async def run(self, fleet, task):
        import asyncio
        from rlx.rollout import tools

        if task.group_id > 5:
            await asyncio.gather(*(tools.call(Search(), {"q": "x"}) for _ in range(40)))
        return await super().run(fleet, task)


class Once(RLVR):
    """A tool that hangs in the first rollout, whose time is soon up."""

    hung = False

    async def run(self, fleet, task):
        import asyncio
        from rlx.rollout import tools

        if task.group_id == 1 and not self.hung:
            self.hung = True
            await asyncio.gather(*(tools.call(Search(), {"q": "x"}) for _ in range(40)))
        return await super().run(fleet, task)


class Agent:
    async def run(self, data, *, base_url, api_key, http_client):
        import asyncio

        await asyncio.sleep(1e6)  # agent


def rows():
    time.sleep(1e6)  # rows
'''
GO = f"""
{FEW}
from rlx.cli import command
from rlx.system import signals
from rlx.doctor import failures
from rlx.cli import hangs
hangs.SECONDS.update(dict.fromkeys(hangs.SECONDS, 2.0), step=100.0)
signals._CUT_SECONDS = 1.0
from rlx import main
command.run(main.main, explain=failures.explain)
"""
FLAGS = (
    "--config=configs/arithmetic.py", "--config.rollout.batch_prompts=4",
    "--config.sampling.n_samples=4", "--config.fleet.slots=16", "--config.eval.num_questions=0",
    "--config.sampling.max_new_tokens=32", "--config.gate.enabled=False", FLOAT32,
)  # fmt: skip


@contextlib.contextmanager
def started(tmp_path, *flags, command=(GO, *FLAGS, "--workdir={}/run")):
    """A run in a process of its own, and the lines that it says; it ends with the block."""
    command = [part.replace("{}", str(tmp_path)) for part in command]
    (tmp_path / "hang.py").write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, "-c", *command, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path_without_torch()},
    )  # fmt: skip
    lines, said = [], threading.Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            if "stacks of all threads" in line:
                said.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, lines, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()


def ends(process, number, seconds):
    begun = time.monotonic()
    process.send_signal(number)
    status = process.wait(60)
    assert time.monotonic() - begun < seconds
    return status


EARLY = {
    "dataset": ("--config.data.dataset={}/hang.py:rows", "# rows"),
    "reward": ("--config.reward.name={}/slow.py:score", "slow.py:1 <module>: while True"),
    "template": ("--config.data.chat_template={}/endless.jinja", "<template>"),
}


@pytest.mark.parametrize(
    "what", ["dataset", "reward", pytest.param("template", marks=pytest.mark.slow)]
)
def test_users_code_that_hangs_before_the_run_begins_is_named_and_ends(what, tmp_path):
    flag, words = EARLY[what]
    (tmp_path / "slow.py").write_text("while True: pass\n")
    (tmp_path / "endless.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}{{ messages }}"
    )
    with started(tmp_path, *flag.format(tmp_path).split()) as (process, lines, said):
        assert said.wait(PATIENCE), lines
        assert words in lines[-1]
        assert "Thread 0x" in (tmp_path / "run/stacks.txt").read_text()
        assert ends(process, signal.SIGTERM, 10) == 130
    assert lines[-1] == "interrupted\n"


def test_stacks_are_written_while_a_call_in_c_holds_the_interpreter(tmp_path):
    (tmp_path / "reward.py").write_text(f"{HANGS}\ntime.sleep(3.0)\nhold()\n")
    line = HANGS.splitlines().index("    lib.pthread_mutex_lock(mutex)") + 2  # the second of them
    (tmp_path / "run").mkdir()
    with started(tmp_path, f"--config.reward.name={tmp_path}/reward.py:score"):
        for _ in range(3000):
            stacks = tmp_path / "run/stacks.txt"
            if stacks.exists() and "Timeout" in (text := stacks.read_text()):
                break
            time.sleep(0.1)
        assert f'reward.py", line {line} in hold' in text


LATE = {
    "workflow": ("--config.rollout.workflow={}/hang.py:Blocks", "# workflow"),
    "hook": ("--config.observe.writers=('{}/hang.py:Hook',)", "# hook"),
    "tool": ("--config.rollout.workflow={}/hang.py:Tools", "Search.run"),
    "agent": ("--config.rollout.workflow={}/hang.py:Agent", "the rollout of row"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LATE)
def test_users_code_that_hangs_in_a_run_is_named_and_the_run_is_saved(what, tmp_path):
    flag, words = LATE[what]
    with started(tmp_path, *flag.format(tmp_path).split()) as (process, lines, said):
        assert said.wait(PATIENCE), lines
        while not any(words in line for line in lines):
            assert process.poll() is None
            time.sleep(0.1)
        assert ends(process, signal.SIGTERM, 60) == 130
        assert list((tmp_path / "run/checkpoints").glob("step_*")), lines


@pytest.mark.slow
def test_users_code_that_hangs_in_an_evaluation_is_named(tmp_path):
    flags = ("--config=configs/arithmetic.py", "--datasets=arithmetic", "--limit=20", FLOAT32,
             "--n_samples=0", "--workflow={}/hang.py:Blocks", "--output={}/out")  # fmt: skip
    command = (GO.replace("import main", "import evaluate as main"), *flags)
    with started(tmp_path, command=command) as (_, lines, said):
        assert said.wait(PATIENCE), lines
        assert "the loop of all rollouts is blocked at" in lines[-1]
        assert "# workflow" in lines[-1]
        (stacks,) = (tmp_path / "out").rglob("stacks.txt")
        assert "hang.py" in stacks.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", LATE)
def test_a_second_signal_ends_it_within_ten_seconds(what, tmp_path):
    flag, _ = LATE[what]
    with started(tmp_path, *flag.format(tmp_path).split()) as (process, lines, said):
        assert said.wait(PATIENCE), lines
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert ends(process, signal.SIGTERM, 12) == 130


@pytest.mark.slow
def test_calls_of_a_tool_that_hang_keep_nothing_else_waiting(tmp_path):
    """Neither what is published, though they had all threads, nor the end of the process."""
    flags = ("--config.total_steps=4", "--config.rollout.request_timeout_seconds=5")
    workflow = f"--config.rollout.workflow={tmp_path}/hang.py:Once"
    with started(tmp_path, workflow, *flags) as (process, lines, _):
        assert process.wait(PATIENCE) == 0, lines
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4
