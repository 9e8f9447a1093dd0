"""Two processes are one run: equal to one device, through deaths too, with either trainer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import RLX_MAIN, ended, with_devices

pytestmark = pytest.mark.slow

STEPS = 6
COMMAND = [
    "--config=configs/arithmetic.py", "--traceback",
    f"--config.total_steps={STEPS}", "--config.rollout.max_staleness=0",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4", "--config.fleet.slots=16",
    "--config.sampling.max_new_tokens=48", "--config.eval.num_questions=0",
    "--config.optimizer.learning_rate=1e-4", "--config.observe.writers=()",
    "--config.checkpoint.first_step=1", "--config.checkpoint.every_steps=2",
    "--config.model.compute_dtype=float32",
]  # fmt: skip
FOLLOWS = "--config.cluster.process=1"
SECONDS = 600.0  # two processes compile on two cores that do something else, too
SAME = ("actor_loss", "grad_norm", "entropy", "task_reward", "n_tokens", "n_valid_tokens",
        "learning_rate")  # fmt: skip


def start(workdir, log, *flags, devices=4):
    """A process of a run, in a process group of its own; both its outputs go to `log`."""
    torch = "--config.trainer=torch" in flags
    program = [sys.executable, "-m", "rlx.main"] if torch else RLX_MAIN
    with open(log, "w") as file:
        return subprocess.Popen(
            [*program, *COMMAND, f"--workdir={workdir}", *flags], stdout=file, stderr=file,
            start_new_session=True, env=with_devices(devices),
        )  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    """cluster(flags, flags of process 1) → two processes with logs tmp_path/0 and tmp_path/1."""
    started = []

    def make(*flags, second=(), workdir=tmp_path / "run", by_itself=False):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        own = [
            f"--config.cluster.coordinator={address}", "--config.cluster.processes=2",
            "--config.cluster.join_seconds=300", *flags,
        ]  # fmt: skip
        if by_itself:
            pair = [start(workdir, tmp_path / "0", *flags, "--config.cluster.processes=2")]
            started.extend(pair)
            return pair
        pair = [
            start(workdir, tmp_path / "0", *own, "--config.cluster.process=0"),
            start(workdir, tmp_path / "1", *own, *second, "--config.cluster.process=1"),
        ]
        started.extend(pair)
        return pair

    yield make
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def records(workdir):
    return list(read_jsonl(workdir / "metrics.jsonl"))  # which skips a line that is half there


def wait_for_step(workdir, step, processes):
    deadline = time.monotonic() + SECONDS
    while len(records(workdir)) < step:
        assert all(process.poll() is None for process in processes), "it ended by itself"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def last_line(path):
    return path.read_text().strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("trainer", "devices"), [("jax", 8), pytest.param("torch", 2, marks=pytest.mark.torch)]
)
def test_two_processes_equal_one_and_go_on_after_the_death_of_either(
    trainer, devices, cluster, tmp_path
):
    run, alone = tmp_path / "run", tmp_path / "alone"
    cluster = partial(cluster, f"--config.trainer={trainer}")
    reference = start(alone, tmp_path / "reference", f"--config.trainer={trainer}", devices=1)
    assert reference.wait(SECONDS) == 0, (tmp_path / "reference").read_text()

    by_itself = trainer == "torch"  # by one command
    soon = ["--config.cluster.timeout_seconds=20"] if by_itself else []
    pair = cluster(*soon, by_itself=by_itself)
    wait_for_step(run, 2, pair)
    pids = [p.pid for p in psutil.Process(pair[0].pid).children() if FOLLOWS in p.cmdline()]
    if by_itself:
        os.kill(pids[0], signal.SIGSTOP)
    else:
        os.killpg(pair[1].pid, signal.SIGKILL)
    assert pair[0].wait(120) == 2
    assert all(ended(pid) for pid in pids)
    assert last_line(tmp_path / "0").startswith("error: process 1 of 2 on ")
    assert "run the same command again" in last_line(tmp_path / "0")

    pair = cluster()
    wait_for_step(run, 4, pair)
    os.kill(pair[0].pid, signal.SIGKILL)
    assert pair[1].wait(60) == 2
    assert last_line(tmp_path / "1").startswith("error: process 0 of 2 on ")

    pair = cluster(by_itself=by_itself)
    assert not any(process.wait(SECONDS) for process in pair), (tmp_path / "0").read_text()
    assert "resuming after step" in (tmp_path / "0").read_text()
    used = json.loads((run / "environment.json").read_text())["devices"]
    assert used.startswith(f"{devices} × ")

    ours = {record["step"]: record for record in records(run)}
    assert sorted(ours) == list(range(1, STEPS + 1))
    for record in records(alone):
        for name in SAME:
            np.testing.assert_allclose(
                ours[record["step"]][name], record[name], rtol=2e-5, atol=1e-6,
                err_msg=f"{name} of step {record['step']}",
            )  # fmt: skip
    exported, wanted = (load_file(path / "hf" / "model.safetensors") for path in (run, alone))
    assert exported.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(exported[name], tensor, atol=2e-5, err_msg=name)


def test_processes_of_two_minds_are_refused_in_one_line_before_anything_is_made(cluster, tmp_path):
    pair = cluster(second=["--config.seed=7"])
    assert [process.wait(SECONDS) for process in pair] == [2, 2]
    for log in ("0", "1"):
        line = last_line(tmp_path / log)
        assert line.startswith("error: process 1 of 2 on ")
        assert "belongs to another run: config.seed: 7 there, 0 on process 0; start each" in line
    assert not (tmp_path / "run").exists()
