"""Every file in configs/ is a run that could start, and every preset has one."""

import ast
import sys
from pathlib import Path

import jax
import pytest

from rlx.algorithms.presets import PRESETS
from rlx.cli import flags
from rlx.config import check
from rlx.model import hf
from rlx.model.model_config import ModelConfig
from rlx.run.inputs import prepare
from rlx.train.steps import Steps
from rlx.train.train_options import TrainOptions

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.py"))
RL = [row.name for row in PRESETS.values()
      if row.data == "rollouts" and row.kl_anchor == "reference"]  # fmt: skip
OTHERS = [name for name in PRESETS if name not in RL]
SMALL = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=32, num_layers=1, model_dim=8, mlp_dim=16, num_heads=2,
    num_kv_heads=1, head_dim=4,
)  # fmt: skip


def load(path):
    """The config as the command line would have it."""
    return flags.parse(["rlx.main", f"--config={path}"])[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_passes_every_check(path):
    config = load(path)
    check(config)
    steps = Steps(SMALL, TrainOptions.of(config))
    assert steps.algorithm.name == config.algorithm.preset
    assert (steps.critic_model is not None) == steps.algorithm.critic
    assert steps.learner.optimizer.init({"w": jax.numpy.zeros(2)})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_says_command_hardware_and_what_to_expect(path):
    first, rest = ast.get_docstring(ast.parse(path.read_text())).split("\n\n", 1)
    assert "\n" not in first
    assert f"--config=configs/{path.name}" in rest.splitlines()[0]
    assert [line.split(":")[0] for line in rest.splitlines() if line[:1].strip()] == [
        "Command",
        "Hardware",
        "Expect",
    ]


@pytest.mark.parametrize("name", RL)
def test_an_rl_preset_has_a_config_for_gsm8k(name):
    config = load(ROOT / "configs" / f"gsm8k_{name}.py")
    assert config.algorithm.preset == name
    assert config.data.train.startswith("openai/gsm8k")


@pytest.mark.parametrize("name", OTHERS)
def test_another_trainer_has_a_config_that_the_model_that_comes_with_rlx_can_run(name, monkeypatch):
    path = ROOT / "configs" / f"arithmetic_{name}.py"
    config = load(path)
    assert config.algorithm.preset == name
    if config.teacher.path:
        workdir = Path(config.teacher.path).parent
        made = f"--config=configs/arithmetic.py --workdir={workdir}"
        assert made in ast.get_docstring(ast.parse(path.read_text())), "how to make the teacher"
        config.teacher.path = config.model.path
    monkeypatch.setattr("rlx.run.inputs.TRAIN_PROBLEMS", 200)
    inputs = prepare(config)
    assert inputs.model_dir == hf.resolve("rlx:arithmetic")
    assert bool(inputs.held_out) == (inputs.algorithm.data != "rollouts")


def test_a_config_finds_its_neighbours_wherever_it_lies(tmp_path):
    place = tmp_path / "configs"
    place.mkdir()
    (place / "a_base.py").write_text(
        "from rlx.config import default\n\n\ndef get_config():\n    return default()\n"
    )
    (place / "a_run.py").write_text(
        "from configs import a_base\n\n\ndef get_config():\n    c = a_base.get_config()\n"
        "    c.seed = 7\n    return c\n"
    )
    before = list(sys.path)
    assert load(place / "a_run.py").seed == 7
    assert sys.path == before
