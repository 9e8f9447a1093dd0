"""Sums and look-ups by id, of fixed shape, so that torch.compile keeps one graph.

An id equal to the number of segments, or above it, is padding: it adds to nothing and reads the
fill. JAX does this by itself (`mode="drop"`, `mode="fill"`); torch gets one slot more.
"""

import torch
from torch import Tensor


def segment_sum(x: Tensor, ids: Tensor, size: int) -> Tensor:
    """Return the sum of x [K] over each of `size` ids; [size] of x's dtype."""
    return x.new_zeros(size + 1).index_add(0, ids.clamp(max=size), x)[:size]


def segment_extreme(x: Tensor, ids: Tensor, size: int, how: str, empty: float) -> Tensor:
    """Return the amin or amax of x [K] over each of `size` ids, `empty` where there is none."""
    out = x.new_full((size + 1,), empty)
    return out.scatter_reduce(0, ids.long().clamp(max=size), x, how)[:size]


def take(x: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return x[ids] for x [size], `fill` where an id is padding; of ids' shape."""
    size = x.shape[0]
    padded = torch.cat([x, x.new_full((1,), fill)])
    return padded.index_select(0, ids.reshape(-1).clamp(max=size)).reshape(ids.shape)


def dense_ranks(ids: Tensor) -> Tensor:
    """Return ids [K] of any values as integers from 0 without gaps, in their order; [K] int64.

    The inverse of `torch.unique`, which has a shape that depends on the data.
    """
    ordered, order = ids.sort()
    first = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    return torch.empty_like(order).scatter(0, order, first.cumsum(0).long())


def same_shape(*tensors: Tensor) -> None:
    """Raise AssertionError unless all shapes are equal."""
    shapes = [tuple(x.shape) for x in tensors]
    assert len(set(shapes)) == 1, f"shapes differ: {shapes}"
