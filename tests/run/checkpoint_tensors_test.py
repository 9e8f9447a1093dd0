"""Either trainer's checkpoint becomes the same HF directory; the other's is not resumed from."""

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
from rlx.model import hf
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.run import export, parts
from rlx.train import checkpoint
from rlx.train.update import JaxUpdate
from rlx_torch import torch_checkpoint
from rlx_torch.update import TorchUpdate
from tests.rlx_torch.update_test import CASES, options


def trainers(directory):
    own, model = options("grpo", **CASES["grpo"]), hf.load_config(directory)
    source = lambda _: hf.load(directory)[1]  # noqa: E731
    return {
        "torch": TorchUpdate(model, own, directory),
        "jax": JaxUpdate(model, own, source=source),
    }


def saved(name, trainer, directory):
    state = trainer.init()
    host = {"model": trainer.model.to_hf(), "config": {"trainer": name}}
    save = lambda path: trainer.save(path, state)  # noqa: E731
    return checkpoint.begin(directory, 1, save, trainer.state_bytes, host, keep=9)()


def joined(directory):
    """A model whose files hold several of our matrices in one tensor."""
    config = ModelConfig(
        "Phi3ForCausalLM", vocab_size=128, num_layers=2, model_dim=32, mlp_dim=48, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=256, pad_token_id=0, bos_token_id=1,
        eos_token_ids=(2,), fused=True, windows=(6, 6),
    )  # fmt: skip
    hf.save(directory, config, parameters.init(config, jax.random.key(0)))
    return directory


def mixture(directory):
    """A model whose experts transformers joins."""
    config = ModelConfig(
        "Qwen3MoeForCausalLM", vocab_size=128, num_layers=2, model_dim=32, mlp_dim=48, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=256, qk_norm=True, num_experts=4,
        experts_per_token=2, expert_dim=16, eos_token_ids=(2,),
    )  # fmt: skip
    hf.save(directory, config, parameters.init(config, jax.random.key(0)))
    return directory


@pytest.mark.parametrize(
    ("make", "dtype"), [(None, ""), (None, "bfloat16"), (joined, ""), (mixture, "")]
)
def test_the_same_directory_is_made_of_either_trainers_checkpoint(
    make, dtype, tiny_model_dir, tmp_path
):
    model = make(tmp_path / "model") if make else tiny_model_dir
    made = []
    for name, trainer in trainers(model).items():
        path = saved(name, trainer, tmp_path / name)
        made.append(tmp_path / f"{name}-hf")
        export.checkpoint_to_hf(path, made[-1], str(model), dtype)
    for name in ("model.safetensors", "config.json"):
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes()
    if not dtype:
        want, found = (load_file(d / "model.safetensors") for d in (model, made[0]))
        assert want.keys() == found.keys()
        assert all(np.array_equal(want[name], found[name]) for name in want)


def test_the_other_trainers_checkpoint_is_refused_by_name(tiny_model_dir, tmp_path):
    both = trainers(tiny_model_dir)
    for name, other in (("torch", "jax"), ("jax", "torch")):
        path = saved(name, both[name], tmp_path / name)
        words = f"written by trainer={name}, got trainer={other}; resume with .*trainer={name}"
        with pytest.raises(UserError, match=words):
            parts._restore(both[other], other, path)


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
    ours = trainers(tiny_model_dir)["torch"]
    path = saved("torch", ours, tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert ".metadata has changed since it was written" in checkpoint.verify(path)
    with pytest.raises(UserError, match=r"names builtins\.print, which rlx never writes"):
        ours.restore(path)
    assert "executed" not in capsys.readouterr().out


def test_jax_is_not_imported_to_read_a_checkpoint(tiny_model_dir, tmp_path):
    code = """
import sys
from pathlib import Path
from rlx.model.directory import load_config
from rlx.run import checkpoint_tensors
checkpoint_tensors.policy_of(Path(sys.argv[1]), load_config(sys.argv[2])).arrays()
assert not {"jax", "orbax"} & set(sys.modules), sys.modules.keys()
assert json.loads(sys.argv[3]) or "torch" not in sys.modules
"""
    for name, trainer in trainers(tiny_model_dir).items():
        path = saved(name, trainer, tmp_path / name)
        torch = json.dumps(name == "torch")
        command = [sys.executable, "-c", "import json" + code, path, tiny_model_dir, torch]
        subprocess.run(command, check=True)
