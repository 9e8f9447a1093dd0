"""The decoder's KV cache. Pure.

Keys are [head_dim, length] and values [length, head_dim], to be read in order by attention. Shapes
as in decode.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlx.model.model_config import ModelConfig
from rlx.model.ops import on_cpu


class LayerCache(NamedTuple):
    """A layer's keys [S, K, H, N] and values [S, K, N, H]; both [S, K, R, H] of a decode call."""

    keys: jax.Array
    values: jax.Array


Cache = tuple[LayerCache, ...]


def init_cache(config: ModelConfig, slots: int, length: int, dtype: Any) -> Cache:
    """Return an empty cache for `slots` sequences of `length` tokens."""
    keys = (slots, config.num_kv_heads, config.head_dim, length)
    values = (slots, config.num_kv_heads, length, config.head_dim)
    return tuple(
        LayerCache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))
        for _ in range(config.num_layers)
    )


def init_recent(config: ModelConfig, slots: int, steps: int, dtype: Any) -> Cache:
    """Return an empty cache for the tokens of one decode call."""
    empty = jnp.zeros((slots, config.num_kv_heads, steps, config.head_dim), dtype)
    return tuple(LayerCache(empty, empty) for _ in range(config.num_layers))


def write(old: jax.Array, block: jax.Array, start: Sequence[Any]) -> jax.Array:
    """Return `old` with `block` at indices `start`."""
    # As bits: XLA's CPU backend would convert a whole bfloat16 array to float32 and back, up to JAX
    # 0.12, where bits take ten times as long.
    if old.dtype != jnp.bfloat16 or not on_cpu() or jax.__version_info__ >= (0, 12):
        return jax.lax.dynamic_update_slice(old, block, start)
    bits = old.view(jnp.uint16), block.view(jnp.uint16)
    return jax.lax.dynamic_update_slice(bits[0], bits[1], start).view(old.dtype)


def insert(cache: Cache, prompts: Cache, pairs: jax.Array, count: jax.Array) -> Cache:
    """Copy `prompts`, from `prefill` or `take` with T ≤ N, into slots.

    The first `count` of `pairs`, [S, 2] int32, are (row of `prompts`, slot).
    """

    def fill(index, cache):
        def put(old, new):
            block = jax.lax.dynamic_slice_in_dim(new, pairs[index, 0], 1)
            return write(old, block, (pairs[index, 1], 0, 0, 0))

        return jax.tree.map(put, cache, prompts)

    return jax.lax.fori_loop(0, count, fill, cache)


def take(cache: Cache, slot: jax.Array) -> Cache:
    """Return a copy of one slot, as a prompt for `insert`."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, slot, 1), cache)


def append(cache: Cache, recent: Cache, positions: jax.Array, past_end: bool = False) -> Cache:
    """Write `recent` [B, K, R, H], from `decode`, to the first B slots at `positions` [B].

    On a CPU a write that reaches past the cache's end is shifted back, over earlier tokens. Without
    `past_end` only a sequence that has ended may reach that far; such a write need not be kept.
    """
    slots, steps = recent[0].keys.shape[0], recent[0].keys.shape[2]
    if past_end or not on_cpu():  # a kernel for each array; the loop has one for each slot too
        at = jnp.arange(slots)[:, None], positions[:, None] + jnp.arange(steps)
        return tuple(
            LayerCache(
                old.keys.at[at[0], :, :, at[1]].set(new.keys.swapaxes(1, 2), unique_indices=True),
                old.values.at[at[0], :, at[1]].set(new.values.swapaxes(1, 2), unique_indices=True),
            )
            for old, new in zip(cache, recent, strict=True)
        )

    def fill(slot, cache):
        def put(old, new, axis):
            block = jax.lax.dynamic_slice_in_dim(new, slot, 1)
            start = [slot, 0, 0, 0]
            start[axis] = positions[slot]
            return write(old, block, start)

        return tuple(
            LayerCache(put(old.keys, new.keys.mT, 3), put(old.values, new.values, 2))
            for old, new in zip(cache, recent, strict=True)
        )

    return jax.lax.fori_loop(0, slots, fill, cache)


def view(cache: Cache, slots: int, length: int) -> Cache:
    """Return the first `slots` slots and `length` positions of a cache."""
    return tuple(
        LayerCache(layer.keys[:slots, :, :, :length], layer.values[:slots, :, :length])
        for layer in cache
    )
