"""cuDNN's attention over packed rows, within segments and without anything of size T².

Needs CUDA, half precision and a GPU of compute capability 9.0 (Hopper) or later. JAX has no public
API of the packed layout yet; only this file imports the private one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from rlx.model.mesh import ROWS
from rlx.model.sharding import ONE_DEVICE, TARGET, Layout

KERNEL = "dot_product_attention_fwd_wrapper"  # JAX's primitive: mixed and the log-normalisers
# Before this version JAX computed the key heads' offsets from the number of query heads.
GROUPED_SINCE = (0, 11, 2)
LARGEST_OFFSET = 2**31  # elements of q on one device: the kernel counts them in int32
NOTHING = -1e30  # log-normaliser of no keys

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
    # [B, T] int32, where rows hold trees depth first, and segments are their chains: neighbours
    # whose positions follow each other. They need window = 0.
    positions: Array | None = None,
) -> Array:
    """Return `attention.attention` of packed rows, [B, T, N, H]; 0 at padding."""
    heads, groups = q.shape[2], q.shape[2] // k.shape[2]
    mesh = layout.mesh
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    if jax.__version_info__ < GROUPED_SINCE or k.shape[2] % tensor:
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    attend: Any = partial(_on_one_device, window=window)
    args = [segment_sizes]
    if positions is not None:
        attend, args = _over_trees, [segment_sizes, positions]
    if mesh is None:
        return attend(q, k, v, *args)
    cut = PartitionSpec(ROWS, None, "tensor" if heads % tensor == 0 else None)
    places = (cut, cut, cut, *[PartitionSpec(ROWS)] * len(args))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=places, out_specs=cut, check_vma=False)
    return mapped(q, k, v, *args)


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
    mask, sizes = segment_sizes > 0, segment_sizes.astype(jnp.int32)
    starts = jnp.where(mask, jnp.cumsum(sizes, axis=1) - sizes, -1)
    return jnp.where(mask, sizes, -1), jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)


class Call(NamedTuple):
    """Queries and keys of one call of the kernel on trees; −1 where there is no segment.

    A key is in one segment at most: the kernel writes its gradient without adding.
    """

    query_sizes: Array  # [B, M] int32
    key_sizes: Array
    query_starts: Array  # [B, M + 1] int32, in the row
    key_starts: Array


def shared_call(chain_sizes: Array, positions: Array, seen: Array) -> tuple[Call, Array]:
    """Return the call in which chains see the next tokens that their path shares with others.

    Chains that share more than `seen` tokens follow each other, and the first one holds the next
    tokens. All later ones see these, up to where one of them forks. `seen` [B, M] int32 counts the
    first tokens of its path that each chain saw in earlier calls; it is returned as after this one.
    """
    chains, starts = chain_sizes > 0, segment_table(chain_sizes)[1][:, :-1]
    first = _first_positions(chain_sizes, positions)
    leads = chains & (first <= seen)
    number = jnp.cumsum(leads, axis=1)
    members = leads[:, :, None] & chains[:, None] & (number[:, :, None] == number[:, None])
    later = members & ~leads[:, None]
    sizes = jnp.sum(jnp.where(later, chain_sizes[:, None], 0), axis=2)
    limit = positions.shape[1]
    begin, until = (jnp.min(jnp.where(later, x[:, None], limit), axis=2) for x in (starts, first))
    values = (sizes, until - seen, begin, starts + seen - first)
    numbers = (jnp.where(sizes > 0, x, -1).astype(jnp.int32) for x in values)
    sizes, shared, begin, starts = numbers
    table = (jnp.pad(x, ((0, 0), (0, 1)), constant_values=-1) for x in (begin, starts))
    after = jnp.sum(jnp.where(members & (sizes > 0)[..., None], until[..., None], 0), axis=1)
    return Call(sizes, shared, *table), jnp.maximum(seen, after)


def _first_positions(chain_sizes: Array, positions: Array) -> Array:
    """Return the position of each chain's first token, [B, M] int32; 0 where there is none."""
    starts = segment_table(chain_sizes)[1][:, :-1]
    first = jnp.take_along_axis(positions, jnp.maximum(starts, 0), axis=1)
    return jnp.where(chain_sizes > 0, first, 0)


def _over_calls(chain_sizes: Array, positions: Array, add: Callable[..., Any], sums: Any) -> Any:
    """Return sums after `add` of the chains' call and of one for each level of the trees."""
    first, (lengths, starts) = _first_positions(chain_sizes, positions), segment_table(chain_sizes)
    chain_call = Call(lengths, lengths, starts, starts)  # in which each chain sees itself

    def step(carry: Any) -> Any:
        call, seen = shared_call(chain_sizes, positions, carry[0])
        return seen, add(call, False, carry[1])

    start = jnp.zeros_like(first), add(chain_call, True, sums)
    with jax.named_scope("trips_1"):  # expected ones, for who reads the program
        return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < first), step, start)[1]


# The parts of softmax add up. Each call's result counts by its share of the common normaliser, and
# its backward pass recomputes weights with that one (arXiv 2310.01889).
@jax.custom_vjp
def _over_trees(q: Array, k: Array, v: Array, chain_sizes: Array, positions: Array) -> Array:
    return _over_trees_forward(q, k, v, chain_sizes, positions)[0]


def _over_trees_forward(q, k, v, chain_sizes, positions):
    def add(call, causal, sums):
        mixed, stats = kernel("fwd", q, k, v, call, causal, is_training=True)
        number, place = _in_stats(call, q.shape[1])
        stats = stats.at[number, :, place].get(mode="fill", fill_value=NOTHING)
        mask = (number < call.query_sizes.size)[..., None, None]
        total = jnp.logaddexp(sums[1], stats)
        old, new = (jnp.exp(part - total)[..., None] for part in (sums[1], stats))
        return sums[0] * old + jnp.where(mask, mixed.astype(jnp.float32), 0) * new, total

    none = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], NOTHING, jnp.float32)
    mixed, normaliser = _over_calls(chain_sizes, positions, add, none)
    mixed = checkpoint_name(mixed.astype(q.dtype), "attention")
    normaliser = checkpoint_name(normaliser, "attention")
    return mixed, (q, k, v, chain_sizes, positions, mixed, normaliser)


def _over_trees_backward(residuals, grad):
    q, k, v, chain_sizes, positions, mixed, normaliser = residuals

    def add(call, causal, sums):
        number, place = _in_stats(call, q.shape[1])
        stats = jnp.zeros((call.query_sizes.size, q.shape[2], q.shape[1]), jnp.float32)
        stats = stats.at[number, :, place].set(normaliser, mode="drop")
        grads = kernel("bwd", q, k, v, call, causal, stats, mixed, grad)
        queries = number < call.query_sizes.size
        keys = jnp.any(_tokens_by_segment(call.key_starts, call.key_sizes, q.shape[1]), axis=1)
        return tuple(
            total + jnp.where(mask[..., None, None], new, 0)
            for total, new, mask in zip(sums, grads, (queries, keys, keys), strict=True)
        )

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    sums = _over_calls(chain_sizes, positions, add, sums)
    return *(total.astype(q.dtype) for total in sums), None, None


_over_trees.defvjp(_over_trees_forward, _over_trees_backward)


def kernel(
    way: str, q: Array, k: Array, v: Array, call: Call, causal: bool, *more: Array, **options: Any
) -> Any:
    """Bind JAX's primitive: fwd → (mixed [B, T, N, H], normalisers [B·M, N, T] of each segment).

    bwd, of normalisers, mixed and its gradient → gradients of q, k, v. Tokens in no segment are not
    written, in both. As XLA describes them to cuDNN, normalisers of a segment begin at T = 0.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    primitive = getattr(cudnn, f"_dot_product_attention_{way}_p_wrapper")
    if "score_mod" in signature(cudnn.dot_product_attention).parameters:
        options["score_mod"] = None
    mask = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    none = jnp.zeros(0, q.dtype)
    return primitive.bind(
        q, k, v, none, *call, none, none, *more, scale=q.shape[-1] ** -0.5, seed=0,
        dropout_rate=0.0, variadic_args=(False, False), mask_type=mask,
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None, **options,
    )  # fmt: skip


def _tokens_by_segment(starts: Array, sizes: Array, length: int) -> Array:
    """Return which tokens of a row each segment holds, [B, M, T]."""
    at, begin = jnp.arange(length), starts[:, :-1, None]
    return (sizes[..., None] > 0) & (at >= begin) & (at < begin + sizes[..., None])


def _in_stats(call: Call, length: int) -> tuple[Array, Array]:
    """Return where each token's normaliser is, [B, T] each: its segment, or B·M, and its place."""
    inside = _tokens_by_segment(call.query_starts, call.query_sizes, length)
    mask = call.query_sizes > 0
    numbers = (jnp.cumsum(mask) - 1).reshape(mask.shape)  # rows are joined, without gaps
    segment = jnp.argmax(inside, axis=1)
    number = jnp.where(jnp.any(inside, axis=1), jnp.take_along_axis(numbers, segment, 1), mask.size)
    return number, jnp.arange(length) - jnp.take_along_axis(call.query_starts, segment, 1)
