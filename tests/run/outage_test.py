"""All servers of a run are stopped for a while: it loses that time and nothing else."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from rlx.journal import journal
from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import FLOAT32, RLX_MAIN
from tests.run.kill_test import records

STEPS, PROMPTS, SECONDS = 10, 4, 8.0  # and seconds of the outage
PATIENCE = 300.0  # seconds, of a busy machine
COMMAND = [
    *RLX_MAIN, "--config=configs/arithmetic.py", f"--config.total_steps={STEPS}",
    f"--config.rollout.batch_prompts={PROMPTS}", "--config.sampling.n_samples=4",
    "--config.sampling.max_new_tokens=120", "--config.sampling.min_new_tokens=110",
    "--config.train.row_buckets=(256,)", "--config.fleet.num_servers=2",
    "--config.fleet.slots=8", "--config.fleet.hang_seconds=4", "--config.fleet.probe_seconds=0.2",
    "--config.rollout.outage_seconds=60",
    "--config.rollout.max_staleness=8", "--config.rollout.max_concurrent_rollouts=4",
    "--config.eval.num_questions=0", "--config.gate.enabled=False", "--config.observe.writers=()",
    "--config.observe.transcripts_per_step=64", FLOAT32,
]  # fmt: skip


def wait_for(condition, process, pause=0.05):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(pause)


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [600, 5])
def test_an_outage_of_all_servers_costs_its_own_time(timeout, tmp_path):
    """Requests wait for its end; where their time is up before, they are made once more."""
    workdir, log = tmp_path / "run", tmp_path / "log"
    flag = f"--config.rollout.request_timeout_seconds={timeout}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, flag, f"--workdir={workdir}"], stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    steps = lambda: len(records(workdir / "metrics.jsonl"))  # noqa: E731

    def groups_made() -> int:
        return sum(record.kind == "group" for record, _ in journal.read(workdir / "journal"))

    try:
        wait_for(lambda: groups_made() >= 2 * PROMPTS, process, pause=0.01)
        # Most prompts are still to come, so that four are under way: an outage when all answers
        # lie ready would meet none.
        children = psutil.Process(process.pid).children()
        servers = [child for child in children if "rlx.serve" in child.cmdline()]
        assert len(servers) == 2
        for server in servers:
            server.send_signal(signal.SIGSTOP)
        wait_for(lambda: "no rollout server alive, waiting up to 300 s" in log.read_text(), process)
        time.sleep(SECONDS)
        at = steps()
        for server in servers:
            server.send_signal(signal.SIGCONT)
        wait_for(lambda: steps() > min(at, STEPS - 1), process)
        assert [server.is_running() for server in servers] == [True] * 2 or steps() == STEPS
        assert process.wait(PATIENCE) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert at < STEPS
    found = records(workdir / "metrics.jsonl")
    assert [record["step"] for record in found] == [*range(1, STEPS + 1)]
    assert not (workdir / "skipped.jsonl").exists()
    assert (found[-1]["failed"] == 0) == (timeout == 600), "time is up, or not"
    told = log.read_text()
    assert "starting it again" not in told
    groups = [
        {record["group_id"] for record in read_jsonl(path)}
        for path in sorted((workdir / "rollouts").glob("*.jsonl"))
    ]
    trained = sorted(group for step in groups for group in step)
    assert len({*trained}) == len(trained) == STEPS * PROMPTS, "each prompt once"
