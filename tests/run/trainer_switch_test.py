"""A run changes its trainer in the middle: nothing of its state is lost on the way, or back."""

import io
import json
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx.base import UserError
from rlx.config import LORA_TARGETS, default
from rlx.model import hf
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.run import export, trainer_switch
from rlx.run.jax_trainer import _JaxUpdate
from rlx.run.room_options import as_json
from rlx.train import checkpoint
from rlx_torch import torch_checkpoint
from rlx_torch.torch_checkpoint import TorchCheckpoint
from rlx_torch.update import TorchUpdate
from tests.rlx_torch.update_test import CASES, groups, options, weights

ADAM = {"optimizer.name": "adamw", "optimizer.eps": 1e-3, "optimizer.learning_rate": 0.01}


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_the_same_directory_is_made_of_either_trainers_checkpoint(dtype, tiny_model_dir, tmp_path):
    made = []
    for trainer in trainers(tiny_model_dir):
        name = trainer.__class__.__name__
        path = saved(trainer, trainer.init(), tmp_path / name, 1)
        host = {"model": trainer.model.to_hf(), "config": {"trainer": name}}
        (path / "host.json").write_text(json.dumps(host))
        export.checkpoint_to_hf(path, tmp_path / f"{name}-hf", str(tiny_model_dir), dtype)
        made.append(tmp_path / f"{name}-hf")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes()
    if not dtype:
        want, found = (load_file(d / "model.safetensors") for d in (tiny_model_dir, made[0]))
        assert want.keys() == found.keys()
        assert all(np.array_equal(want[name], found[name]) for name in want)


def trainers(directory, preset="grpo", **more):
    own = options(preset, **{**CASES[preset], **ADAM, **more})
    model = hf.load_config(directory)
    source = lambda _: hf.load(directory)[1]  # noqa: E731
    return TorchUpdate(model, own, directory), _JaxUpdate(model, own, source=source)


def saved(trainer, state, directory, step):
    size = trainer.state_bytes
    save = lambda path: trainer.save(path, state)  # noqa: E731
    return checkpoint.begin(directory, step, save, size, {}, keep=9)()


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("grpo", {}),
        ("grpo", {"optimizer.name": "lion", "optimizer.learning_rate": 1e-6}),
        pytest.param("ppo", {}, marks=pytest.mark.slow),
    ],
)
def test_a_state_goes_to_the_other_trainer_and_back_bit_for_bit(
    preset, more, tiny_model_dir, tmp_path
):
    goes_and_comes_back(tiny_model_dir, preset, more, tmp_path)


def saved_model(directory, architecture, **more):
    config = ModelConfig(
        architecture, vocab_size=128, num_layers=2, model_dim=32, mlp_dim=48, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=256, pad_token_id=0, bos_token_id=1,
        eos_token_ids=(2,), **more,
    )  # fmt: skip
    hf.save(directory, config, parameters.init(config, jax.random.key(0)))
    return directory


def test_matrices_that_the_file_joins_go_to_the_other_trainer_and_back(tmp_path):
    path = saved_model(tmp_path / "phi3", "Phi3ForCausalLM", fused=True, windows=(6, 6))
    goes_and_comes_back(path, "grpo", {}, tmp_path)


def goes_and_comes_back(directory, preset, more, tmp_path):
    ours, theirs = trainers(directory, preset, **more)
    state, _ = ours.update(ours.init(), groups(seed=1))
    first = saved(ours, state, tmp_path, 1)
    other = theirs.restore(first)
    second = saved(theirs, other, tmp_path, 2)
    third = saved(ours, ours.restore(second), tmp_path, 3)
    before, after = TorchCheckpoint(first), TorchCheckpoint(third)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.asarray(value).tobytes() == np.asarray(after[name]).tobytes(), name
    assert any(np.any(value) for name, value in before.items() if name.endswith("exp_avg"))
    state, metrics = ours.update(state, groups(seed=2))
    other, wanted = theirs.update(other, groups(seed=2))
    assert metrics["learning_rate"] == pytest.approx(wanted["learning_rate"])
    found = weights(ours, state)
    for name, tensor in weights(theirs, other).items():
        np.testing.assert_allclose(found[name], tensor, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer.name": "sgd"}, "lacks|has .*moments|moments .* of policy"),
        (
            {
                "reference.mode": "ema",
                "algorithm.kl_placement": "loss",
                "algorithm.kl_coefficient": 0.1,
            },
            "reference",
        ),
    ],
)
def test_a_run_with_other_tensors_refuses_the_other_trainers_state(
    change, words, tiny_model_dir, tmp_path
):
    ours, theirs = trainers(tiny_model_dir)
    paths = [saved(t, t.init(), tmp_path / t.__class__.__name__, 1) for t in (ours, theirs)]
    own = options("grpo", **CASES["grpo"], **{**ADAM, **change})
    model = hf.load_config(tiny_model_dir)
    source = lambda _: hf.load(tiny_model_dir)[1]  # noqa: E731
    wanting = TorchUpdate(model, own, tiny_model_dir), _JaxUpdate(model, own, source=source)
    for trainer, path in zip(wanting, reversed(paths), strict=True):
        with pytest.raises(UserError, match=words):
            trainer.restore(path)


LORA = {"lora.rank": 2, "algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.125,
        "reference.mode": "copy", "reference.every_steps": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields", "targets"),
    [
        ("", {}, LORA_TARGETS),
        ("Phi3ForCausalLM", {"fused": True}, LORA_TARGETS),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "experts_per_token": 2, "expert_dim": 16,
                                 "qk_norm": True}, ("q", "k", "v", "o")),
    ],
)  # fmt: skip
def test_adapters_go_to_the_other_trainer_too(family, fields, targets, tiny_model_dir, tmp_path):
    """Also those of joined matrices, and of the attention of a mixture of experts."""
    path = saved_model(tmp_path / "model", family, **fields) if family else tiny_model_dir
    ours, theirs = trainers(path, **LORA, **{"lora.targets": targets})
    state, _ = ours.update(ours.init(), groups(seed=1))
    first = saved(ours, state, tmp_path, 1)
    other = theirs.restore(first)
    third = saved(ours, ours.restore(saved(theirs, other, tmp_path, 2)), tmp_path, 3)
    before, after = TorchCheckpoint(first), TorchCheckpoint(third)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.asarray(value).tobytes() == np.asarray(after[name]).tobytes(), name
    assert any(np.any(x) for name, x in before.items() if name.endswith("lora_B.default.weight"))
    state, _ = ours.update(state, groups(seed=2))
    other, _ = theirs.update(other, groups(seed=2))
    for adapters in (True, False):
        found = ours.weights(state, adapters=adapters).arrays()
        for name, tensor in theirs.weights(other, adapters=adapters).arrays().items():
            np.testing.assert_allclose(found[name], tensor, atol=1e-5, err_msg=name)
    whole, _ = trainers(path)
    for saves in (first, tmp_path / "step_00000002"):
        with pytest.raises(UserError, match=r"lora_|as nothing|of the trainer that wrote it"):
            whole.restore(saves)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LORA])
def test_the_command_writes_a_checkpoint_as_the_other_trainer_does_and_back(
    more, tiny_model_dir, tmp_path
):
    """`python -m rlx.convert SOURCE TARGET --trainer=jax`: all of the state, offline."""
    ours, theirs = trainers(tiny_model_dir, **more)
    state, _ = ours.update(ours.init(), groups(seed=1))
    config = default()
    config.update_from_flattened_dict({"trainer": "torch", **CASES["grpo"], **ADAM, **more})
    host = {"model": ours.model.to_hf(), "config": as_json(config), "lora_base": ""}
    save = lambda path: ours.save(path, state)  # noqa: E731
    checkpoint.begin(tmp_path / "torch", 1, save, ours.state_bytes, host, groups(seed=7))()
    paths = {}
    for source, trainer in (("torch", "jax"), ("jax", "back")):
        paths[trainer] = tmp_path / trainer / "step_00000001"
        flags = [
            tmp_path / source,
            tmp_path / trainer,
            f"--trainer={trainer.replace('back', 'torch')}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "rlx.convert", *flags], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"-> {paths[trainer]} (trainer=" in done.stdout
    before, after = (
        TorchCheckpoint(tmp_path / "torch/step_00000001"),
        TorchCheckpoint(paths["back"]),
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.asarray(value).tobytes() == np.asarray(after[name]).tobytes(), name
    assert ours.restore(paths["back"]).step == 1
    want = theirs.restore(tmp_path / "torch" / "step_00000001")
    for one, two in zip(*map(jax.tree.leaves, (want, theirs.restore(paths["jax"]))), strict=True):
        assert np.array_equal(one, two)
    for path, trainer in ((paths["jax"], "jax"), (paths["back"], "torch")):
        assert checkpoint.read_host(path)["config"]["trainer"] == trainer
        assert len(checkpoint.read_groups(path / "groups")) == len(groups(seed=7))
    with pytest.raises(UserError, match="of trainer=jax already"):
        trainer_switch.rewrite(paths["jax"], tmp_path / "again", "jax")


def test_a_description_may_name_paths_as_later_pythons_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    of_3_13 = b"cpathlib._local\nPosixPath\n."
    assert torch_checkpoint._Limited(io.BytesIO(of_3_13)).load() is pathlib.PosixPath


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_description_that_would_run_code_is_refused_before_it_does(
    tiny_model_dir, tmp_path, capsys
):
    ours, _ = trainers(tiny_model_dir)
    path = saved(ours, ours.init(), tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert ".metadata has changed since it was written" in checkpoint.verify(path)
    with pytest.raises(UserError, match=r"names builtins\.print, which no state has"):
        ours.restore(path)
    assert "executed" not in capsys.readouterr().out


def test_neither_library_is_imported_for_the_other_ones_checkpoint(tiny_model_dir, tmp_path):
    code = """
import sys
from pathlib import Path
from rlx.model.directory import load_config
from rlx.run import trainer_switch
trainer_switch.tensors_of(Path(sys.argv[1]), load_config(sys.argv[2]))["policy.updates"]
found = {name for name in sys.argv[3].split(",") if name in sys.modules}
assert not found, found
"""
    for trainer, foreign in zip(trainers(tiny_model_dir), ("jax,orbax", "jax,orbax"), strict=True):
        path = saved(trainer, trainer.init(), tmp_path / trainer.__class__.__name__, 1)
        subprocess.run([sys.executable, "-c", code, path, tiny_model_dir, foreign], check=True)
