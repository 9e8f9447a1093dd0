"""`python -m rlx.convert` in both directions: bit for bit, from a whole train state and back."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx import convert
from rlx.config import default
from rlx.model import hf
from rlx.train import checkpoint
from rlx.train.update import make_update


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rlx.convert", *map(str, arguments)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def workdir(tiny_model_dir, tmp_path_factory):
    """A run's directory with a checkpoint of its whole train state."""
    config = default()
    config.model.path = str(tiny_model_dir)
    model, params = hf.load(tiny_model_dir)
    params = jax.tree.map(lambda leaf: leaf * 1.5, params)
    state = make_update(model, config).init(params)
    path = tmp_path_factory.mktemp("run")
    (path / "config.json").write_text("{}")  # the run's own, not HF's
    host = {"config": {"model": {"path": str(tiny_model_dir)}}}
    checkpoint.save(path / "checkpoints", 7, state, host)
    return path


def test_train_state_to_hf_to_orbax_to_hf(workdir, tiny_model_dir, tmp_path):
    done = run(workdir, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    start, exported = (load_file(d / hf.WEIGHTS) for d in (tiny_model_dir, tmp_path / "hf"))
    assert start.keys() == exported.keys()
    for name, tensor in start.items():
        np.testing.assert_array_equal(exported[name], tensor * np.float32(1.5), err_msg=name)
    assert (tmp_path / "hf" / "tokenizer.json").exists()

    convert.from_hf(tmp_path / "hf", tmp_path / "orbax", "")
    convert.to_hf(convert.find_checkpoint(tmp_path / "orbax"), tmp_path / "again", "", "")
    again = (tmp_path / "again" / hf.WEIGHTS).read_bytes()
    assert again == (tmp_path / "hf" / hf.WEIGHTS).read_bytes()
    assert hf.load_config(tmp_path / "again") == hf.load_config(tmp_path / "hf")


def test_dtype_is_converted(workdir, tmp_path):
    convert.to_hf(convert.find_checkpoint(workdir), tmp_path / "hf", "", "bfloat16")
    _, params = hf.load(tmp_path / "hf", None)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}


def test_mistakes_are_one_line(tmp_path, workdir):
    done = run(tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "neither" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoint_is_refused(workdir, tmp_path):
    import shutil

    from rlx.base import UserError

    broken = tmp_path / "step_00000007"
    shutil.copytree(convert.find_checkpoint(workdir), broken)
    (broken / "host.json").write_text("{}")
    with pytest.raises(UserError, match=r"host\.json has changed"):
        convert.to_hf(broken, tmp_path / "out", "", "")
    assert not (tmp_path / "out").exists()
