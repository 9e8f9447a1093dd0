"""What each remat policy keeps of a layer, and what it computes again."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.model import decoder, remat
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig

CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM", vocab_size=37, num_layers=3, model_dim=24, mlp_dim=56,
    num_heads=4, num_kv_heads=2, head_dim=8, tie_embeddings=True,
)  # fmt: skip
ROWS, TOKENS = 2, 20
FLOATS = {
    "qkv": 32 + 2 * 16,
    "attention": 32 + 4,
    "o": 24,
    "gate": 56,
    "up": 56,
}  # of a token of a layer


def states(kept, params):
    tokens = jnp.arange(ROWS * TOKENS, dtype=jnp.int32).reshape(ROWS, TOKENS) % 37
    positions = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": jnp.ones_like(tokens)}
    return decoder.states(params, CONFIG, batch, remat=kept)[0]


@pytest.mark.parametrize("kept", remat.KEPT)
def test_a_layer_keeps_its_input_and_what_is_named(kept):
    shapes = parameters.shapes(CONFIG)
    saved = jax.eval_shape(lambda params: jax.vjp(partial(states, kept), params)[1], shapes)
    weights = Counter(leaf.shape for leaf in jax.tree.leaves(shapes))
    found = Counter(leaf.shape for leaf in jax.tree.leaves(saved) if leaf.ndim > 2)
    of_layers = [shape for shape in (found - weights).elements() if shape[0] == CONFIG.num_layers]
    floats = sum(map(np.prod, of_layers)) / (CONFIG.num_layers * ROWS * TOKENS)
    assert floats == CONFIG.model_dim + sum(FLOATS[name] for name in remat.KEPT[kept])


def test_products_are_computed_again_as_the_table_says():
    """FLOPs of a layer's backward pass beyond those of `none`, to what is elementwise."""
    params = parameters.init(CONFIG, jax.random.key(0))

    def flops(kept):
        run = jax.jit(jax.grad(lambda params: jnp.sum(states(kept, params))))
        return run.lower(params).compile().cost_analysis()["flops"]

    none, *again = (flops(kept) for kept in ("none", *remat.KEPT))
    tokens, wide, mlp, q = ROWS * TOKENS, 24, 56, 32
    o_gate = tokens * (2 * q * wide + 2 * wide * mlp)
    o_gate_up = o_gate + tokens * 2 * wide * mlp
    qkv = tokens * 2 * wide * FLOATS["qkv"]
    attention = tokens * 2 * 2 * q * TOKENS  # one block of queries: nothing of it is skipped
    wanted = np.array([0, o_gate, o_gate_up, o_gate_up + qkv + attention])
    assert np.abs(np.array(again) - none - wanted).max() < 0.03 * none


def test_gradients_do_not_depend_on_it():
    params = parameters.init(CONFIG, jax.random.key(0))
    grads = [
        jax.jit(jax.grad(lambda params, kept=kept: jnp.sum(jnp.sin(states(kept, params)))))(params)
        for kept in ("none", *remat.KEPT)
    ]
    for other in grads[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads[0], other
        )
