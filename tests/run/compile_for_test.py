"""The trainer compiled for GPUs that are not here: what XLA plans, calls and sends.

Needs JAX's CUDA plugin on Python 3.12 or newer, and no GPU. Each case is the real program of a run.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from rlx.launch.xla_flags import PLUGINS
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


@pytest.mark.parametrize(
    ("model", "config", "gpus", "keys", "planned", "layers"),
    [
        pytest.param(SMALL, "math_1_5b", "h100:4", [], 21, 28, id="1.5b"),
        pytest.param(
            qwen2(28, 3584, 28, 4, 18_944), "math_7b", "h100:16", [], 33, 28, id="7b"
        ),
        pytest.param(
            qwen2(6, 5120, 40, 8, 27_648), "math_32b", "h100:64", [], 9.8, 6, id="32b, 6 layers"
        ),
        pytest.param(
            qwen2(28, 3584, 28, 4, 18_944), "math_7b", "h100:16", ["--config.lora.rank=16"], 23, 28,
            id="lora",
        ),
    ],
)  # fmt: skip
@pytest.mark.deviceless
@pytest.mark.skipif(not HERE, reason="needs Python 3.12 and jax-cuda13-plugin")
def test_a_large_run_fits_and_attends_by_cudnn(
    tmp_path, model, config, gpus, keys, planned, layers
):
    rows = compiled(tmp_path, model, f"configs/{config}.py", gpus, *keys)
    level, found = rows["microbatch"]
    assert level == "ok", found
    assert gigabytes(found) == pytest.approx(planned, rel=0.06), found
    calls = rows["microbatch time"][1]
    for call in ("cudnn$fmhaSoftmax", "cudnn$fmhaSoftmaxBackward"):
        assert f"{layers} {call}" in calls, "each layer once, and none computed again"
    assert "× all-gather of f32" not in rows["microbatch sent"][1], "weights travel in bfloat16"
