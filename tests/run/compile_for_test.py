"""Trainer and JAX engine compiled for GPUs that are not here: what XLA plans, calls and sends.

Needs JAX's CUDA plugin on Python 3.12 or newer, and no GPU. Each case is the real program of a run.
"""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from configs import arithmetic
from rlx.doctor.gpu_program import Reading
from rlx.launch.xla_flags import PLUGINS
from rlx.run import compile_for
from tests.configs_test import ROOT

HERE = sys.version_info >= (3, 12) and any(map(find_spec, PLUGINS))
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip


def qwen2(layers, width, heads, kv, mlp, vocab=152_064, tied=False):
    shape = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": mlp, "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return QWEN2 | shape


SMALL = qwen2(28, 1536, 12, 2, 8960, 151_936, True)
FEW = qwen2(4, 1536, 12, 2, 8960, 151_936, True)
SEVEN = qwen2(28, 3584, 28, 4, 18_944)
GEMMA = qwen2(6, 1152, 4, 1, 6912, 262_144, True) | {  # six layers of Gemma 3 1B, five with windows
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256,
    "sliding_window": 512, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 256, "rope_local_base_freq": 10_000.0, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
MIXTURE = qwen2(2, 2048, 32, 4, 6144, 151_936) | {  # two layers of Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run, and what XLA makes of each program that trains: GB, and calls of cuDNN each way.

    `planned` has no room for scores of a row with itself, 10 GB and more. `flops` are 10¹² of the
    first program, if given: all rows times all experts would be 1,411. `gathered` is the least
    share in % of the gathered bytes that products hide. `moved` are GB outside of products: a loop
    over layers that keep much would move 260 and 654.
    """

    model: dict
    config: str
    gpus: str
    planned: dict
    attends: int
    scattered: float
    reduced: float = 0.0
    keys: tuple = ()
    flops: float = 0.0
    gathered: int = 0
    moved: float = 0.0


CASES = {
    "1.5b": Case(SMALL, "math_1_5b", "h100:4", {"microbatch": 48}, 28, 4.6, moved=171),
    "7b": Case(SEVEN, "math_7b", "h100:16", {"microbatch": 70}, 28, 29, gathered=90, moved=392),
    "14b": Case(
        qwen2(48, 5120, 40, 8, 13_824), "math_14b", "h100:32", {"microbatch": 59}, 48, 55, 3.7,
        gathered=95,
    ),
    "32b": Case(
        qwen2(64, 5120, 40, 8, 27_648), "math_32b", "h100:64", {"microbatch": 46}, 64, 127, 4.1,
        gathered=97,
    ),
    "lora": Case(
        SEVEN, "math_7b", "h100:16", {"microbatch": 43}, 28, 0.039, 0.224,
        ("--config.lora.rank=16", "--config.train.mesh=replica:2,fsdp:8",
         "--config.model.remat=up"),
    ),
    "critic": Case(
        FEW, "math_1_5b", "h100:4", {"microbatch": 12, "critic microbatch": 11}, 4, 1.3,
        keys=("--config.algorithm.preset=ppo",),
    ),
    "context": Case(
        FEW, "math_1_5b", "h100:4", {"microbatch": 11}, 0, 1.7,
        keys=("--config.train.mesh=context:4",),
    ),
    "gemma": Case(GEMMA, "math_1_5b", "h100:4", {"microbatch": 14}, 6, 1.4, flops=62),
    "mixture": Case(
        MIXTURE, "math_7b", "h100:8", {"microbatch": 10}, 2, 4.3,
        keys=("--config.train.mesh=expert:8",), flops=76,
    ),
}  # fmt: skip


def compiled(tmp_path, model, config, gpus, *keys):
    """The doctor's rows by name, and the programs' texts by name."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model))
    command = [sys.executable, "-m", "rlx.doctor", f"--config={config}", f"--compile-for={gpus}",
               f"--config.model.path={path}", *keys]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    rows = re.findall(r"^(\w+) +compiled: ([\w ]+): (.*)$", done.stdout, re.MULTILINE)
    assert rows, done.stdout + done.stderr
    return {name: (level, found) for level, name, found in rows}


def gigabytes(found):
    number, unit = re.match(r"([\d.]+) (\w+)", found).groups()
    return float(number) * {"GB": 1, "MB": 1e-3}[unit]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.deviceless
@pytest.mark.skipif(not HERE, reason="needs Python 3.12 and jax-cuda13-plugin")
def test_a_large_run_fits_and_sends_each_weight_and_gradient_once(tmp_path, name):
    """Gradients are scattered within a replica, and their parts reduced over replicas."""
    case = CASES[name]
    rows = compiled(tmp_path, case.model, f"configs/{case.config}.py", case.gpus, *case.keys)
    for program, planned in case.planned.items():
        level, found = rows[program]
        assert level == "ok", found
        assert gigabytes(found) == pytest.approx(planned, rel=0.06), found
        calls = rows[f"{program} time"][1]
        [flops] = re.findall(r"(\d+) TFLOP", calls)
        assert not case.flops or float(flops) == pytest.approx(case.flops, rel=0.06)
        [moved] = re.findall(r"(\d+) GB moved", calls)
        assert not case.moved or float(moved) == pytest.approx(case.moved, rel=0.06)
        again = 2 if case.config == "math_32b" else 1  # model.remat=full
        for call, times in ("cudnn$fmhaSoftmax", again), ("cudnn$fmhaSoftmaxBackward", 1):
            found = re.findall(rf"(\d+) {re.escape(call)}(?:,|$)", calls)
            assert found == [str(times * case.attends)] * (case.attends > 0), "each layer once"
        sent = rows[f"{program} sent"][1]
        assert "× all-gather of f32" not in sent, "weights travel in bfloat16"
        kinds = dict(re.findall(r"([a-z-]+) ([\d.]+ [MG]?B)[,)]", sent))
        scattered, reduced = (
            gigabytes(kinds.get(k, "0 GB")) for k in ("reduce-scatter", "all-reduce")
        )
        assert scattered == pytest.approx(case.scattered, rel=0.06), sent
        assert reduced == pytest.approx(case.reduced, rel=0.06, abs=0.02), sent
        [gathered] = re.findall(r"of what is gathered (\d+)%", sent)
        assert int(gathered) >= case.gathered, sent


@pytest.mark.deviceless
@pytest.mark.skipif(not HERE, reason="needs Python 3.12 and jax-cuda13-plugin")
def test_what_a_config_leaves_open_is_chosen_for_the_card(tmp_path):
    """Four layers on 80 GB need no more recomputation, and two of the longest rows fit."""
    keys = ("--config.model.remat=auto", "--config.train.max_tokens_per_microbatch=0")
    rows = compiled(tmp_path, FEW, "configs/math_1_5b.py", "h100:4", *keys)
    chosen = "model.remat=auto is none and train.max_tokens_per_microbatch=0 is 34816: a step needs"
    level, found = rows["choice"]
    assert level == "ok"
    assert found.startswith(chosen), found
    assert rows["microbatch"][0] == "ok"
    assert gigabytes(found.removeprefix(f"{chosen} ")) == gigabytes(rows["microbatch"][1])


@pytest.mark.deviceless
@pytest.mark.skipif(not HERE, reason="needs Python 3.12 and jax-cuda13-plugin")
def test_a_decode_step_moves_the_weights_and_the_cache_once(tmp_path):
    """A copy of the cache would move twice its bytes more."""
    keys = ("engine=jax", "slots=64", "max_model_len=4096")
    keys = (f"--config.fleet.{key}" for key in keys)
    rows = compiled(tmp_path, FEW, "configs/gsm8k.py", "h100:1", *keys)
    for program, planned in {"decode": 2.9, "cache write": 1.9, "prefill": 2.9}.items():
        level, found = rows[program]
        assert level == "ok", found
        assert gigabytes(found) == pytest.approx(planned, rel=0.06), found
    found = rows["decode time"][1]
    [times] = re.findall(r"([\d.]+) × weights and cache", found)
    assert float(times) == pytest.approx(1.28, rel=0.06), found
    assert "limited by bandwidth" in found


TREES = """
import os
from rlx.run import compile_for
compile_for.set_up(os.environ)
import jax, jax.numpy as jnp
from rlx.doctor.gpu_cards import CARDS
from rlx.model.attention import attention
from rlx.train import device_programs

def loss(q, k, v, ends, positions, sizes):
    found = attention(q, k, v, ends, sizes, tree=(ends, positions))
    return jnp.sum(found.astype(jnp.float32))

tokens = 16_384
with device_programs.gpus(CARDS["h100"].target(), 1, 1) as devices:
    q, k, v = (jax.ShapeDtypeStruct((1, tokens, n, 128), jnp.bfloat16) for n in (12, 2, 2))
    ends, sizes = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (tokens, 64))
    grad = jax.grad(loss, argnums=(0, 1, 2))
    program = device_programs.lower_on(devices[0], grad, (), (q, k, v, ends, ends, sizes))
    compiled = program.compile()
print(compiled.memory_analysis().temp_size_in_bytes)
print(compiled.as_text())
"""


@pytest.mark.deviceless
@pytest.mark.skipif(not HERE, reason="needs Python 3.12 and jax-cuda13-plugin")
def test_attention_over_trees_is_two_kernels_and_no_scores_of_a_row_with_itself():
    """One of chains, and one in a loop over the levels of forks; scores would take 6 GB a call."""
    command = [sys.executable, "-c", TREES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    planned, text = done.stdout.split("\n", 1)
    assert int(planned) < 1.5e9
    for call in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert text.count(f'custom_call_target="{call}"') == 2
    assert "16384,16384" not in text


def test_a_scan_without_a_mesh_that_fits_names_none(monkeypatch):
    from rlx.run import jax_trainer
    from rlx.train import device_programs

    run = compile_for._Target.of(arithmetic.get_config(), "h100:1")
    program, trainer = MagicMock(), SimpleNamespace(tokens_a_device=lambda length: 100)
    monkeypatch.setattr(jax_trainer, "programs", lambda *_: (trainer, iter([("p", program, 0)])))
    monkeypatch.setattr(device_programs, "gpus", lambda *_: nullcontext([]))
    monkeypatch.setattr(device_programs, "planned_bytes", lambda _: 1 << 60)
    monkeypatch.setattr(compile_for.gpu_program, "read", lambda *_: Reading(bytes=1e12))
    *rows, best = compile_for.scan(run.config, "h100:1")
    assert {row.level for row in rows} == {"absent"}
    assert (best.level, best.result) == ("problem", "none fits")
    monkeypatch.setattr(device_programs, "planned_bytes", lambda _: 1)
    *_, best = compile_for.scan(run.config, "h100:1")
    assert best.level == "ok"
    assert best.result.startswith("train.mesh=fsdp:1 model.remat=")
