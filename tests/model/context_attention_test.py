"""Attention of rows whose tokens are on several devices: the axis of a vmap stands for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.model import attention as module
from rlx.model.attention import attention

BATCH, TOKENS, WIDTH = 2, 48, 8
IDS = np.array([np.repeat([1, 2, 0], [20, 17, 11]), np.repeat([1, 2], [1, 47])], np.int32)
WHOLE = np.stack([np.repeat(1, TOKENS)] * BATCH).astype(np.int32)


def blocks_of(devices):
    """Token of the row at each of the places that the devices have, one after the other."""
    blocks = np.arange(TOKENS).reshape(2 * devices, -1)
    return np.concatenate([blocks[[i, -1 - i]].ravel() for i in range(devices)])


def with_gradients(function, q, k, v, weights):
    mixed, pull = jax.vjp(function, q, k, v)
    return mixed, *pull(weights)


def with_sharded_tokens(*arrays, ids, devices, **options):
    order = blocks_of(devices)
    cut = [x[:, order].reshape(BATCH, devices, -1, *x.shape[2:]) for x in arrays]
    own = partial(module.over_context, segment_ids=ids[:, order], devices=devices, **options)
    run = jax.vmap(partial(with_gradients, own), in_axes=1, out_axes=1, axis_name=module.CONTEXT)
    joined = (x.reshape(BATCH, TOKENS, *x.shape[3:]) for x in run(*cut))
    return [x[:, np.argsort(order)] for x in joined]


@pytest.mark.parametrize(
    ("devices", "heads", "key_heads", "tile", "ids", "options"),
    [
        (2, 4, 2, 512, IDS, {"window": 0, "softcap": 0.0}),
        (4, 2, 2, 4, IDS, {"window": 7, "softcap": 0.0}),
        (3, 3, 1, 3, WHOLE, {"window": 4, "softcap": 1.0}),
        (2, 3, 1, 3, WHOLE, {"window": 3, "softcap": 0.0}),
    ],
)
def test_it_is_attention(monkeypatch, devices, heads, key_heads, tile, ids, options):
    """Forward and backward: grouped heads, segments, padding, several tiles a block, windows."""
    monkeypatch.setattr(module, "TILE", tile)
    rng = np.random.default_rng(devices)
    shapes = [(BATCH, TOKENS, n, WIDTH) for n in (heads, key_heads, key_heads, heads)]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    ours = jax.jit(partial(with_sharded_tokens, ids=ids, devices=devices, **options))(*arrays)
    wanted = with_gradients(partial(attention, segment_ids=ids, **options), *arrays)
    for own, one in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(own, one, atol=1e-5)
