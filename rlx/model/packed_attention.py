"""cuDNN's attention over packed rows, within segments and without anything of size T².

Needs CUDA, half precision and a GPU of compute capability 9.0 (Hopper) or later. JAX has no public
API of the packed layout yet; only this file imports the private one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from rlx.model.mesh import ROWS
from rlx.model.sharding import ONE_DEVICE, TARGET, Layout

KERNEL = "dot_product_attention_fwd_wrapper"  # JAX's primitive: mixed and the log-normalisers
# Before this version JAX computed the key heads' offsets from the number of query heads.
GROUPED_SINCE = (0, 11, 2)
LARGEST_OFFSET = 2**31  # elements of q on one device: the kernel counts them in int32

CUDNN = 91000  # version that programs for GPUs elsewhere are compiled for


@contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
    """Trace programs for a device of `jax.experimental.topologies`, which is not here."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    capability = tuple(map(int, device.compute_capability.split(".")))

    def as_tuple(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    # JAX asks the GPUs of this process, of which there are none.
    answers: dict[str, Any] = {
        "check_cudnn_version": lambda: CUDNN,
        "check_compute_capability": lambda least: capability >= as_tuple(least),
        "is_cuda_compute_capability_equal": lambda exact: capability == as_tuple(exact),
    }
    token = TARGET.set(device)
    try:
        with mock.patch.multiple(cudnn, **answers):
            yield
    finally:
        TARGET.reset(token)


def packed_attention(
    q: Array,  # [B, T, N, H], bfloat16 or float16
    k: Array,  # [B, T, K, H], likewise
    v: Array,  # [B, T, K, H], likewise
    # [B, M] int32, M > 1: tokens of each segment of a row, in the row's order and beginning at its
    # first token; 0: no segment. Padding follows the last one.
    segment_sizes: Array,
    layout: Layout = ONE_DEVICE,  # layout, window: as of `attention.attention`
    window: int = 0,
) -> Array:
    """Return `attention.attention` of packed rows, [B, T, N, H]; 0 at padding."""
    heads, groups = q.shape[2], q.shape[2] // k.shape[2]
    mesh = layout.mesh
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    if jax.__version_info__ < GROUPED_SINCE or k.shape[2] % tensor:
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    attend = partial(_on_one_device, window=window)
    if mesh is None:
        return attend(q, k, v, segment_sizes)
    cut = PartitionSpec(ROWS, None, "tensor" if heads % tensor == 0 else None)
    rows = PartitionSpec(ROWS)
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(cut, cut, cut, rows), out_specs=cut, check_vma=False
    )
    return mapped(q, k, v, segment_sizes)


def _on_one_device(q: Array, k: Array, v: Array, segment_sizes: Array, window: int) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths, starts = segment_table(segment_sizes)
    tokens = jnp.arange(q.shape[1]) < jnp.sum(segment_sizes, axis=1, keepdims=True)
    tokens = tokens[:, :, None, None]

    def real(x: Array) -> Array:  # the kernel does not write to padding, nor to its gradients
        return jnp.where(tokens, x, 0)

    mixed = cudnn.dot_product_attention(
        real(q), real(k), real(v),
        q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
        scale=q.shape[-1] ** -0.5, mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=window or None,
    )  # fmt: skip
    return real(mixed)


def segment_table(segment_sizes: Array) -> tuple[Array, Array]:
    """Return lengths [B, M] and first tokens [B, M + 1] of segments; −1 where there is none."""
    # The last column is −1 because JAX joins rows: one row's end would precede the next begin.
    there, sizes = segment_sizes > 0, segment_sizes.astype(jnp.int32)
    starts = jnp.where(there, jnp.cumsum(sizes, axis=1) - sizes, -1)
    return jnp.where(there, sizes, -1), jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
