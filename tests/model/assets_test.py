"""The model that comes with the package: whole, small, loadable, and as far as it should be."""

import importlib.util
import os
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.base import UserError
from rlx.model import hf
from rlx.rollout import arithmetic

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "experiments" / "2026-11-arithmetic"


@pytest.fixture(scope="module")
def directory() -> Path:
    return hf.resolve("rlx:arithmetic")


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def recipe():
    """The modules of the recipe, imported as its scripts import each other."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield {name: importlib.import_module(name) for name in ("demonstrations", "sft")}
    finally:
        sys.path.remove(str(RECIPE))


def prompt_ids(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_resolves_from_any_directory(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hf.resolve("rlx:arithmetic") == directory
    with pytest.raises(UserError, match="did you mean 'rlx:arithmetic'"):
        hf.resolve("rlx:arithmetics")


def test_is_small_and_whole(directory):
    names = {file.name for file in directory.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 4e6


def test_tokenizer_speaks_chatml_and_reads_any_text(tokenizer):
    ids = prompt_ids(tokenizer, "47a+38b-6=?")
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\n47a+38b-6=?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(ids) == len("47a+38b-6=?") + 8  # a role is one token, a digit is one token
    text = "Größe 12,345 日本\tuser \\boxed{7} <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_problem_and_its_careful_solution_fit_the_config(tokenizer):
    spec = importlib.util.spec_from_file_location(
        "arithmetic_config", ROOT / "configs/arithmetic.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    letters = string.ascii_lowercase[: arithmetic.MAX_OPERANDS - 1]
    terms = [f"{letter}{'-+'[n % 2]}49" for n, letter in enumerate(letters)]
    longest_question = f"99{''.join(terms)}=?"
    assert len(prompt_ids(tokenizer, longest_question)) <= config.data.max_prompt_tokens
    solution = tokenizer.encode(arithmetic.careful_solution(longest_question))
    assert len(solution) + 1 <= config.sampling.max_new_tokens


@pytest.mark.torch
def test_loads_in_transformers_with_the_same_logits(directory, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    from tests.fixtures.model import logits_of_rows

    ids = np.array([prompt_ids(tokenizer, "47a+38b-6=?")], np.int32)
    theirs_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert set(theirs_model.generation_config.eos_token_id) >= {tokenizer.eos_token_id}
    with torch.no_grad():
        theirs = theirs_model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    config, params = hf.load(directory)
    assert tokenizer.eos_token_id in config.eos_token_ids
    np.testing.assert_allclose(logits_of_rows(params, config, ids), theirs, atol=1e-4)


def test_knows_the_method_but_mostly_gives_up(directory, tokenizer, recipe):
    # Above 0.55 there is nothing to learn; without the method RL would have to find it.
    config, params = hf.load(directory)
    questions = [row["question"] for row in arithmetic.problems(0, "held_out", 200)]
    measured = recipe["sft"].make_measure(config, tokenizer, questions)(params)
    assert 0.25 <= measured["greedy_careful"] <= 0.55
    assert measured["method"] >= 0.95
    assert measured["sampled_careful"] >= 0.2


def test_a_careful_demonstration_is_the_careful_solution(recipe, monkeypatch):
    import random

    demonstrations = recipe["demonstrations"]
    monkeypatch.setattr(demonstrations, "give_up", lambda *step: 0.0)
    question = "47a+38b-6=?"
    careful = arithmetic.careful_solution(question)
    assert demonstrations.draw(question, random.Random(0)) == careful
    monkeypatch.setattr(demonstrations, "give_up", lambda *step: 1.0)
    assert demonstrations.draw(question, random.Random(0)).startswith(":47\na+38~\\boxed{")


@pytest.mark.slow
def test_the_recipe_runs_and_gives_the_same_weights_again(tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    for out in outs:
        subprocess.run(
            [sys.executable, str(RECIPE / "sft.py"), f"--out={out}", "--steps=2"],
            check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        )  # fmt: skip
    first, second = ((out / "model.safetensors").read_bytes() for out in outs)
    assert first == second
    assert (outs[0] / "tokenizer.json").exists()
