"""FLOPs of a forward pass, counted product by product."""

import dataclasses

import numpy as np
import pytest

from rlx.model.model_config import ModelConfig
from rlx.model.params import attention_cost, forward_flops

DENSE = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=50, num_layers=3, model_dim=16, mlp_dim=24, num_heads=4,
    num_kv_heads=2, head_dim=6, attention_bias=True,
)  # fmt: skip
LENGTHS = np.array([7, 1, 12])


def by_products(model, lengths, mlp_dim, head=True):
    """2 · rows · columns · inner of each matrix product of each token, and of its keys."""
    total, heads = 0, model.num_heads * model.head_dim
    for size in lengths:
        for token in range(size):
            for window in model.layer_windows:
                pairs = [(16, heads), (16, 12), (16, 12), (heads, 16), (16, mlp_dim)]
                pairs += [(16, mlp_dim), (mlp_dim, 16)]
                total += sum(2 * rows * columns for rows, columns in pairs)
                seen = min(token + 1, window or token + 1)
                total += 2 * (2 * seen * heads)  # scores, and the mean of the values
            total += head * 2 * 16 * model.vocab_size
    return total


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_looked_up_and_a_head_multiplied(tied):
    model = dataclasses.replace(DENSE, tie_embeddings=tied)
    assert forward_flops(model, LENGTHS) == by_products(model, LENGTHS, 24)


def test_a_window_hides_keys():
    model = dataclasses.replace(DENSE, windows=(0, 4, 9))
    assert forward_flops(model, LENGTHS) == by_products(model, LENGTHS, 24)
    assert forward_flops(model, LENGTHS) < forward_flops(DENSE, LENGTHS)


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_no_head(tied):
    model = dataclasses.replace(DENSE, value_head=True, tie_embeddings=tied)
    assert forward_flops(model, LENGTHS) == by_products(model, LENGTHS, 24, head=False)


def test_a_token_uses_its_experts_only():
    model = dataclasses.replace(
        DENSE, architecture="Qwen3MoeForCausalLM", attention_bias=False, qk_norm=True,
        num_experts=8, experts_per_token=2, expert_dim=10,
    )  # fmt: skip
    router = 2 * 16 * 8 * 3 * LENGTHS.sum()
    assert forward_flops(model, LENGTHS) == by_products(model, LENGTHS, 20) + router
    dense = dataclasses.replace(DENSE, mlp_dim=20)
    assert attention_cost(model) == pytest.approx(attention_cost(dense), rel=0.1)
