"""Tensors exported bucket by bucket: the same bytes as copies and transposes on the host."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx.base import UserError
from rlx.model import lora, peft
from rlx.model import params as parameters
from rlx.model.buckets import Merge, export
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets, save_tensors
from tests.fixtures.commands import with_devices

PROGRAM = Path(__file__).with_name("buckets_memory.py")
SMALL = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=48, num_layers=3, model_dim=16, mlp_dim=40, num_heads=4,
    num_kv_heads=2, head_dim=4, tie_embeddings=True, attention_bias=True,
)  # fmt: skip
MODELS = {
    "qwen2": SMALL,
    "qwen2 untied": dataclasses.replace(SMALL, tie_embeddings=False),
    "qwen3": dataclasses.replace(
        SMALL, architecture="Qwen3ForCausalLM", attention_bias=False, qk_norm=True
    ),
    "llama untied": dataclasses.replace(
        SMALL, architecture="LlamaForCausalLM", attention_bias=False, tie_embeddings=False
    ),
    "llama biased": dataclasses.replace(
        SMALL, architecture="LlamaForCausalLM", output_bias=True
    ),
    "reward model": dataclasses.replace(SMALL, value_head=True),
}  # fmt: skip
TARGETS = lora.LoraConfig(3, 5.0, ("q", "o", "down"))


def random_params(shapes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), dtype), shapes)


def on_the_host(params, rows, dtype=None):
    """Name → array of HF's or PEFT's files, by numpy alone."""
    tensors = {}
    for row in rows:
        value = np.asarray(parameters.leaf(params, row))
        for name, part in zip(row.names, value if row.stacked else [value], strict=True):
            part = part.T if row.transposed else part
            tensors[name] = np.ascontiguousarray(part, dtype=dtype or part.dtype)
    return tensors


def raw(tensors):
    return [(name, x.shape, np.dtype(x.dtype).name, x.tobytes()) for name, x in tensors.items()]


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_are_those_of_the_host_whatever_the_buckets(model, kept):
    rows = parameters.table(MODELS[model])
    params = random_params(parameters.shapes(MODELS[model]), kept)
    for dtype, size in itertools.product((None, "bfloat16", "float32"), (1, 3000, 1 << 30)):
        wanted = on_the_host(params, rows, dtype and np.dtype(dtype))
        made = export(params, rows, dtype, size=size)
        assert {k: (v.shape, v.dtype) for k, v in made.tensors.items()} == {
            k: (v.shape, v.dtype) for k, v in wanted.items()
        }
        buckets = [{k: np.asarray(v) for k, v in bucket.items()} for bucket in made.buckets]
        assert raw(dict(x for bucket in buckets for x in bucket.items())) == raw(wanted)
        sizes = [sum(x.nbytes for x in bucket.values()) for bucket in buckets]
        assert all(n <= size or len(b) == 1 for n, b in zip(sizes, buckets, strict=True))
        # A bucket ends only where the next tensor has no room.
        first = [next(iter(b.values())).nbytes for b in buckets]
        assert all(n + more > size for n, more in zip(sizes, first[1:], strict=False))


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_adapters_are_merged_on_the_way_and_go_to_peft_as_they_are(kept):
    base = random_params(parameters.shapes(SMALL), kept)
    adapters = random_params(
        parameters.shapes(SMALL, rows=lora.table(SMALL, TARGETS)), "float32", 1
    )
    rows = parameters.table(SMALL)
    merged = lora.merge(base, adapters, TARGETS)
    for dtype, size in itertools.product(("bfloat16", "float32"), (1, 3000, 1 << 30)):
        got = export(base, rows, dtype, merge=Merge(adapters, TARGETS), size=size).arrays()
        assert raw(got) == raw(on_the_host(merged, rows, np.dtype(dtype)))
    wanted = on_the_host(adapters, lora.table(SMALL, TARGETS))
    assert raw(peft.to_peft(adapters, SMALL, TARGETS).arrays()) == raw(wanted)


def test_what_was_asked_for_survives_the_donation_of_the_parameters():
    """An update that is dispatched after the export gives the parameters up."""
    params, rows = random_params(parameters.shapes(SMALL), "float32"), parameters.table(SMALL)
    wanted = raw(on_the_host(params, rows))
    made = list(export(params, rows, "float32", size=3000).buckets)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    jax.block_until_ready(update(params))
    assert params["embed"].is_deleted()
    assert raw({k: np.asarray(v) for bucket in made for k, v in bucket.items()}) == wanted


def test_files_are_written_bucket_by_bucket(tmp_path):
    params, rows = random_params(parameters.shapes(SMALL), "float32"), parameters.table(SMALL)
    wanted = on_the_host(params, rows, np.dtype("bfloat16"))
    for size in (1, 3000, 1 << 30):
        save_tensors(export(params, rows, "bfloat16", size=size), tmp_path / str(size))
        got = load_file(tmp_path / str(size))
        assert got.keys() == wanted.keys()
        assert raw({name: got[name] for name in wanted}) == raw(wanted)
    save_tensors(wanted, tmp_path / "at once")
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {(tmp_path / "1").read_bytes()}


@pytest.mark.parametrize(
    ("came", "said"),
    [
        ([{"a": np.zeros(2, np.float32)}], "b did not come"),
        ([{"a": np.zeros(2, np.float32)}, {"c": np.zeros(3, np.float32)}], "c .* wanted b"),
        ([{"a": np.zeros(3, np.float32)}], "a float32.* wanted a"),
        ([{"a": np.zeros(2, np.float64)}], "a float64.* wanted a"),
        ([{"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}] * 2, "a .* wanted none"),
    ],
)
def test_tensors_that_are_not_those_announced_are_refused(came, said, tmp_path):
    tensors = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=said):
        save_tensors(Buckets(tensors, came), tmp_path / "file")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_not_written(tmp_path, dtype, bad):
    tensors = {"good": np.zeros(3, dtype), "bad": np.array([0, bad, 1], dtype)}
    with pytest.raises(UserError, match="tensor bad has numbers that are not finite"):
        save_tensors(tensors, tmp_path / "file")


@pytest.mark.slow
def test_on_a_mesh_bytes_are_equal_and_on_one_device_memory_is_a_few_buckets():
    """One process of 8 devices for the bytes, one of a single device for the memory."""
    flags = {k: v for k, v in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    for devices in (8, 1):
        done = subprocess.run(
            [sys.executable, PROGRAM], timeout=600, capture_output=True, text=True,
            env=with_devices(devices, flags),
        )  # fmt: skip
        assert not done.returncode, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        if devices == 8:
            assert found == {"equal": True, "merged equal": True}
        else:
            # Two on the way, what makes the next one, and pages that threads' arenas keep.
            assert found["peak"] < 6 * found["bucket"] < found["model"] / 4, found
