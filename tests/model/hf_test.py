"""HF directories in and out: bit for bit, whole or not at all, and readable by transformers."""

import itertools
import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlx.base import UserError
from rlx.model import hf
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from tests.fixtures.commands import with_devices

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = [
    *itertools.product(("Qwen2", "Qwen3", "Llama"), (True, False), DTYPES),
    *((name, tied, dtype) for name in ("Mistral", "Gemma2", "Gemma3Text", "Olmo2", "Phi3",
                              "Qwen3Moe")
      for tied, dtype in zip((True, False), DTYPES, strict=True)),
]  # fmt: skip


def stored(path: Path) -> dict[str, tuple]:
    """(dtype, shape, bytes) of every tensor in a directory's safetensors files."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is not a mapping)
                tensor = tensors.get_tensor(name)
                raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                found[name] = (tensor.dtype, tuple(tensor.shape), raw)
    return found


def logits(model) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model(tokens).logits


def same_bits(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# In and out.


@pytest.mark.parametrize(("architecture", "tied", "dtype"), KINDS)
def test_a_round_trip_keeps_every_bit_and_transformers_reads_it(
    architecture, tied, dtype, make_small, tmp_path
):
    model = make_small(architecture, tied, dtype)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs", DTYPES[dtype])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(DTYPES[dtype])}
    assert ("lm_head" in params) is not tied
    hf.save(tmp_path / "ours", config, params)
    assert stored(tmp_path / "ours") == stored(tmp_path / "theirs")
    config_again, params_again = hf.load(tmp_path / "ours", DTYPES[dtype])
    assert config_again == config
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == dtype
    assert same_bits(params_again, params)

    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report  # nothing missing, nothing extra, nothing mis-shaped
    assert back.dtype == getattr(torch, dtype)
    assert type(back) is type(model)
    assert torch.equal(logits(back.eval()), logits(model))


def test_tensors_go_out_and_in_without_files(small_dir):
    config, params = hf.load(small_dir)
    tensors = hf.to_hf(params, config)
    assert {name: (a.shape, a.tobytes()) for name, a in tensors.items()} == {
        name: (shape, raw) for name, (_, shape, raw) in stored(small_dir).items()
    }
    assert same_bits(hf.from_hf(tensors, config), params)


@pytest.mark.parametrize("where", ["load", "save", "to_hf"])
def test_conversion_rounds_as_torch_does(where, make_small, small_dir, tmp_path):
    wanted = make_small().to(torch.bfloat16).state_dict()
    config, params = hf.load(small_dir, jnp.bfloat16 if where == "load" else jnp.float32)
    if where == "to_hf":
        save_file(hf.to_hf(params, config, "bfloat16"), tmp_path / hf.WEIGHTS)
    else:
        hf.save(tmp_path / "ours", config, params, "bfloat16" if where == "save" else None)
    got = stored(tmp_path if where == "to_hf" else tmp_path / "ours")
    assert {name: raw for name, (_, _, raw) in got.items()} == {
        name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in wanted.items()
    }


def test_layouts_are_those_of_the_table(small_dir):
    """[in, out] here, [out, in] there; layers stacked on the first axis."""
    config, params = hf.load(small_dir)
    tensors = load_file(small_dir / hf.WEIGHTS)
    for layer in range(config.num_layers):
        theirs = tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert np.array_equal(params["layers"]["up"][layer], theirs.T)
    assert np.array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, parameters.shapes(config)
    )


def test_a_sharded_directory_is_the_same_model(small_dir, sharded_dir):
    assert len(list(sharded_dir.glob("*.safetensors"))) > 2
    assert same_bits(hf.load(sharded_dir)[1], hf.load(small_dir)[1])
    assert hf.check(sharded_dir) == hf.load_config(small_dir)


# Loading on a mesh, in a process with 8 devices.

# 44 M parameters.
LARGE = ModelConfig(
    architecture="Qwen2ForCausalLM", vocab_size=8192, num_layers=8, model_dim=512, mlp_dim=2304,
    num_heads=8, num_kv_heads=4, head_dim=64, tie_embeddings=False, attention_bias=True,
)  # fmt: skip


def load_sharded(mode: str, *paths: Path) -> None:
    subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded_load.py"), mode, *map(str, paths)],
        check=True, timeout=300, env=with_devices(8),
    )  # fmt: skip


def test_each_device_has_its_slice_of_the_whole(make_small, tmp_path):
    kinds = itertools.product(("Qwen2", "Qwen3", "Llama", "Gemma3Text", "Phi3"), (True, False))
    paths = [tmp_path / f"{name}-{tied}" for name, tied in kinds]
    for path in paths:
        architecture, tied = path.name.split("-")
        make_small(architecture, tied == "True").save_pretrained(path)
    load_sharded("slices", *paths)


def test_loading_takes_no_more_memory_than_the_model_and_a_bucket(small_dir, tmp_path):
    weights = parameters.init(LARGE, jax.random.key(0), jnp.bfloat16)
    hf.save(tmp_path / "large", LARGE, weights)
    load_sharded("memory", tmp_path / "large", small_dir)


# Writing whole or not at all.


def test_an_export_has_the_tokenizer_and_is_readable_by_others(tiny_model_dir, tmp_path):
    config, params = hf.load(tiny_model_dir)
    hf.save(tmp_path / "deep" / "export", config, params, source=tiny_model_dir)
    export = tmp_path / "deep" / "export"
    names = {file.name for file in tiny_model_dir.iterdir()}
    assert {file.name for file in export.iterdir()} == names
    for name in names - {"config.json", hf.WEIGHTS}:
        assert (export / name).read_bytes() == (tiny_model_dir / name).read_bytes()
    assert stat.S_IMODE(export.stat().st_mode) == 0o755
    assert stat.S_IMODE((export / hf.WEIGHTS).stat().st_mode) == 0o644
    assert [entry.name for entry in export.parent.iterdir()] == ["export"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert tokenizer.decode(tokenizer("2+2=4")["input_ids"]) == "2+2=4"


def test_an_export_takes_the_place_of_the_one_before(tiny_model_dir, tmp_path):
    config, params = hf.load(tiny_model_dir)
    path = shutil.copytree(tiny_model_dir, tmp_path / "export")
    (path / "stale.txt").write_text("of the export before")
    more = jax.tree.map(lambda leaf: leaf + 1, params)
    hf.save(path, config, more, source=path)  # its own tokenizer files outlive it
    assert same_bits(hf.load(path)[1], more)
    assert (path / "tokenizer.json").exists()
    assert not (path / "stale.txt").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("old", [True, False])
def test_a_failure_half_way_leaves_what_was_there(old, small_dir, tmp_path):
    config, params = hf.load(small_dir)
    if old:
        shutil.copytree(small_dir, tmp_path / "export")
    before = stored(tmp_path / "export")
    (tmp_path / "source" / "tokenizer.json").mkdir(parents=True)  # no file: copying it fails
    more = jax.tree.map(lambda leaf: leaf + 1, params)
    with pytest.raises(UserError, match=r"cannot write .*export.*choose another directory"):
        hf.save(tmp_path / "export", config, more, source=tmp_path / "source")
    assert stored(tmp_path / "export") == before
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == (["export", "source"] if old else ["source"])


@pytest.mark.parametrize("target", ["file", "file/export"])
def test_a_file_in_the_way_is_told_and_kept(target, small_dir, tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match=r"cannot write .*file"):
        hf.save(tmp_path / target, *hf.load(small_dir))
    assert (tmp_path / "file").read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# Names of models.


def test_a_directory_is_itself(small_dir):
    assert hf.resolve(str(small_dir)) == small_dir


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/directory", ["'/no/such/directory'", "HF directory or hub name"]),
        ("./owner/name", ["'./owner/name'"]),
        ("qwen", ["'qwen'", "HF directory or hub name"]),
        ("rlx:arithmetik", ["'rlx:arithmetik'", "'rlx:arithmetic'"]),
        ("owner/name", ["'owner/name'", "OSError", "check the name and the network"]),
    ],
)
def test_what_is_no_model_is_told(name, words, monkeypatch):
    import huggingface_hub

    def offline(name, **options):
        raise OSError("no route to host\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError) as error:
        hf.resolve(name)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_hub_name_is_its_snapshot(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hf.resolve("owner/name") == tmp_path
    assert asked[0][0] == "owner/name"
    assert {"*.json", "*.safetensors"} <= set(asked[0][1])
    hf.resolve("owner/name", weights=False)
    assert {"*.safetensors"} == set(asked[0][1]) - set(asked[1][1])
