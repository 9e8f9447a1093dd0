"""A run whose step takes longer than the time that it has ends in time, and loses no group."""

import signal
import subprocess
import time

import psutil
import pytest

from rlx.cli.command import INTERRUPTED
from rlx.journal import journal
from tests.fixtures.commands import ended
from tests.run.kill_test import COMMAND, records

LAST = 3  # the step that takes for ever
SLOW = f"""
import time
from rlx.train.update import JaxUpdate
quick = JaxUpdate.update
def update(self, state, groups):
    update.steps += 1
    if update.steps == {LAST}:
        time.sleep(3600)
    return quick(self, state, groups)
update.steps, JaxUpdate.update = 0, update
"""
GRACE = 12  # of which a quarter is for others


def command(workdir, program=""):
    python, flag, main, *rest = COMMAND
    assert flag == "-c"
    return [
        python, flag, program + main, *rest, f"--workdir={workdir}", "--config.total_steps=5",
        "--config.checkpoint.every_steps=0", "--config.checkpoint.first_step=1",
        "--config.reward.name=tests/rewards/reward_functions.py:length",
        f"--config.scheduler.grace_seconds={GRACE}",
    ]  # fmt: skip


def taken(workdir, event):
    """Step → what was recorded of it."""
    found = [record.fields for record, _ in journal.read(workdir / "journal")]
    return [fields["groups"] for fields in found if fields.keys() >= {"step", "groups"}][event:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_long_step_is_given_up_and_its_groups_are_kept(tmp_path, number):
    workdir = tmp_path / "one"
    run = subprocess.Popen(
        command(workdir, SLOW), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 240
    try:
        while not (workdir / "journal").exists() or len(taken(workdir, 0)) < LAST:
            assert time.monotonic() < deadline
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.2)
        time.sleep(1.0)
        servers = psutil.Process(run.pid).children(recursive=True)
        begun = time.monotonic()
        run.send_signal(number)
        out, _ = run.communicate(timeout=GRACE + 20)
    finally:
        run.kill()
    took = time.monotonic() - begun
    assert run.returncode == INTERRUPTED, out
    assert GRACE * 3 / 4 <= took < GRACE + 2  # a loaded machine has two more
    assert "ending with the checkpoint of step 1 and the journal" in out
    assert all(ended(process) for process in servers)
    before = taken(workdir, 0)
    again = subprocess.run(command(workdir), capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming after step 1" in again.stdout + again.stderr
    assert taken(workdir, 0)[LAST : 2 * LAST - 1] == before[1:LAST]  # the same batches again
    assert len(records(workdir / "metrics.jsonl")) == 5
    assert [r["ended"] for r in records(workdir / "starts.jsonl") if "ended" in r] == [
        "stopped", "finished"
    ]  # fmt: skip
