"""Runs replayed bit for bit: asynchronous and killed, SFT, LoRA; and what differs."""

import json
import os
import re
import signal
import subprocess
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.base import UserError
from rlx.config import default, leaves
from rlx.run import replay_run
from rlx.run.replay_run import Recorded
from rlx.run.room_options import as_json
from tests.fixtures.commands import RLX_MAIN, without_torch

SMALL = [
    "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=4",
    "--config.sampling.max_new_tokens=24", "--config.fleet.slots=8",
    "--config.eval.num_questions=0",
    "--config.observe.writers=()", "--config.gate.enabled=False",
    "--config.reward.name=reward_functions:length",
]  # fmt: skip
SAME = r"the metrics of (\d+) steps and the weights of (\d+) versions are bitwise those of the run"
SECONDS = 240
REWARDS = {**os.environ, "PYTHONPATH": f".:{Path(__file__).parents[1] / 'rewards'}"}


def train(workdir, name, *flags):
    command = [*RLX_MAIN, f"--config=configs/{name}.py", *SMALL, f"--workdir={workdir}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=REWARDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replay(place, *flags, status=0):
    command = [*without_torch("rlx.replay"), str(place), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def same(said):
    found = re.search(SAME, said)
    assert found, said
    return int(found[1]), int(found[2])


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    """A run of 8 steps with truncated draws, killed after step 5; its checkpoint after step 2."""
    workdir = tmp_path_factory.mktemp("replay") / "run"
    flags = (
        "--config.total_steps=8", "--config.optimizer.learning_rate=1e-4",
        "--config.sampling.top_p=0.8",
    )  # fmt: skip
    command = [*RLX_MAIN, "--config=configs/arithmetic.py", *SMALL, f"--workdir={workdir}", *flags]
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + SECONDS
    quiet = {"stdout": subprocess.DEVNULL, "env": REWARDS, "start_new_session": True}
    with subprocess.Popen(command, **quiet) as process:
        try:
            while not metrics.exists() or metrics.read_text().count("\n") < 5:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    before = [json.loads(line) for line in metrics.read_text().split("\n")[:5]]
    said = train(workdir, "arithmetic", *flags)
    assert re.search(r"resuming after step 2; repeated: \d+ steps.*the journal had \d+", said), said
    after = [json.loads(line) for line in metrics.read_text().splitlines()]
    for old, new in zip(before, after, strict=False):
        assert (old["actor_loss"], old["grad_norm"]) == (new["actor_loss"], new["grad_norm"])
    return workdir


@pytest.mark.slow
def test_an_asynchronous_run_is_replayed_over_its_kill(asynchronous, tmp_path):
    groups = [Recorded(asynchronous).groups(step)[0] for step in (1, 8)]
    assert all(t.kept.size for group in groups for t in group.trajectories), "masks are kept"
    assert same(replay(asynchronous)) == (8, 8)

    file = tmp_path / "steps.zip"
    assert "to replay it" in replay(asynchronous, "--from=8", f"--bundle={file}")
    said = replay(file)
    begin = re.search(r"replaying steps (\d) to 8 from .*checkpoints/step_0000000", said)
    assert same(said) == (9 - int(begin[1]), 9 - int(begin[1])), said
    with zipfile.ZipFile(file) as packed:
        begin = packed.getinfo("metrics.jsonl").header_offset + 60
    data = bytearray(file.read_bytes())
    data[begin] ^= 1
    file.write_bytes(data)
    assert "nor a whole bundle" in replay(file, status=2)


@pytest.mark.slow
def test_another_loss_on_the_same_data_names_step_and_tensor(asynchronous, tmp_path):
    out = tmp_path / "out"
    # Where the policy is still the one that sampled, losses have equal gradients.
    other = "--config.algorithm.loss=sapo", "--config.optimizer.learning_rate=0.01"
    said = replay(asynchronous, *other, f"--out={out}")
    assert re.search(r"step 1 differs: .*first tensor that differs is model\.", said), said
    assert "8 of 8 steps differ" in said
    assert "algorithm.loss is sapo" in said
    assert "optimizer.learning_rate is 0.01" in said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert (out / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_adapters_are_replayed(tmp_path):
    workdir = tmp_path / "run"
    train(workdir, "arithmetic_lora", "--config.total_steps=3", "--config.lora.rank=2")
    assert same(replay(workdir)) == (3, 3)


def test_a_run_without_a_journal_and_steps_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(UserError, match="without a complete batch; give the --workdir"):
        Recorded(tmp_path)
    (tmp_path / "file").write_bytes(b"PK nothing")
    with (
        pytest.raises(UserError, match="nor a whole bundle"),
        replay_run.open_run(tmp_path / "file"),
    ):
        pass
    with pytest.raises(UserError, match=r"there is no .*nowhere; give"):
        replay_run.open_run(tmp_path / "nowhere").__enter__()


@pytest.mark.parametrize(("first", "last"), [(6, 0), (4, 3)])
def test_steps_that_none_compares_are_refused(tmp_path, first, last):
    """They were reported as bitwise those of the run: all 0 of them."""
    batches = SimpleNamespace(groups={step: [] for step in range(5)})
    run = SimpleNamespace(metrics=dict.fromkeys(range(1, 6)), batches=batches, workdir=tmp_path)
    assert replay_run.plan(run, 3, 4)[1:] == (0, 3, 4)
    with pytest.raises(UserError, match=f"cannot replay steps {first} to {last or 5}: the journal"):
        replay_run.plan(run, first, last)


def test_settings_come_back_from_json():
    config = default()
    config.lora.targets = ("q", "up")
    config.rollout.workflow_kwargs = {"max_turns": 2}
    config.algorithm.clip_low = 0.1
    assert dict(leaves(replay_run.config_of(as_json(config)))) == dict(leaves(config))
