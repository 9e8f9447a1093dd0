"""Causal self-attention within the segments of packed rows."""

import math

import jax
import jax.numpy as jnp


def causal_segment_mask(segment_ids: jax.Array) -> jax.Array:
    """[B, T, T] bool: query t sees key s when s ≤ t and both are of one segment.

    Padding (segment 0) attends to itself, so no row of the softmax is empty.
    """
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """softmax(q·k / √H) v over earlier tokens of the same segment; softmax in float32.

    Args:
      q: [B, T, N, H]; k, v: [B, T, K, H], N a multiple of K (query head n reads k/v head n·K//N).
      segment_ids: [B, T] int32.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    mask = causal_segment_mask(segment_ids)[:, None, None]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores / math.sqrt(width), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return mixed.reshape(batch, length, heads, width)
