"""A LoRA run as a user starts it: small checkpoints, adapters published, both exports, resumed."""

import json
import subprocess

import jax
import numpy as np
import pytest

from rlx.fleet.adapter import digest
from rlx.model import hf, lora, peft
from rlx.model.lora_config import LoraConfig
from rlx.run import checkpoint_tensors
from rlx.train import checkpoint
from tests.fixtures.commands import RLX_MAIN

pytestmark = pytest.mark.slow
COMMAND = [
    *RLX_MAIN, "--config=configs/arithmetic_lora.py",
    "--config.rollout.batch_prompts=4", "--config.fleet.slots=16", "--config.eval.num_questions=0",
    "--config.gate.every_steps=1", "--config.lora.rank=2", "--config.lora.targets=('q_proj', 'up')",
    "--config.model.compute_dtype=float32",
]  # fmt: skip


def run(workdir, *flags):
    command = [*COMMAND, f"--workdir={workdir}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, and then of a third one."""
    workdir = tmp_path_factory.mktemp("lora")
    for steps in (2, 3):
        done = run(workdir, f"--config.total_steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 2" in done.stdout
    return workdir


def test_servers_had_the_trainers_policy_by_adapter(finished):
    """The gate compares them after each publish, that of the resumed run's start included."""
    gate = [json.loads(line) for line in (finished / "gate.jsonl").read_text().splitlines()]
    assert [record["step"] for record in gate] == [0, 1, 2]
    assert all(record["ok"] for record in gate)
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps] == [1, 2, 3]
    whole = (finished / "hf" / hf.WEIGHTS).stat().st_size
    assert 0 < steps[1]["publish_bytes"] < 0.05 * whole, "of what step 1 published"


def test_the_exports_are_the_checkpoints_adapters(finished):
    base = hf.resolve("rlx:arithmetic")
    config, params = hf.load(base)
    settings, adapters = peft.load(finished / "adapter", config)
    assert settings == LoraConfig(2, 32.0, ("q", "up"))
    path = checkpoint.find(finished)
    saved = peft.from_peft(checkpoint_tensors.adapters_of(path, config, settings), config, settings)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, adapters, saved)))
    assert np.abs(saved["layers"]["q_lora_b"]).max() > 0
    merged = hf.load(finished / "hf")[1]
    wanted = lora.merge(params, adapters, settings)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, merged, wanted)))
    state = sum(f.stat().st_size for f in (path / "state").rglob("*") if f.is_file())
    assert state < 12 * lora.count(config, settings) + 100_000 < 2_000_000


def test_adapters_do_not_go_on_with_another_base(finished, tmp_path):
    base = hf.resolve("rlx:arithmetic")
    config, params = hf.load(base)
    other = tmp_path / "other"
    hf.save(other, config, jax.tree.map(lambda leaf: leaf * 1.01, params), source=base)
    done = run(finished, "--config.total_steps=4", f"--config.model.path={other}")
    assert done.returncode == 2
    assert f"belong to base {digest(base).hex()[:12]}" in done.stderr
    assert done.stderr.startswith("error: the checkpoint's adapters")


def test_what_cannot_be_is_one_line(tmp_path, refused):
    for flag, words in (
        ("--config.lora.targets=('gates',)", "unknown lora.targets entry 'gates'"),
        ("--config.lora.rank=0", "fleet.publish=adapter needs adapters"),
        ("--config.reference.mode=ema", "reference.mode=ema does not go with lora.rank"),
        ("--config.algorithm.preset=ppo", "lora.rank=0"),
    ):
        assert words in refused(*COMMAND[3:], f"--workdir={tmp_path / 'none'}", flag)
