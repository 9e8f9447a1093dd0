"""A run is a job of a real Slurm: it ends as on one machine, through lost nodes and hours too."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.base import UserError
from rlx.run import slurm_run
from rlx.system.jsonl import read_json, read_jsonl
from tests.fixtures.commands import path_without_torch
from tests.run.run_grid_test import FAST
from tests.run.trainer_metrics_test import free_ports, page

pytestmark = pytest.mark.slurm

STEPS, SECONDS = 8, 300.0
COMMAND = [
    sys.executable, "-m", "rlx.main", "--config=configs/arithmetic.py",
    "--config.scheduler.type=slurm",
    f"--config.total_steps={STEPS}", "--config.rollout.max_staleness=0",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4", "--config.fleet.slots=16",
    "--config.sampling.max_new_tokens=48", "--config.eval.num_questions=0",
    "--config.optimizer.learning_rate=1e-4", "--config.observe.writers=()",
    "--config.checkpoint.first_step=1", "--config.checkpoint.every_steps=1",
    "--config.model.compute_dtype=float32",
]  # fmt: skip
PAIR = ["--config.cluster.processes=2", "--config.fleet.num_servers=2"]
SAME = ("actor_loss", "grad_norm", "entropy", "task_reward", "n_tokens", "n_valid_tokens",
        "learning_rate")  # fmt: skip


@pytest.fixture
def start(slurm, tmp_path):
    """start(workdir, *flags) → rlx.main that submits and follows; its output is in `said`."""
    started = []

    def make(workdir, *flags):
        with open(tmp_path / "said", "w") as out:
            process = subprocess.Popen(
                [*COMMAND, f"--workdir={workdir}", *flags], stdout=out, stderr=out,
                stdin=subprocess.DEVNULL,
                env={**slurm.environment, "PYTHONPATH": path_without_torch()},
            )  # fmt: skip
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()
        process.wait()
    slurm.ask("scancel", "--user=root")
    slurm.wait(lambda: not slurm.ask("squeue", "--noheader") and not slurm.steps())


@pytest.fixture
def said(tmp_path):
    return (tmp_path / "said").read_text


def records(workdir):
    return list(read_jsonl(workdir / "metrics.jsonl"))


def listed(workdir):
    return json.loads((workdir / "prometheus.json").read_text())


def wait_for_step(slurm, process, workdir, step):
    def there():
        assert process.poll() is None, f"it ended by itself in {workdir}"
        return len(records(workdir)) >= step

    slurm.wait(there, SECONDS)


def test_trainer_and_servers_of_all_hosts_are_listed_and_answer(slurm, start, said, tmp_path):
    run, port = tmp_path / "run", free_ports(3)
    flags = (f"--config.observe.metrics_port={port}", "--config.scheduler.nodes=3")
    process = start(run, *PAIR, *flags)
    wait_for_step(slurm, process, run, 1)
    (trainer,) = (each for each in listed(run) if each["labels"]["role"] == "trainer")
    (at,) = trainer["targets"]
    assert "rlx_servers 2.0" in page(at), "which brings the list up to date"
    found = {each["targets"][0]: each["labels"]["role"] for each in listed(run)}
    roles = ("trainer", "server", "server")  # all nodes of this Slurm have one address
    assert list(found.items()) == [(f"127.0.0.1:{port + i}", roles[i]) for i in range(3)]
    for address in list(found)[1:]:
        assert "rlx_engine_alive 1.0" in page(address)
    assert process.wait(SECONDS) == 0, said()
    assert listed(run) == []


def test_a_run_that_loses_a_node_equals_one_that_is_left_alone(slurm, start, said, tmp_path):
    alone, run = tmp_path / "alone", tmp_path / "run"
    reference = start(alone, *PAIR, "--config.scheduler.nodes=3")
    assert reference.wait(SECONDS) == 0, said()
    assert "node2: server 0: CPU; server 1: CPU" in said()
    assert "is COMPLETED" in said()
    slurm.wait(lambda: not slurm.steps())  # a busy machine ends them a moment later

    process = start(run, *PAIR, "--config.scheduler.nodes=2")
    wait_for_step(slurm, process, run, 2)  # the first one is saved then
    slurm.kill("n1")
    try:
        assert process.wait(SECONDS) == 0, said()
    finally:
        slurm.revive("n1")
    # Slurm notices first, and puts the job back, or we do, as trainer 0 ends, and submit it again.
    assert re.search("is back in Slurm's queue|resuming from the last checkpoint", said())
    assert " is RUNNING on n[0,2]" in said()
    assert "resuming after step" in said()
    ours = {record["step"]: record for record in records(run)}
    assert sorted(ours) == list(range(1, STEPS + 1))
    for record in records(alone):
        for name in SAME:
            np.testing.assert_allclose(
                ours[record["step"]][name], record[name], rtol=2e-5, atol=1e-6,
                err_msg=f"{name} of step {record['step']}",
            )  # fmt: skip


def test_a_run_is_put_back_and_started_again_and_ctrl_c_saves_and_leaves_no_process(
    slurm, start, said, tmp_path
):
    run = tmp_path / "run"
    process = start(run, "--config.total_steps=1000")

    def goes_on(attempt):
        log = run / "slurm" / attempt / "trainer-0.log"
        assert process.poll() is None, said()
        return log.exists() and "resuming after step" in log.read_text()

    wait_for_step(slurm, process, run, 1)
    job = read_json(run / "slurm" / "job.json")["job"]
    slurm.ask("scancel", "--batch", "--signal=TERM", job)  # as when its time is nearly up
    slurm.wait(lambda: goes_on("attempt-1.1"), SECONDS)
    assert "is back in Slurm's queue; resuming from the last checkpoint" in said()
    pid = run / "slurm" / "attempt-1.1" / "trainer-0.pid"
    os.kill(int(pid.read_text()), signal.SIGKILL)
    slurm.wait(lambda: goes_on("attempt-2"), SECONDS)
    assert "resuming from the last checkpoint (retry 1 of 3)" in said()
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130, said()
    assert "was cancelled after step" in said()
    assert list((run / "checkpoints").iterdir())
    assert slurm.ask("squeue", "--noheader") == ""
    assert slurm.steps() == []


def test_each_run_of_a_sweep_is_a_job(slurm, tmp_path):
    command = [
        sys.executable, "-m", "rlx.sweep", *FAST, "--config.scheduler.type=slurm",
        "--config.total_steps=2", "seed=0,1", "--jobs=2", f"--workdir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    environment = {**slurm.environment, "PYTHONPATH": path_without_torch()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [
        read_json(tmp_path / "sweep" / f"seed={n}" / "slurm" / "job.json")["job"] for n in (0, 1)
    ]
    assert len({*jobs}) == 2
    assert [len(records(tmp_path / "sweep" / f"seed={n}")) for n in (0, 1)] == [2, 2]
    assert (tmp_path / "sweep" / "comparison.html").exists()


def test_agents_run_there_beside_the_trainer(slurm, start, said, tmp_path):
    agents = Path(__file__).parents[1] / "agents/agent_classes.py"
    process = start(
        tmp_path / "run", "--config.total_steps=2", "--config.scheduler.nodes=2",
        f"--config.rollout.workflow={agents}:Repeat",
        '--config.rollout.workflow_kwargs={"turns": 2}',
    )  # fmt: skip
    assert process.wait(SECONDS) == 0, said()
    assert [record["dropped"] for record in records(tmp_path / "run")] == [0, 0]


def test_what_cannot_run_there_is_one_line_and_leaves_nothing(slurm, start, said, tmp_path):
    for flags, status, wanted in (
        (["--config.scheduler.partition=gpus"], 2,
         "error: Slurm refuses the job: invalid partition specified: gpus"),
        (["--config.scheduler.gpus_per_node=3", "--config.scheduler.nodes=2"], 2,
         "lower scheduler.nodes or gpus_per_node"),
        (["--config.scheduler.nodes=4"], 2, "lower scheduler.nodes"),
        (["--config.scheduler.nodes=3", f"--workdir={slurm.hidden}/run"], 2,
         "✗ n2: shared: "),
        (["--config.scheduler.nodelist=n2", f"--workdir={slurm.hidden}/run"], 2,
         "its first node (n2) cannot see "),
    ):  # fmt: skip
        assert start(tmp_path / "run", *flags).wait(SECONDS) == status, said()
        last = said().strip().splitlines()[-1]
        assert last.startswith("error: "), said()
        assert wanted in last
        assert slurm.ask("squeue", "--noheader") == ""
        assert slurm.steps() == []


def test_a_user_may_leave_a_job_running_and_slurm_may_put_it_back(slurm, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    number = slurm.ask("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 600")
    followed = slurm_run._JobMonitor(number, slurm.directory, ask=lambda text: "l")
    followed._asked = True
    assert followed.follow() is None
    slurm.wait(lambda: slurm.ask("squeue", "-h", "-j", number, "-o", "%T") == "RUNNING")
    assert not followed.cancelled
    slurm.ask("scancel", number)
    assert slurm_run._JobMonitor(number, slurm.directory).follow().state == "CANCELLED"
    assert f"job {number} is CANCELLED" in capsys.readouterr().out
    with pytest.raises(UserError, match="does not know job 999999"):
        slurm_run._JobMonitor("999999", slurm.directory).follow()
