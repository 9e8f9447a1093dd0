"""Code in a model's directory never runs, whatever stdin answers."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.base import UserError
from rlx.run.tokenizer_files import load_tokenizer

ROOT = Path(__file__).parents[2]
LOADS = ("from_pretrained", "from_config")
EVIL = """
from pathlib import Path
Path(__file__).with_name("it_ran").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM
class Config(PretrainedConfig):
    model_type = "unknown_to_all"
class Model(Qwen2ForCausalLM):
    pass
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
LOADERS = {
    "tokenizer": "from rlx.run.tokenizer_files import load_tokenizer; load_tokenizer(path)",
    "stop strings": "from rlx.engines.stop_strings import load_decode; load_decode(path)",
    "scores": "from rlx.mismatch.measure import transformers_logprobs; "
    "transformers_logprobs(path, [], 1.0, 'float32')",
    "torch": "from rlx_torch import packed_model; packed_model.packable_config(path)",
}


@pytest.fixture
def model(tmp_path):
    """Return the packaged model with code that transformers would import."""
    path = tmp_path / "model"
    shutil.copytree(ROOT / "rlx/assets/arithmetic", path)
    (path / "evil.py").write_text(EVIL)
    for name, kind in (("config.json", "unknown_to_all"), ("tokenizer_config.json", None)):
        described = json.loads((path / name).read_text())
        described["auto_map"] = {
            "AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
        }  # fmt: skip
        described |= {"model_type": kind} if kind else {"tokenizer_class": "Tokenizer"}
        (path / name).write_text(json.dumps(described))
    return path


OF_TORCH = [pytest.param(name, marks=pytest.mark.torch) for name in ("scores", "torch")]


@pytest.mark.parametrize("name", ["tokenizer", "stop strings", *OF_TORCH])
def test_it_does_not_run_though_stdin_says_yes(model, name):
    if name == "stop strings":
        (model / "tokenizer.json").rename(model / "vocab.json")
    code = f"from pathlib import Path; path = Path({str(model)!r}); {LOADERS[name]}"
    done = subprocess.run(
        [sys.executable, "-c", code], input="y\n" * 100, capture_output=True, text=True,
        timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert not list(model.rglob("it_ran")), done.stdout + done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
    if name == "torch":
        assert "UserError" in done.stderr


def test_a_tokenizer_that_is_code_is_refused_in_one_line(model):
    (model / "tokenizer.json").rename(model / "vocab.json")
    with pytest.raises(UserError) as error:
        load_tokenizer(model)
    assert "\n" not in str(error.value)


def test_every_place_that_loads_by_transformers_refuses_code():
    for path in [*(ROOT / "rlx").rglob("*.py"), *(ROOT / "rlx_torch").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.func if isinstance(node, ast.Call) else None
            if isinstance(call, ast.Attribute) and call.attr in LOADS:
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
