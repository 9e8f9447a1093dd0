"""Causal self-attention within the segments of packed rows.

Queries are taken a block at a time, each against the keys up to its end. The backward pass
recomputes scores from the row's log-normaliser (FlashAttention, arXiv 2205.14135), so that nothing
of size T² is kept. Half precision on NVIDIA GPUs uses cuDNN, which has no float32 kernel.
"""

import math
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from rlx.model.model_config import kernel_fits
from rlx.model.ops import result_dtype, softcap_slope, softcapped
from rlx.model.packed_attention import LARGEST_OFFSET, packed_attention
from rlx.model.sharding import ONE_DEVICE, Layout, target_device

QUERY_BLOCK = 256  # rows of scores at one time; more where that would make over 16 blocks
MASKED = -1e30  # finite: −inf − −inf would be NaN in an empty row


def attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    segment_sizes: Array | None = None,
    layout: Layout = ONE_DEVICE,
    window: int = 0,
    softcap: float = 0.0,
    tree: tuple[Array, Array] | None = None,
) -> Array:
    """Return softmax(q·k / √H) v over the segment's tokens so far; softmax in float32.

    At padding (segment 0) the result is finite and has no gradient.

    Args:
      q: [B, T, N, H]; k, v: [B, T, K, H], N a multiple of K (query head n reads k/v head n·K//N).
      segment_ids: [B, T] int32.
      segment_sizes: [B, M] int32, see `packed_attention`; needed where `attention_kind` is packed.
      layout: of the activations on a mesh.
      window: how many tokens a query sees at most, its own included; 0: all of its segment.
      softcap: c where scores are c · tanh(q·k / √H / c); 0: not.
      tree: ends and positions, [B, T] int32 each, where rows hold trees depth first in place of
        segments: a token sees another that is not after it, and whose end is. None: segments.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    window = window if window < q.shape[1] else 0
    how = attention_kind(q.dtype, q.shape[-1], softcap)
    if tree is not None:
        how = "blocks"
    elif how == "packed" and (
        segment_sizes is None or q.size // layout.row_shards >= LARGEST_OFFSET
    ):
        how = "mask"
    return {
        "packed": lambda: packed_attention(q, k, v, cast(Array, segment_sizes), layout, window),
        "mask": lambda: _masked(q, k, v, segment_ids, window),
        "blocks": lambda: _in_blocks(q, k, v, tree or (segment_ids,), window, softcap),
    }[how]()


def attention_kind(dtype: Any, head_dim: int, softcap: float = 0.0) -> str:
    """Return how the target device computes attention: packed | mask | blocks."""
    # cuDNN's packed kernel needs Hopper; before it, and without segment sizes, cuDNN takes a mask.
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if not half or not kernel_fits(head_dim, softcap) or not cuda_capability():
        return "blocks"
    return "packed" if cuda_capability() >= (9, 0) else "mask"


def cuda_capability() -> tuple[int, ...]:
    """Return the compute capability of the target device, such as (9, 0); () without CUDA."""
    device = target_device()
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        return ()
    return tuple(int(part) for part in device.compute_capability.split("."))


def seen(at: Array, other: Array, window: int) -> Array:
    """Return whether the query at position `at` sees the key at `other`, both in one segment."""
    before = at - other
    return (before >= 0) & (before < window) if window else before >= 0


def _masked(q: Array, k: Array, v: Array, segment_ids: Array, window: int) -> Array:
    places = jnp.arange(q.shape[1])
    mask = seen(places[:, None], places, window)
    mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")


def _in_blocks(
    q: Array, k: Array, v: Array, where: tuple[Array, ...], window: int, softcap: float
) -> Array:
    batch, length, heads, width = q.shape
    groups = heads // k.shape[2]
    q = (q * width**-0.5).reshape(batch, length, -1, groups, width).transpose(0, 2, 3, 1, 4)
    mixed = _mix(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), where, window, softcap)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix(
    q: Array, k: Array, v: Array, where: tuple[Array, ...], window: int, softcap: float
) -> Array:
    """Attend with heads before tokens: q [B, K, G, T, H] (scaled), k, v [B, K, T, H]."""
    return _mix_forward(q, k, v, where, window, softcap)[0]


def _mix_forward(q, k, v, where, window, softcap):
    mixed, normalisers = [], []
    for rows, look in _blocks(q.shape[3], window * (len(where) == 1)):
        keys, values = k[:, :, look], v[:, :, look]
        scores = _scores(q[:, :, :, rows], keys, where, rows, look, window, softcap)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        block = apply(weights.astype(v.dtype), values)
        mixed.append((block / total).astype(q.dtype))
        normalisers.append(highest + jnp.log(total))
    mixed = checkpoint_name(_join(mixed), "attention")
    normaliser = checkpoint_name(_join(normalisers), "attention")
    return mixed, (q, k, v, where, mixed, normaliser)


def _mix_backward(window, softcap, kept, grad):
    q, k, v, where, mixed, normaliser = kept
    wide = grad.astype(jnp.float32) * mixed.astype(jnp.float32)
    along = jnp.sum(wide, axis=-1, keepdims=True)
    grad_q, grad_k, grad_v = [], jnp.float32(0), jnp.float32(0)
    for rows, look in _blocks(q.shape[3], window * (len(where) == 1)):
        keys, values = k[:, :, look], v[:, :, look]
        scores = _scores(q[:, :, :, rows], keys, where, rows, look, window, softcap)
        weights = jnp.exp(scores - normaliser[:, :, :, rows])
        pull = grad[:, :, :, rows]
        grad_weights = inner(pull, values, result_dtype(q.dtype, pull.size * values.shape[2]))
        grad_scores = weights * (grad_weights - along[:, :, :, rows])
        grad_scores = (grad_scores * softcap_slope(scores, softcap)).astype(q.dtype)
        grad_q.append(apply(grad_scores, keys).astype(q.dtype))
        beyond = ((0, 0), (0, 0), (look.start, k.shape[2] - look.stop), (0, 0))
        grad_k += jnp.pad(gather(grad_scores, q[:, :, :, rows]), beyond)
        grad_v += jnp.pad(gather(weights.astype(q.dtype), grad[:, :, :, rows]), beyond)
    return _join(grad_q), grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_mix.defvjp(_mix_forward, _mix_backward)


def _blocks(length: int, window: int) -> list[tuple[slice, slice]]:
    """Return the query blocks, and the keys that each looks at."""
    block = max(QUERY_BLOCK, math.ceil(length / 16))
    rows = [slice(start, min(start + block, length)) for start in range(0, length, block)]
    return [(r, slice(max(r.start + 1 - window, 0) if window else 0, r.stop)) for r in rows]


def _scores(q, keys, where, rows: slice, look: slice, window: int, softcap: float) -> Array:
    """Return masked scores [B, K, G, block, S] float32 of the query block `rows`."""
    at, other = jnp.arange(rows.start, rows.stop)[:, None], jnp.arange(look.start, look.stop)
    if len(where) == 1:
        (segment_ids,) = where
        mask = seen(at, other, window)
        mask = mask & (segment_ids[:, rows, None] == segment_ids[:, None, look])
    else:
        ends, positions = where
        mask = seen(positions[:, rows, None], positions[:, None, look], window)
        mask = mask & (at >= other) & (at < ends[:, None, look])
    return jnp.where(mask[:, None, None], softcapped(inner(q, keys), softcap), MASKED)


# The query heads of one key head are further rows of one matrix. In this form XLA uses its fast
# batched product on a CPU.
def inner(rows: Array, keys: Array, dtype: Any = jnp.float32) -> Array:
    """Multiply [B, K, G, Q, H] · [B, K, S, H] → [B, K, G, Q, S] in `dtype`."""
    flat = jnp.einsum("bkqh,bksh->bkqs", _flat(rows), keys, preferred_element_type=dtype)
    return flat.reshape(*rows.shape[:-1], keys.shape[2])


def apply(weights: Array, values: Array) -> Array:
    """Multiply [B, K, G, Q, S] · [B, K, S, H] → [B, K, G, Q, H] float32."""
    dtype = result_dtype(values.dtype, weights.size * values.shape[3])
    flat = jnp.einsum("bkqs,bksh->bkqh", _flat(weights), values, preferred_element_type=dtype)
    return flat.astype(jnp.float32).reshape(*weights.shape[:-1], values.shape[3])


def gather(weights: Array, rows: Array) -> Array:
    """Sum over query heads and rows: [B, K, G, Q, S] · [B, K, G, Q, H] → [B, K, S, H] float32."""
    return jnp.einsum(
        "bkqs,bkqh->bksh", _flat(weights), _flat(rows), preferred_element_type=jnp.float32
    )


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _join(blocks: list[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=3)
