"""Blocks of rows against every expert on every row: the same sums and gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.model import experts
from rlx.model.model_config import ModelConfig
from rlx.model.params import MLP
from rlx.model.sharding import ONE_DEVICE

MIXTURE = ModelConfig(
    architecture="Qwen3MoeForCausalLM", vocab_size=32, num_layers=2, model_dim=16, mlp_dim=32,
    num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True, num_experts=8, experts_per_token=2,
    expert_dim=12, norm_topk_prob=True,
)  # fmt: skip


@pytest.mark.parametrize("tokens", [7, 600])
@pytest.mark.parametrize("skew", [0.0, 30.0])  # of the router, to one expert
@pytest.mark.parametrize("norm", [True, False])
def test_blocks_give_the_sums_and_the_gradients_of_all_rows(tokens, skew, norm):
    config = replace(MIXTURE, norm_topk_prob=norm)
    keys = jax.random.split(jax.random.key(tokens), 6)
    shapes = {"gate": (8, 16, 12), "up": (8, 16, 12), "down": (8, 12, 16)}
    layer = {
        f"expert_{name}": 0.3 * jax.random.normal(key, shapes[name])
        for name, key in zip(MLP, keys[:3], strict=True)
    }
    x, logits = (
        jax.random.normal(k, (1, tokens, n)) for k, n in zip(keys[3:5], (16, 8), strict=True)
    )
    logits = logits.at[..., 3].add(skew)
    valid = jnp.arange(tokens)[None] < tokens - 2
    wanted = jax.random.normal(keys[5], x.shape)

    def all_rows(layer, x, logits):
        chances = jax.nn.softmax(logits[0])
        chosen, expert = jax.lax.top_k(chances, config.experts_per_token)
        chosen = chosen / chosen.sum(-1, keepdims=True) if norm else chosen
        weights = jnp.einsum("nk,nke->ne", chosen, jax.nn.one_hot(expert, config.num_experts))
        gate, up = (
            jnp.einsum("nd,edf->enf", x[0], layer[f"expert_{name}"]) for name in ("gate", "up")
        )
        every = jnp.einsum("enf,efd->end", jax.nn.silu(gate) * up, layer["expert_down"])
        return jnp.einsum("end,ne->nd", every, weights * valid[0][:, None])[None]

    def in_blocks(layer, x, logits):
        return experts.mixture(layer, config, x, logits, valid, ONE_DEVICE)[0]

    def found(function):
        def loss(*given):
            y = function(*given)
            return jnp.sum(y * wanted), y

        run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return jax.tree.leaves(jax.jit(run)(layer, x, logits))

    whole, blocks = found(all_rows), found(in_blocks)
    assert len(whole) == 7
    for a, b in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(a).max()))
    assert np.all(np.asarray(blocks[1])[0, -2:] == 0), "padding has no expert"


@pytest.mark.parametrize(("here", "total"), [(8, 8), (2, 8)])
def test_each_slot_of_an_own_expert_is_in_one_block_of_that_expert(here, total):
    rng = np.random.default_rng(0)
    own = np.minimum(rng.integers(0, total, 5000) % 5, here).astype(np.int32)
    blocks, even = experts._blocks(jnp.asarray(own), here, total)
    used = int(blocks.used)
    slots, expert = np.asarray(blocks.slots), np.asarray(blocks.experts)
    assert np.all(slots[used:] == len(own))
    rows, columns = np.nonzero(slots.reshape(-1, slots.shape[-1]) < len(own))
    held = slots.reshape(-1, slots.shape[-1])[rows, columns]
    assert sorted(held) == list(np.nonzero(own < here)[0])
    assert np.array_equal(own[held], expert.reshape(-1)[rows])
    assert 1 <= even <= len(slots)
