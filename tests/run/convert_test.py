"""`python -m rlx.convert` in both directions: bit for bit, from a whole train state and back."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx import convert
from rlx.base import UserError
from rlx.config import default
from rlx.fleet.adapter import digest
from rlx.model import hf, lora, peft
from rlx.model import params as parameters
from rlx.run import export
from rlx.train import checkpoint
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


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
    state = JaxUpdate(model, TrainOptions.of(config)).init(params)
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

    export.hf_to_checkpoint(tmp_path / "hf", tmp_path / "orbax", "")
    export.checkpoint_to_hf(checkpoint.find(tmp_path / "orbax"), tmp_path / "again", "", "")
    again = (tmp_path / "again" / hf.WEIGHTS).read_bytes()
    assert again == (tmp_path / "hf" / hf.WEIGHTS).read_bytes()
    assert hf.load_config(tmp_path / "again") == hf.load_config(tmp_path / "hf")


def lora_checkpoint(base, path):
    """A LoRA run's directory with a checkpoint; its adapters and the settings they have."""
    config = default()
    config.model.path, config.lora.rank = str(base), 3
    model, params = hf.load(base)
    update = JaxUpdate(model, TrainOptions.of(config), source=lambda _: params)
    state = update.init()
    state = state.replace(params=jax.tree.map(lambda leaf: leaf + 0.01, state.params))
    host = {
        "config": json.loads(config.to_json_best_effort()),
        "model": model.to_hf(),
        "lora_base": digest(base).hex(),
    }
    checkpoint.save(path / "checkpoints", 7, state, host)
    return path, state.params, update.lora


@pytest.fixture(scope="module")
def lora_run(tiny_model_dir, tmp_path_factory):
    return lora_checkpoint(tiny_model_dir, tmp_path_factory.mktemp("lora"))


def test_a_lora_checkpoint_is_merged_and_given_to_peft(lora_run, tiny_model_dir, tmp_path):
    path, adapters, settings = lora_run
    done = run(path, tmp_path / "hf", f"--adapter={tmp_path / 'adapter'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(PEFT)")
    model, params = hf.load(tiny_model_dir)
    wanted = hf.to_hf(lora.merge(params, adapters, settings), model)
    merged = load_file(tmp_path / "hf" / hf.WEIGHTS)
    assert merged.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(merged[name], tensor, err_msg=name)
    found, back = peft.load(tmp_path / "adapter", model)
    assert found == settings
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, adapters)))
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_adapters_are_not_rounded_to_the_dtype_of_their_base(tiny_model_dir, tmp_path):
    hf.save(tmp_path / "base", *hf.load(tiny_model_dir, "bfloat16"))
    path, adapters, settings = lora_checkpoint(tmp_path / "base", tmp_path)
    export.checkpoint_to_hf(checkpoint.find(path), tmp_path / "hf", "", "float32")
    wanted = lora.merge(hf.load(tmp_path / "base")[1], adapters, settings)
    merged = hf.load(tmp_path / "hf", None)[1]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, merged, wanted)))


def test_adapters_are_merged_into_their_own_base_alone(
    lora_run, workdir, tiny_model_dir, tmp_path, monkeypatch
):
    path, *_ = lora_run
    model, params = hf.load(tiny_model_dir)
    hf.save(tmp_path / "other", model, jax.tree.map(lambda leaf: leaf * 1.01, params))
    (tmp_path / "precious").mkdir()
    other, out, new = str(tmp_path / "other"), str(tmp_path / "out"), str(tmp_path / "new")
    for arguments, words in (
        ([str(path), out, f"--model={other}"], "the checkpoint's adapters belong to base"),
        ([str(path), out, f"--adapter={tmp_path / 'precious'}"], "give another --adapter"),
        ([str(workdir), out, f"--adapter={new}"], "has no LoRA adapters"),
        (
            [str(tiny_model_dir), out, f"--adapter={new}"],
            "is no checkpoint, so --adapter has no use",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["rlx.convert", *arguments])
        with pytest.raises(UserError) as error:
            convert.main()
        assert words in str(error.value)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "new").exists()


def test_dtype_is_converted(workdir, tmp_path):
    export.checkpoint_to_hf(checkpoint.find(workdir), tmp_path / "hf", "", "bfloat16")
    _, params = hf.load(tmp_path / "hf", None)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}


@pytest.fixture(scope="module")
def other_model(tiny_model_dir, tmp_path_factory):
    """A directory of another width."""
    model = dataclasses.replace(hf.load_config(tiny_model_dir), mlp_dim=32)
    path = tmp_path_factory.mktemp("other") / "model"
    hf.save(path, model, parameters.init(model, jax.random.key(0)))
    return path


@pytest.mark.parametrize(
    ("source", "target", "flags", "words"),
    [
        ("empty", "out", [], ["empty holds neither"]),
        ("nowhere/at/all", "out", [], ["SOURCE=", "nowhere/at/all"]),
        ("workdir", "precious", [], ["precious exists", "another TARGET"]),
        ("hf", "precious", [], ["precious exists", "another TARGET"]),
        ("hf", "file/out", [], ["cannot write", "file/out"]),
        ("workdir", "file/out", [], ["cannot write", "file/out"]),
        ("workdir", "out", ["--model=nowhere/at/all"], ["--model=", "nowhere/at/all"]),
        ("hf", "out", ["--model", "other"], ["is no checkpoint", "drop it"]),
        ("workdir", "out", ["--model", "other"], ["mlp.gate_proj", "[96, 64]"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_everything_as_it_was(
    source, target, flags, words, workdir, other_model, tiny_model_dir, tmp_path, monkeypatch
):
    for name in ("empty", "precious"):
        (tmp_path / name).mkdir()
    (tmp_path / "precious" / "thesis").write_text("text")
    (tmp_path / "file").write_text("text")
    before = sorted(tmp_path.rglob("*"))
    sources = {"workdir": workdir, "hf": tiny_model_dir}
    flags = [str(other_model) if flag == "other" else flag for flag in flags]
    monkeypatch.chdir(tmp_path)
    argv = ["rlx.convert", str(sources.get(source, source)), target, *flags]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError) as error:
        convert.main()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_ends_a_mistake_without_a_traceback(tmp_path):
    done = run(tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_damaged_checkpoint_is_passed_over_or_refused(workdir, tmp_path, caplog):
    whole, broken = tmp_path / "step_00000007", tmp_path / "step_00000008"
    for copy in (whole, broken):
        shutil.copytree(checkpoint.find(workdir), copy)
    (broken / "host.json").write_text("{}")
    assert checkpoint.find(tmp_path) == whole
    assert "step_00000008: host.json has changed" in caplog.text
    with pytest.raises(UserError, match=r"step_00000008 is not whole: host\.json has changed"):
        checkpoint.find(broken)
    shutil.rmtree(whole)
    with pytest.raises(UserError, match=r"none of the 1 checkpoints in .* is whole"):
        checkpoint.find(tmp_path)
