"""The second model that comes with the package: small, with tools, and as far as it should be."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.model import hf
from rlx.model.directory import resolve
from rlx.run.tokenizer_files import load_tokenizer
from tests.fixtures.model import logits_of_rows

RECIPE = Path(__file__).parents[2] / "experiments" / "2026-11-tools"
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def directory():
    return resolve("rlx:calculator")


@pytest.fixture(scope="module")
def recipe():
    """The modules of the recipe, imported as its scripts import each other.

    Another recipe's modules have the same names, so neither is left behind nor found.
    """
    names = ("demonstrations", "make_model")
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(RECIPE))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(RECIPE))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def test_is_small_and_has_the_recipe_s_tokenizer(directory, recipe):
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 4e6
    ours, theirs = load_tokenizer(directory), recipe["make_model"].tokenizer()
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template


def test_its_template_has_tools_as_the_demonstrations_spell_them(directory, recipe):
    tokenizer, ask = load_tokenizer(directory), {"role": "user", "content": "12*3=?"}
    call = {"name": "calculator", "arguments": {"expression": "12*3"}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    spelt = {"role": "assistant", "content": recipe["demonstrations"]._call("12*3")}
    output = {"role": "tool", "content": "36"}
    listed = tokenizer.apply_chat_template([ask, said, output], tools=TOOLS, tokenize=False)
    assert listed == tokenizer.apply_chat_template(
        [recipe["demonstrations"].TOOLS, ask, spelt, output], tokenize=False
    )


def test_it_can_call_but_mostly_does_not(directory):
    # Were calls likely from the beginning there would be nothing to learn; were there none, no way.
    tokenizer, (config, params) = load_tokenizer(directory), hf.load(directory)

    def call_chance(question):
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
        )
        ids = np.array([tokenizer.encode(text)], np.int32)
        logits = np.asarray(logits_of_rows(params, config, ids))[0, -1].astype(float)
        chances = np.exp(logits - logits.max())
        return (chances / chances.sum())[tokenizer.convert_tokens_to_ids("<tool_call>")]

    sums = [call_chance(f"{a}+{b}=?") for a, b in ((739, 4811), (51234, 872), (907, 333))]
    assert 0.05 < np.mean(sums) < 0.5
    assert call_chance("3+4=?") < 0.1
    assert call_chance("calculator:739+48=?") > 0.9
