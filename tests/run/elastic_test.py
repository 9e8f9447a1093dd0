"""A run whose fleet grows and shrinks: real servers join it, one is killed, one drains."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.run.kill_test import COMMAND, history, left_over, records

SECONDS = 120.0


def until(condition, process: subprocess.Popen):
    """The first true value of `condition()`, while the run goes on."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


@pytest.fixture
def environment(tmp_path):
    """Of the run and its servers: one token."""
    run = tmp_path / "run" / "run"
    return {**os.environ, "RLX_FLEET_TOKEN": "one for all", "RLX_TEST_RUN": str(run)}


@pytest.fixture
def joined(tmp_path, environment):
    """joined() → two server processes that have joined tmp_path/servers, with their addresses."""
    started = []

    def start():
        command = [
            sys.executable, "-m", "rlx.serve", "--model=rlx:arithmetic", "--slots=8",
            "--max-model-len=96", f"--join={tmp_path / 'servers'}", f"--parent-pid={os.getpid()}",
        ]  # fmt: skip
        started.extend(
            subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)
        )
        return {
            f"127.0.0.1:{json.loads(server.stdout.readline())['port']}": server
            for server in started
        }

    yield start
    for server in started:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_servers_join_a_run_with_one_of_its_own_and_leave_and_nothing_is_lost(
    tmp_path, environment, joined
):
    run = tmp_path / "run" / "run"
    run.parent.mkdir()
    process = subprocess.Popen(
        [*COMMAND, f"--workdir={run}", "--config.reward.name=arithmetic",
         f"--config.fleet.join={tmp_path / 'servers'}",
         "--config.gate.every_steps=0", "--config.fleet.hang_seconds=60",
         "--config.total_steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip

    def steps():
        return len(records(run / "metrics.jsonl"))

    def further(count):
        now = steps()
        until(lambda: steps() >= now + count, process)

    def checked():
        return [set(check["servers"]) for check in records(run / "gate.jsonl")]

    try:
        until(steps, process)  # with its own server, which it does not share the directory with
        (own,) = checked()[0]
        servers = joined()
        (killed, first), (drained, second) = servers.items()
        until(lambda: set().union(*checked()) == {own, killed, drained}, process)
        further(2)
        first.kill()
        further(2)
        second.send_signal(signal.SIGTERM)
        assert second.wait(SECONDS) == 0
        further(2)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130, out
    assert all(check["ok"] for check in records(run / "gate.jsonl"))
    assert f"rollout server {killed} is lost" in out
    assert f"rollout server {drained} is removed" in out
    assert f"rollout server {drained} is lost" not in out
    assert os.listdir(tmp_path / "servers") == [killed]  # which nobody could remove
    assert list(history(run, steps(), max_staleness=2)) == []
    assert left_over(run) == []
