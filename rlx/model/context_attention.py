"""Attention where the tokens of packed rows are cut over the mesh's axis `context`.

Every device gathers the keys and values of its rows, and keeps its own queries (as Llama 3,
arXiv 2407.21783 §3.3.2). For Qwen2.5-7B they take 64 MiB for a layer and a row of 32k. A ring
(arXiv 2310.01889) sends the same bytes and holds 1/context of them. It hides less of the transfer.

A causal mask gives late tokens more keys. Therefore a row is cut in 2N blocks for N devices, and
device i has blocks i and 2N − 1 − i (`Layout.balanced`).
"""
# GPUs use XLA's products too: cuDNN's packed kernel cannot begin queries after their keys.

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from rlx.model.attention import in_blocks, segments
from rlx.model.mesh import ROWS
from rlx.model.sharding import Layout, row_order

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
            key_heads = (first + jnp.arange(q.shape[2])) // groups
            k, v = jnp.take(k, key_heads, axis=2), jnp.take(v, key_heads, axis=2)
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
    block, order = q.shape[1] // 2, np.arange(2 * devices)
    size = next(n for n in range(-(-block // TILE), block + 1) if block % n == 0)
    order = np.stack([order, order[::-1]], axis=1)[:devices, :, None] * size + np.arange(size)
    at, places = jnp.asarray(order.reshape(devices, -1))[lax.axis_index(AXIS)], order.argsort(None)
    tree, how = segments(row_order(segment_ids, devices)), (window, softcap, True, AXIS)
    with jax.named_scope(f"trips_{size * (2 * devices * size + 1)}"):  # for who reads the program
        return in_blocks(q, k, v, tree, at, jnp.asarray(places), block // size, *how)
