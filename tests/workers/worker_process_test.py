"""Rewards and agents leave nothing behind, and cannot have more than they may."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rlx.agents.agent_options import AgentOptions
from rlx.agents.workflow import run_agent, worker_kind
from rlx.doctor import packages
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.workers import worker_process
from rlx.workers.worker_pool import WorkerPool
from rlx.workers.worker_process import WorkerLimits
from tests.fixtures.commands import ended

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def importable_by_workers():
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def left(marker):
    """The worker and the processes that it left behind; None before all are there."""
    found = marker.read_text().split() if marker.exists() else []
    return [int(pid) for pid in found] if len(found) == 8 else None


def gone(marker):
    """Waits until nothing of it runs, and ends it otherwise."""
    pids = left(marker)
    assert pids
    late = [pid for pid in pids if not ended(pid, 20.0)]
    for pid in late:
        os.kill(pid, signal.SIGKILL)
    assert not late


class Rewards:
    """A pool whose worker does as it is told, with one interface for both kinds of worker."""

    def __init__(self, timeout=600.0):
        self.pool = RewardPool("worker_code:leaving", timeout=timeout)

    async def run(self, how, marker):
        row = {"marker": str(marker), "answer": ""}
        return (await self.pool.grade([RewardCall("", how, [], [], row)])).rewards[0]

    async def close(self):
        self.pool.close()


class Agents:
    """The same of an agent's process."""

    def __init__(self, timeout=600.0):
        kind = worker_kind("worker_code:Leaving", {}, AgentOptions(block_seconds=timeout))
        self.workers = WorkerPool(kind, 1)

    async def run(self, how, marker):
        return await run_agent(self.workers, {"how": how, "marker": str(marker)}, "", "")

    async def close(self):
        await self.workers.close()


KINDS = pytest.mark.parametrize("kind", [Rewards, Agents])


@KINDS
def test_what_is_left_behind_ends_with_the_worker(kind, tmp_path):
    async def main():
        own = kind()
        try:
            assert await own.run("return", tmp_path / "pids") == 1.0
            assert all(map(psutil.pid_exists, left(tmp_path / "pids")))
        finally:
            await own.close()

    asyncio.run(main())
    gone(tmp_path / "pids")


@KINDS
def test_what_is_left_behind_ends_with_a_worker_that_is_killed(kind, tmp_path):
    async def main():
        own = kind()
        try:
            await own.run("return", tmp_path / "pids")
            os.kill(left(tmp_path / "pids")[0], signal.SIGKILL)
            await asyncio.to_thread(gone, tmp_path / "pids")
        finally:
            await own.close()

    asyncio.run(main())


@KINDS
def test_what_is_left_behind_ends_with_a_worker_that_hangs(kind, tmp_path):
    async def main():
        own = kind(timeout=3.0)
        try:
            if kind is Rewards:  # agents that hold the interpreter's lock say nothing: closed below
                with pytest.raises(RewardError, match="was killed after 3 s"):
                    await own.run("hang", tmp_path / "pids")
            else:
                run = asyncio.create_task(own.run("hang", tmp_path / "pids"))
                await asyncio.to_thread(wait_until, lambda: left(tmp_path / "pids"))
                run.cancel()
        finally:
            await own.close()

    asyncio.run(main())
    gone(tmp_path / "pids")


TRAINER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from worker_process_test import {kind}
asyncio.run({kind}().run("hang", Path({marker!r})))
"""


@KINDS
def test_what_is_left_behind_ends_with_a_trainer_that_is_killed(kind, tmp_path):
    marker = tmp_path / "pids"
    text = TRAINER.format(here=str(HERE), kind=kind.__name__, marker=str(marker))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with subprocess.Popen([sys.executable, "-c", text], env=environment) as trainer:
        try:
            wait_until(lambda: left(marker) or trainer.poll() is not None)
        finally:
            trainer.kill()
    gone(marker)


def test_one_hang_costs_one_timeout_and_computes_nothing_twice(tmp_path):
    marker = tmp_path / "calls"
    row = {"marker": str(marker), "answer": ""}
    with closing(RewardPool("worker_code:hanging", timeout=1.0)) as pool:
        calls = [RewardCall("", text, [], [], row) for text in ("a", "b", "hang", "c")]
        with pytest.raises(RewardError, match=r"killed after 1 s.*completion 2 "):
            pool.compute(calls)
        assert marker.read_text().split() == ["a", "b", "hang"]
        assert pool.compute(calls[:2]).rewards == [1.0, 1.0]


def test_limits_of_memory_and_processes_are_told_as_what_they_are():
    limits = WorkerLimits(memory_gb=1.0, max_processes=8)
    with closing(RewardPool("worker_code:greedy", timeout=60.0, limits=limits)) as pool:
        with pytest.raises(RewardError, match="MemoryError"):
            pool.compute([RewardCall("", "memory", [], [], {"answer": ""})])
        with pytest.raises(RewardError, match="more than max_processes=8"):
            pool.compute([RewardCall("", "processes", [], [], {"answer": ""})])


def test_an_import_that_leaves_a_process_behind_holds_nobody_up(tmp_path, monkeypatch):
    marker = tmp_path / "pid"
    (tmp_path / "starts_one.py").write_text(
        f"import os, time\nif not os.fork():\n    os.setsid()\n"
        f"    open({str(marker)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
        f"while not os.path.exists({str(marker)!r}):\n    time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert packages.imports(["starts_one", "json"], seconds=30) == {"starts_one": "", "json": ""}
    assert ended(int(marker.read_text()), 30.0)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A trainer with secrets in its environment and an open, inheritable file."""
    monkeypatch.setenv("RLX_FLEET_TOKEN", "planted-token")
    monkeypatch.setenv("A_SECRET", "planted-secret")
    with open(tmp_path / "planted", "w") as file:
        os.set_inheritable(file.fileno(), True)
        yield


def test_a_reward_sees_nothing_of_the_trainer(planted):
    with closing(RewardPool("worker_code:spying", timeout=60.0)) as pool:
        call = RewardCall("", "", [], [], {"answer": "", "trainer": os.getpid()})
        assert pool.compute([call]).rewards == [1.0]


def test_an_agent_sees_nothing_of_the_trainer_and_alone_nothing_of_other_runs(planted, tmp_path):
    async def main(per_run):
        place = tmp_path / str(per_run)
        place.mkdir()
        kind = worker_kind(f"{HERE / 'worker_code.py'}:Spying", {}, AgentOptions())
        own = WorkerPool(kind, 2 if per_run else 1, single_job=per_run)
        data = {"trainer": os.getpid(), "marker": str(place / "ready")}
        try:
            await own.start()
            rows = ({**data, "wait": wait} for wait in (0.0, 2.0))
            runs = (run_agent(own, row, "", f"key-{row['wait']:.1f}") for row in rows)
            return await asyncio.gather(*runs, return_exceptions=True)
        finally:
            await own.close()

    assert asyncio.run(main(True)) == [1.0, 1.0]
    first, second = asyncio.run(main(False))  # as docs/security.md says of shared processes
    assert "found the keys {'key-2.0'" in str(first)
    assert second == 1.0


def test_variables_that_a_config_names_are_passed_on(monkeypatch):
    monkeypatch.setenv("A_SECRET", "planted")
    assert "A_SECRET" not in worker_process.environment()
    assert worker_process.environment(("A_SECRET",))["A_SECRET"] == "planted"


def test_a_process_that_is_cancelled_while_it_ends_leaves_no_socket_open(tmp_path):
    def sockets():
        return [fd for fd in Path("/proc/self/fd").iterdir() if "socket" in str(fd.resolve())]

    async def main():
        own, before = Agents(), len(sockets())
        await own.run("return", tmp_path / "pids")
        for _ in range(2):  # while it is waited for, and while it is ended
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
        await own.close()
        assert len(sockets()) == before

    asyncio.run(main())
    gone(tmp_path / "pids")
