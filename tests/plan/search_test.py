"""The planner's command: what it prints can be used, and bad input is one line."""

import json
import re
import subprocess
import sys

import pytest

from rlx.launch import allocation

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
    "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE))
    return tmp_path / "model"


def plan(model, *flags, status=0):
    command = [
        sys.executable, "-m", "rlx.plan", "--config=configs/gsm8k.py",
        f"--config.model.path={model}", "--config.sampling.max_new_tokens=8192",
        "--config.rollout.batch_prompts=64", "--config.rollout.max_concurrent_rollouts=256", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if not status else done.stderr


def test_the_best_allocations_use_all_gpus_and_fit(model, tmp_path):
    trace = tmp_path / "trace.json"
    out = plan(model, "--gpus=32", "--gpu=h800", "--explain", f"--timeline={trace}",
               "--answer_tokens=3000", "--cut_share=0.05", "--dollars=2")  # fmt: skip
    found = re.findall(r"^(vllm\S+) +([\d.,e+]+) ", out, re.MULTILINE)
    assert len(found) >= 2
    assert all(allocation.parse(text).gpus == 32 for text, _ in found)
    seconds = [float(s.replace(",", "")) for _, s in found]
    assert seconds == sorted(seconds)
    assert "answers of 3,0" in out
    assert "5% of them at 8,192" in out
    assert "dollars" in out
    assert "KV cache for" in out
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {
        "publish",
        "generate",
    }


def test_an_allocation_may_have_any_order_and_letters(model):
    first, second = (
        plan(model, "--gpus=32", "--gpu=h100", f"--allocation={text}").splitlines()[-1].split()[1:]
        for text in ("vllm:d16+jax:f8t2", "jax:f8t2+vllm:d16")
    )
    assert first == second


def test_a_key_is_varied(model):
    out = plan(model, "--gpus=16", "--gpu=h100", "--what_if=rollout.max_staleness=0,4")
    rows = [line.split() for line in out.splitlines() if re.match(r"[04] ", line)]
    assert [row[0] for row in rows] == ["0", "4"]
    assert float(rows[1][2]) < float(rows[0][2])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--gpus=8", "--gpu=h10"], "unknown --gpu .h10.; did you mean"),
        (["--gpus=8"], "--gpu is not given; choose one of a100"),
        (["--gpus=0", "--gpu=h100"], "--gpus='0' is not a number from 1"),
        (["--gpus=1", "--gpu=h100"], r"do not fit 1 × .*; 8 do: --gpus=8, vllm"),
        (["--gpus=8", "--gpu=h100", "--allocation=vllm:d4+jax:f8"], "has 12 GPUs"),
        (["--gpus=8", "--gpu=h100", "--allocation=vllm:d7+jax:f1"], "does not fit GPUs of 85 GB"),
        (["--gpus=8", "--gpu=h100", "--explain", "--what_if=seed=1"], "leave one of them out"),
        (["--gpus=8", "--gpu=h100", "--answer_tokens=9000"], "give a mean between"),
        (["--gpus=8", "--gpu=h100", "--what_if=rollout.max_stalenes=1"], "max_staleness"),
    ],
)
def test_bad_input_is_one_line(model, flags, line):
    error = plan(model, *flags, status=2)
    assert re.search(line, error)
    assert len(error.strip().splitlines()) == 1
