"""Causal self-attention within the segments of packed rows.

Queries and keys are taken a block at a time, without pairs of blocks that see nothing of each
other. The backward pass recomputes scores from the row's log-normaliser (FlashAttention, arXiv
2205.14135), so that nothing of size T² is kept. Half precision on NVIDIA GPUs uses cuDNN, which has
no float32 kernel.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from rlx.model.mesh import ROWS
from rlx.model.model_config import kernel_fits
from rlx.model.ops import result_dtype, softcap_slope, softcapped
from rlx.model.packed_attention import LARGEST_OFFSET, packed_attention
from rlx.model.sharding import ONE_DEVICE, Layout, row_order, target_device

QUERY_BLOCK = 256  # rows of scores at one time; more where that would make over 16 blocks
CONTEXT = "context"  # the axis of a mesh that cuts the tokens of rows
TILE = 512  # most tokens of a tile of queries, and of one of keys, over that axis
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

    The result, [B, T, N, H] of q's dtype, is finite and has no gradient at padding (segment 0).

    Args:
      q: [B, T, N, H]; k, v: [B, T, K, H], N a multiple of K (query head n reads k/v head n·K//N).
      segment_ids: [B, T] int32.
      segment_sizes: [B, M] int32, of segments or of trees' chains, see `packed_attention`; needed
        where `attention_kind` is packed.
      layout: of the activations on a mesh.
      window: how many tokens a query sees at most, its own included; 0: all of its segment.
      softcap: c where scores are c · tanh(q·k / √H / c); 0: not.
      tree: ends and positions, [B, T] int32 each, where rows hold trees depth first in place of
        segments: a token sees another that is not after it, and whose end is. None: segments.
    """
    length = q.shape[1]
    window = window if window < length else 0
    how = attention_kind(q.dtype, q.shape[-1], softcap)
    if how == "packed" and (segment_sizes is None or q.size // layout.row_shards >= LARGEST_OFFSET):
        how = "mask"
    if tree is not None and (how == "mask" or window):
        how = "blocks"
    if how == "packed":
        assert segment_sizes is not None
        return packed_attention(q, k, v, segment_sizes, layout, window, tree and tree[1])
    if how == "mask":
        places = jnp.arange(length)
        mask = is_seen(places[:, None], places, window)
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    size = math.ceil(length / min(math.ceil(length / QUERY_BLOCK), 16))
    at, skips = jnp.arange(math.ceil(length / size)), layout.mesh is None
    tree = tree or segments(segment_ids)
    return in_blocks(q, k, v, tree, at, at, size, window, softcap, skips, None)


def attention_kind(dtype: Any, head_dim: int, softcap: float = 0.0) -> str:
    """Return how the target device computes attention: packed | mask | blocks."""
    # cuDNN's packed kernel needs Hopper; before it, and without segment sizes, cuDNN takes a mask.
    half, capability = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16), cuda_capability()
    if not half or not capability or not kernel_fits(head_dim, softcap, capability):
        return "blocks"
    return "packed" if capability >= (9, 0) else "mask"


def tree_error(heads: int, kv_heads: int, width: int, dtype: Any) -> float:
    """Return how far this device's attention over trees is from that by blocks.

    The larger of ‖x − blocks‖ / ‖blocks‖ of the output and of the gradients of q, k and v.
    """
    chains = ((0, 24), (16, 28), (8, 16), (0, 10), (4, 14))  # positions: two trees of 64 tokens
    positions = jnp.concatenate([jnp.arange(*chain) for chain in chains])[None]
    counts = jnp.array([8, 8, 8, 12, 8, 4, 6, 10])
    ends = jnp.repeat(jnp.array([44, 36, 24, 36, 44, 64, 54, 64]), counts)[None]
    sizes = jnp.array([[stop - start for start, stop in chains]], jnp.int32)
    q, k, v, pull = (
        jax.random.normal(jax.random.key(i), (1, 64, n, width), dtype)
        for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    )

    @jax.jit
    def both_passes(sizes: Array | None) -> list[Array]:
        attend = partial(attention, segment_ids=ends, segment_sizes=sizes, tree=(ends, positions))
        out, back = jax.vjp(attend, q, k, v)
        return [x.astype(jnp.float32) for x in (out, *back(pull))]

    trees, blocks = both_passes(sizes), both_passes(None)
    norm = jnp.linalg.norm
    return max(float(norm(a - b) / norm(b)) for a, b in zip(trees, blocks, strict=True))


def cuda_capability() -> tuple[int, ...]:
    """Return the compute capability of the target device, such as (9, 0); () without CUDA."""
    device = target_device()
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        return ()
    return tuple(int(part) for part in device.compute_capability.split("."))


def is_seen(at: Array, other: Array, window: int) -> Array:
    """Return whether the query at position `at` sees the key at `other`, both in one segment."""
    before = at - other
    return (before >= 0) & (before < window) if window else before >= 0


def in_blocks(
    q: Array,  # [B, t, N, H], of some blocks of the rows
    k: Array,  # k, v: [B, T, K, H], of all, or of some likewise
    v: Array,
    tree: tuple[Array, Array],  # ends and positions, [B, T] or [1, T], as of `attention`
    at: Array,  # [n] int32, which of the rows' blocks q has
    places: Array,  # [m] int32, where k, gathered over `axis`, has each of the rows' blocks
    size: int,  # tokens of a block
    *how: Any,  # window, softcap, skips, axis: as of `_mix`
) -> Array:
    """Return attention of blocks of queries, [B, t, N, H], without anything of size T²."""
    batch, length, heads, width = q.shape

    def cut(x: Array) -> Array:  # [B, T, …] → [blocks, B, size, …]
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    rows = cut(q * width**-0.5).reshape(len(at), batch, size, k.shape[2], -1, width)
    keys, values = (jnp.moveaxis(cut(x), 3, 2) for x in (k, v))
    where = (*map(cut, tree), at, places)
    mixed = _mix(rows.transpose(0, 1, 3, 4, 2, 5), keys, values, where, *how)
    mixed = mixed.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, width)
    return mixed[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _mix(
    q: Array, k: Array, v: Array, where: Any, window: int, softcap: float, skips: bool,
    axis: str | None,
) -> Array:  # fmt: skip
    """Attend in blocks: q [n, B, K, G, size, H], which is scaled; k and v [m, B, K, size, H].

    `where` are ends and positions, [m, B, size], which of the m each of the n is, and the place of
    each of the m. Blocks of queries and of keys that see nothing of each other are skipped if
    `skips`. On a mesh, all devices would have to agree on them. Each device along a mesh's `axis`
    has some of the m, which are gathered in both passes.
    """
    return _mix_forward(q, k, v, where, window, softcap, skips, axis)[0]


def _gathered(x: Array, axis: str | None) -> Array:
    return x if axis is None else jax.lax.all_gather(x, axis, tiled=True)


def _mix_forward(q, k, v, where, window, softcap, skips, axis):
    keys, values = _gathered(k, axis), _gathered(v, axis)

    def add(row, column, sums):
        highest, total, mixed = (x[row] for x in sums)
        place = where[3][column]
        scores = _scores(q[row], keys[place], where, row, column, window, softcap)
        top = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, scale = jnp.exp(scores - top), jnp.exp(highest - top)
        total = total * scale + jnp.sum(weights, axis=-1, keepdims=True)
        mixed = mixed * scale + _apply(weights.astype(v.dtype), values[place])
        return tuple(_put(x, new, row) for x, new in zip(sums, (top, total, mixed), strict=True))

    none = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    sums = none + MASKED, none, jnp.zeros(q.shape, jnp.float32)
    highest, total, mixed = _for_pairs(where, window, skips, add, sums)
    mixed = checkpoint_name((mixed / total).astype(q.dtype), "attention")
    normaliser = checkpoint_name(highest + jnp.log(total), "attention")
    return mixed, (q, k, v, where, mixed, normaliser)


def _mix_backward(window, softcap, skips, axis, residuals, grad):
    q, k, v, where, mixed, normaliser = residuals
    keys, values = _gathered(k, axis), _gathered(v, axis)
    wide = grad.astype(jnp.float32) * mixed.astype(jnp.float32)
    along = jnp.sum(wide, axis=-1, keepdims=True)

    def add(row, column, sums):
        place = where[3][column]
        scores = _scores(q[row], keys[place], where, row, column, window, softcap)
        weights, pull = jnp.exp(scores - normaliser[row]), grad[row]
        grad_weights = _inner(pull, values[place], result_dtype(q.dtype, pull.size * v.shape[3]))
        grad_scores = weights * (grad_weights - along[row])
        grad_scores = (grad_scores * softcap_slope(scores, softcap)).astype(q.dtype)
        grad_q = _apply(grad_scores, keys[place])
        grad_k, grad_v = _gather(grad_scores, q[row]), _gather(weights.astype(q.dtype), pull)
        parts = ((grad_q, row), (grad_k, place), (grad_v, place))
        return tuple(_put(x, x[at] + new, at) for x, (new, at) in zip(sums, parts, strict=True))

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, keys, values))
    of_q, *of_kv = _for_pairs(where, window, skips, add, sums)
    if axis is not None:
        of_kv = [jax.lax.psum_scatter(x, axis, tiled=True) for x in of_kv]
    return *(x.astype(q.dtype) for x in (of_q, *of_kv)), None


_mix.defvjp(_mix_forward, _mix_backward)


def _for_pairs(where, window: int, skips: bool, add: Callable[..., Any], sums: Any) -> Any:
    """Return sums after `add` of each block of queries, and of keys that it may see."""
    ends, positions, at, _ = where
    number, _, size = ends.shape
    if number == 1:
        return add(0, 0, sums)
    rows, columns = at[:, None], jnp.arange(number)
    last = jnp.max(ends, axis=(1, 2)) if skips else number * size
    see = (rows == columns) | ((rows > columns) & (rows * size < last))
    if window:
        first, latest = jnp.min(positions, axis=(1, 2)), jnp.max(positions, axis=(1, 2))
        see &= first[rows] - latest < window
    queries, keys = jnp.nonzero(see, size=len(at) * (number + 1) // 2)

    def step(i: Array, sums: Any) -> Any:
        return add(queries[i], keys[i], sums)

    return jax.lax.fori_loop(0, jnp.sum(see), step, sums)


def _put(x: Array, block: Array, at: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, block, at, 0)


def _scores(q, keys, where, row, column, window: int, softcap: float) -> Array:
    """Return masked scores [B, K, G, size, size] float32 of a block of queries and one of keys."""
    (ends, positions, at, _), offsets = where, jnp.arange(q.shape[3])
    after = at[row] * len(offsets) + offsets[:, None]
    mask = (after >= column * len(offsets) + offsets) & (after < ends[column][:, None])
    if window:
        mask &= positions[at[row]][..., None] - positions[column][:, None] < window
    return jnp.where(mask[:, None, None], softcapped(_inner(q, keys), softcap), MASKED)


def segments(segment_ids: Array) -> tuple[Array, Array]:
    """Return `tree` of `attention`, [B, T] and [1, T], for rows of segments."""
    length = segment_ids.shape[1]
    follows = segment_ids[:, 1:] == segment_ids[:, :-1]
    stops = jnp.where(jnp.pad(follows, ((0, 0), (0, 1))), length, jnp.arange(1, length + 1))
    return jax.lax.cummin(stops, axis=1, reverse=True), jnp.arange(length)[None]


# The query heads of one key head are further rows of one matrix. In this form XLA uses its fast
# batched product on a CPU.
def _inner(rows: Array, keys: Array, dtype: Any = jnp.float32) -> Array:
    """Multiply [B, K, G, Q, H] · [B, K, S, H] → [B, K, G, Q, S] in `dtype`."""
    flat = jnp.einsum("bkqh,bksh->bkqs", _flat(rows), keys, preferred_element_type=dtype)
    return flat.reshape(*rows.shape[:-1], keys.shape[2])


def _apply(weights: Array, values: Array) -> Array:
    """Multiply [B, K, G, Q, S] · [B, K, S, H] → [B, K, G, Q, H] float32."""
    dtype = result_dtype(values.dtype, weights.size * values.shape[3])
    flat = jnp.einsum("bkqs,bksh->bkqh", _flat(weights), values, preferred_element_type=dtype)
    return flat.astype(jnp.float32).reshape(*weights.shape[:-1], values.shape[3])


def _gather(weights: Array, rows: Array) -> Array:
    """Sum over query heads and rows: [B, K, G, Q, S] · [B, K, G, Q, H] → [B, K, S, H] float32."""
    return jnp.einsum(
        "bkqs,bkqh->bksh", _flat(weights), _flat(rows), preferred_element_type=jnp.float32
    )


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def context_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, layout: Layout, window: int, softcap: float
) -> Array:
    """Return `attention` of rows whose tokens are cut over the mesh's axis `context`.

    Every device gathers the keys and values of its rows, and keeps its own queries (as Llama 3,
    arXiv 2407.21783 §3.3.2). For Qwen2.5-7B they take 64 MiB for a layer and a row of 32k. A ring
    (arXiv 2310.01889) sends the same bytes and holds 1/context of them. It hides less of the
    transfer. A causal mask gives late tokens more keys. Therefore a row is cut in 2N blocks for N
    devices, and device i has blocks i and 2N − 1 − i (`Layout.balanced`).

    With the layout's mesh, 2 · context divides T and row_shards divides B.
    """
    # GPUs use XLA's products too: cuDNN's packed kernel cannot begin queries after their keys.
    heads, kv_heads = (layout.heads_axis(x.shape[2]) for x in (q, k))
    of_q, of_kv = (PartitionSpec(ROWS, CONTEXT, axis) for axis in (heads, kv_heads))
    groups = q.shape[2] // k.shape[2]

    def local(q, k, v, segment_ids):
        if heads != kv_heads:  # a device has some query heads and all key heads
            first = jax.lax.axis_index("tensor") * q.shape[2]
            key_heads = (first + jnp.arange(q.shape[2])) // groups
            k, v = jnp.take(k, key_heads, axis=2), jnp.take(v, key_heads, axis=2)
        return over_context(q, k, v, segment_ids, layout.context, window, softcap)

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=(of_q, of_kv, of_kv, PartitionSpec(ROWS)),
        out_specs=of_q, check_vma=False,
    )(q, k, v, segment_ids)  # fmt: skip


def over_context(
    q: Array, k: Array, v: Array, segment_ids: Array, devices: int, window: int, softcap: float
) -> Array:
    """Return attention of this device's queries, one of N `devices` of the axis.

    Takes q [B, T/N, heads, H], k and v [B, T/N, key heads, H], and segment_ids [B, T]. All are in
    the order of `Layout.balanced`.
    """
    block, order = q.shape[1] // 2, np.arange(2 * devices)
    size = next(n for n in range(-(-block // TILE), block + 1) if block % n == 0)
    order = np.stack([order, order[::-1]], axis=1)[:devices, :, None] * size + np.arange(size)
    at = jnp.asarray(order.reshape(devices, -1))[jax.lax.axis_index(CONTEXT)]
    places = jnp.asarray(order.argsort(None))
    tree, how = segments(row_order(segment_ids, devices)), (window, softcap, True, CONTEXT)
    with jax.named_scope(f"trips_{size * (2 * devices * size + 1)}"):  # for who reads the program
        return in_blocks(q, k, v, tree, at, places, block // size, *how)
