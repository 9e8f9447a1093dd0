"""Export of stacked parameters from the device: tensors with HF's names, in buckets.

    params [L, in, out] ─▶ layers (+ scale·A·B) ─▶ transpose, cast ─▶ {name: [out, in]} ─▶ host

Each bucket is copied to the host while the next is computed. On a mesh every device has the full
tensors of a bucket, and all hosts must iterate over them. The order is that of `params.table`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx.model import lora as lora_lib
from rlx.model import lora_config
from rlx.model import params as parameters
from rlx.model.params import Params, Row
from rlx.model.tensors import BUCKET, Buckets


class Merge(NamedTuple):
    """Adapters to add to parameters while they are exported."""

    adapters: Params
    lora: lora_lib.LoraConfig


class _Piece(NamedTuple):
    """Layers of one parameter, or of those that HF joins: `names`, beginning at layer `first`."""

    rows: tuple[Row, ...]
    first: int
    names: list[str]


def export(
    params: Params,
    rows: Iterable[Row],
    dtype: Any = None,  # of the tensors; None keeps each parameter's own
    *,
    merge: Merge | None = None,  # added to the parameters first, in float32, as `lora.merge` does
    mesh: Mesh | None = None,  # where the parameters are; None: on one device
    size: int = BUCKET,  # largest bucket, bytes; a larger tensor, or layer of experts, gets its own
) -> Buckets:
    """Return the tensors of `rows` with the names and layouts of HF's or PEFT's files.

    `params` must not be donated before the last bucket has been requested.
    """
    tensors: dict[str, Any] = {}
    plan: list[list[_Piece]] = []
    room = 0
    for joined in (tuple(group) for _, group in groupby(rows, lambda row: row.hf)):
        row, leaf = joined[0], parameters.leaf(params, joined[0])
        spec = jax.ShapeDtypeStruct(row.hf_shape, dtype or leaf.dtype)
        all_names, per_layer = row.names, _per_layer(row)
        num_bytes = per_layer * math.prod(spec.shape) * spec.dtype.itemsize
        for layer in range(len(all_names) // per_layer):
            names = all_names[layer * per_layer : (layer + 1) * per_layer]
            tensors |= dict.fromkeys(names, spec)
            if num_bytes > room or not plan:
                plan.append([])
                room = size
            room -= num_bytes
            if plan[-1] and plan[-1][-1].rows is joined:
                plan[-1][-1].names.extend(names)
            else:
                plan[-1].append(_Piece(joined, layer, names))
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    static = ("count", "depth", "transposed", "dtype")
    make = jax.jit(_tensors, static_argnames=static, out_shardings=everywhere)
    return Buckets(tensors, _arrays(params, plan, partial(make, dtype=dtype), merge))


def _per_layer(row: Row) -> int:
    """Return how many tensors each layer of a parameter has: 1, or the number of experts."""
    return math.prod(row.shape[1 : row.depth])


def _arrays(
    params: Params, plan: list[list[_Piece]], make: Any, merge: Merge | None
) -> Iterator[Mapping[str, jax.Array]]:
    for pieces in plan:
        bucket: dict[str, jax.Array] = {}
        for (row, *more), first, names in pieces:
            leaves, added = [parameters.leaf(params, each) for each in (row, *more)], None
            if merge and row.path[-1] in merge.lora.targets:
                name = lora_config.adapter(row)
                pair = (merge.adapters["layers"][f"{name}_lora_{x}"] for x in "ab")
                added = (*pair, merge.lora.scale)
            how = {"depth": row.depth, "transposed": row.transposed}
            arrays = make(leaves, added, first, count=len(names) // _per_layer(row), **how)
            bucket |= zip(names, arrays, strict=True)
        for array in bucket.values() if jax.process_index() == 0 else ():  # no other host reads
            array.copy_to_host_async()
        yield bucket


def _tensors(
    leaves: Any, added: Any, first: Any, *, count: int, depth: int, transposed: bool, dtype: Any
) -> list[jax.Array]:
    """Return the tensors of `count` layers of one parameter, or of several joined ones."""
    if depth:
        leaves, added = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, first, count) if jnp.ndim(x) else x,
            (leaves, added),
        )
    leaf = leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)
    if added is not None:
        # The barrier: a sum is rounded to the weight's dtype before it is cast to another.
        leaf = jax.lax.optimization_barrier(lora_lib.merged(leaf, *added))
    parts = [leaf]
    for _ in range(depth):
        parts = [part[i] for part in parts for i in range(part.shape[0])]
    return [(part.T if transposed else part).astype(dtype or part.dtype) for part in parts]
