"""Attention where the tokens of packed rows are cut over the mesh's axis `context`.

Every device gathers the keys and values of its rows, and keeps its own queries (as Llama 3,
arXiv 2407.21783 §3.3.2). For Qwen2.5-7B they take 64 MiB for a layer and a row of 32k. A ring
(arXiv 2310.01889) sends the same bytes and holds 1/context of them. It hides less of the transfer.

A causal mask gives late tokens more keys. Therefore a row is cut in 2N blocks for N devices, and
device i has blocks i and 2N − 1 − i (`Layout.balanced`). Scores are computed a tile at a time, with
a running softmax (arXiv 2112.05682), and again in the backward pass: nothing of size T² is kept.
"""
# GPUs use XLA's products too: cuDNN's packed kernel cannot begin queries after their keys.

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from rlx.model.attention import MASKED, apply, gather, inner, seen
from rlx.model.mesh import ROWS
from rlx.model.ops import softcap_slope, softcapped
from rlx.model.sharding import Layout

AXIS = "context"
TILE = 512  # most tokens of a tile of queries, and of one of keys


def context_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, layout: Layout, window: int, softcap: float
) -> Array:
    """Return `attention.attention` of rows whose tokens are laid out by `layout.balanced`.

    With the layout's mesh, 2 · context divides T and row_shards divides B.
    """
    heads, kv_heads = (layout.heads_axis(x.shape[2]) for x in (q, k))
    of_q, of_kv = (PartitionSpec(ROWS, AXIS, axis) for axis in (heads, kv_heads))
    groups = q.shape[2] // k.shape[2]

    def local(q, k, v, segment_ids):
        if heads != kv_heads:  # a device has some query heads and all key heads
            first = lax.axis_index("tensor") * q.shape[2]
            read = (first + jnp.arange(q.shape[2])) // groups
            k, v = jnp.take(k, read, axis=2), jnp.take(v, read, axis=2)
        return on_one_device(q, k, v, segment_ids, layout.context, window, softcap)

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=(of_q, of_kv, of_kv, PartitionSpec(ROWS)),
        out_specs=of_q, check_vma=False,
    )(q, k, v, segment_ids)  # fmt: skip


def on_one_device(
    q: Array, k: Array, v: Array, segment_ids: Array, devices: int, window: int, softcap: float
) -> Array:
    """Return attention of this device's queries, one of N `devices` of the axis.

    Takes q [B, T/N, heads, H], k and v [B, T/N, key heads, H], and segment_ids [B, T]. All are in
    the order of `Layout.balanced`.
    """
    batch, length, heads, width = q.shape
    q = (q * width**-0.5).reshape(batch, length, k.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    mixed = _mix(q, k, v, segment_ids, devices, window, softcap)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _mix(q, k, v, segment_ids, devices: int, window: int, softcap: float) -> Array:
    """Attend on one device: q [B, K, G, T/N, H] (scaled), k, v [B, K, T/N, H], ids [B, T]."""
    return _mix_forward(q, k, v, segment_ids, devices, window, softcap)[0]


def _mix_forward(q, k, v, segment_ids, devices, window, softcap):
    tiles = _Tiles(q.shape[3] // 2, devices, window, softcap)
    keys, values = _whole_row(k), _whole_row(v)

    def attend(_, index):
        at, query = tiles.own(index), tiles.of(q, index, 3)

        def look(other, carry):
            mixed, highest, total = carry
            there = tiles.place(other)
            scores = _scores(query, tiles.of(keys, there, 2), tiles, segment_ids, at, other)
            higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(highest - higher)
            mixed = mixed * shrink + apply(weights.astype(v.dtype), tiles.of(values, there, 2))
            return mixed, higher, total * shrink + jnp.sum(weights, axis=-1, keepdims=True)

        zeros = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
        start = jnp.zeros(query.shape, jnp.float32), zeros + MASKED, zeros
        mixed, highest, total = lax.fori_loop(tiles.first(at), at + 1, look, start)
        return None, ((mixed / total).astype(q.dtype), highest + jnp.log(total))

    _, both = lax.scan(attend, None, jnp.arange(tiles.count))
    mixed, normaliser = (checkpoint_name(_join(x), "attention") for x in both)
    return mixed, (q, k, v, segment_ids, mixed, normaliser)


def _mix_backward(devices, window, softcap, kept, grad):
    q, k, v, segment_ids, mixed, normaliser = kept
    tiles = _Tiles(q.shape[3] // 2, devices, window, softcap)
    keys, values = _whole_row(k), _whole_row(v)
    wide = grad.astype(jnp.float32) * mixed.astype(jnp.float32)
    along = jnp.sum(wide, axis=-1, keepdims=True)

    def attend(carry, index):
        at = tiles.own(index)
        query, pull, mean, normal = (tiles.of(x, index, 3) for x in (q, grad, along, normaliser))

        def look(other, carry):
            grad_q, grad_k, grad_v = carry
            there = tiles.place(other)
            key, value = tiles.of(keys, there, 2), tiles.of(values, there, 2)
            scores = _scores(query, key, tiles, segment_ids, at, other)
            weights = jnp.exp(scores - normal)
            grad_scores = weights * (inner(pull, value) - mean)
            grad_scores = (grad_scores * softcap_slope(scores, softcap)).astype(q.dtype)
            grad_k = tiles.add(grad_k, there, gather(grad_scores, query))
            grad_v = tiles.add(grad_v, there, gather(weights.astype(q.dtype), pull))
            return grad_q + apply(grad_scores, key), grad_k, grad_v

        start = jnp.zeros(query.shape, jnp.float32), *carry
        grad_q, *carry = lax.fori_loop(tiles.first(at), at + 1, look, start)
        return tuple(carry), grad_q.astype(q.dtype)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    (grad_k, grad_v), grad_q = lax.scan(attend, (zeros, zeros), jnp.arange(tiles.count))
    grad_k, grad_v = (lax.psum_scatter(x, AXIS, scatter_dimension=2, tiled=True)
                      for x in (grad_k, grad_v))  # fmt: skip
    return _join(grad_q), grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_mix.defvjp(_mix_forward, _mix_backward)


class _Tiles:
    """Index arithmetic of tiles: of a row, counted from its start, and of this device's tokens.

    Each of a row's 2 · devices blocks has `block` tokens.
    """

    def __init__(self, block: int, devices: int, window: int, softcap: float):
        self._devices, self.window, self.softcap = devices, window, softcap
        self._each = next(n for n in range(-(-block // TILE), block + 1) if block % n == 0)
        self.size, self.count = block // self._each, 2 * self._each

    def own(self, index: Array) -> Array:
        """Return the index in its row of this device's tile `index`."""
        device, (half, within) = lax.axis_index(AXIS), jnp.divmod(index, self._each)
        block = jnp.where(half == 0, device, 2 * self._devices - 1 - device)
        return block * self._each + within

    def first(self, at: Array) -> Array | int:
        """Return the first tile that the queries of tile `at` see."""
        return jnp.maximum(at - -(-(self.window - 1) // self.size), 0) if self.window else 0

    def place(self, index: Array) -> Array:
        """Return the index of a row's tile among the gathered tiles of all devices."""
        block, within = jnp.divmod(index, self._each)
        late = block >= self._devices
        device = jnp.where(late, 2 * self._devices - 1 - block, block)
        return (2 * device + late) * self._each + within

    def of(self, x: Array, index: Array, axis: int) -> Array:
        """Return tile `index` of x along its axis of tokens."""
        return lax.dynamic_slice_in_dim(x, index * self.size, self.size, axis)

    def add(self, x: Array, index: Array, more: Array) -> Array:
        """Return x [B, K, T, H] with `more` added to tile `index`."""
        start = index * self.size
        return lax.dynamic_update_slice_in_dim(x, self.of(x, index, 2) + more, start, 2)


def _scores(query, key, tiles, segment_ids, at, other) -> Array:
    """Return masked scores [B, K, G, Q, S] float32 of the row's tile `at` against tile `other`."""
    own, theirs = (tiles.of(segment_ids, tiles.place(tile), 1) for tile in (at, other))
    places = jnp.arange(tiles.size)
    causal = seen((at - other) * tiles.size + places[:, None], places, tiles.window)
    mask = causal & (own[:, :, None] == theirs[:, None, :])
    return jnp.where(mask[:, None, None], softcapped(inner(query, key), tiles.softcap), MASKED)


def _whole_row(x: Array) -> Array:
    """Gather [B, K, T/N, H] of all the row's devices: [B, K, T, H]."""
    return lax.all_gather(x, AXIS, axis=2, tiled=True)


def _join(tiles: Array) -> Array:
    """Return tiles [n, B, K, G, Q, H] as one [B, K, G, n · Q, H]."""
    count, *shape = tiles.shape
    return jnp.moveaxis(tiles, 0, 3).reshape(*shape[:3], count * shape[3], shape[4])
