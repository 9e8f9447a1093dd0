"""A step that computes in bfloat16, as it is lowered: what is rounded, and what is not."""

import re
from collections import Counter

import jax
import pytest


@pytest.fixture
def lowered(trainer, params, make_groups, monkeypatch):
    """The text of an update's step in bfloat16, and the state after it."""
    narrow, texts = trainer(**{"model.compute_dtype": "bfloat16"}), []
    programs = narrow._programs

    def step(*arguments):
        texts.append(programs.step.lower(*arguments).as_text())
        return programs.step(*arguments)

    monkeypatch.setattr(narrow, "_programs", programs._replace(step=step))
    state, _ = narrow.update(narrow.init(params), make_groups())
    return texts[0], state


def kinds(pattern, text):
    """How often the operation has each sequence of element types."""
    lines = re.findall(pattern, text)
    return Counter(tuple(re.findall(r"tensor<(?:\d+x)*(\w+)>", line)) for line in lines)


def test_products_are_of_bfloat16_and_return_float32(lowered):
    found = kinds(r"dot_general.*: (\(.*\) -> .*)", lowered[0])
    assert found["bf16", "bf16", "f32"] > 0.9 * found.total() > 20, found
    assert not [sides for sides in found if sides[2] == "bf16"], found


def test_logits_are_float32(lowered):
    heads = re.findall(r"dot_general.*x16xbf16>, tensor<(?:16x32|32x16)xbf16>\) -> .*", lowered[0])
    assert heads, "the products of 16 wide states and 32 words"
    assert all(line.endswith("x32xf32>") for line in heads), heads


def test_sums_roots_and_exponentials_are_float32(lowered):
    sums = kinds(r"reduce\(.*applies stablehlo.add.*(-> .*)", lowered[0])
    assert sums[("f32",)] > 10
    assert not [kind for kind in sums if "bf16" in kind]
    roots = kinds(r"stablehlo\.(?:sqrt|rsqrt|log) .*(: .*)", lowered[0])
    assert roots[("f32",)] > 5
    assert len(roots) == 1, roots
    softmax = kinds(r"stablehlo\.exponential .*(: .*)", lowered[0])
    assert softmax[("f32",)] > softmax[("bf16",)] == 2, "SiLU's, and its gradient's"


def test_parameters_and_moments_stay_float32(lowered):
    leaves = jax.tree.leaves((lowered[1].params, lowered[1].opt_state))
    assert {leaf.dtype.name for leaf in leaves} == {"float32", "int32"}
