"""`array_ops.Ops` in torch."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from rlx.algorithms.array_ops import Ops

# No shape depends on the data, so that torch.compile keeps one graph.
BLOCK = 32  # tokens that `recur` walks through one by one


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
    """Return ids [K] of any values as integers from 0 without gaps, in their order; [K] int64."""
    ordered, order = ids.sort()
    first = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    return torch.empty_like(order).scatter(0, order, first.cumsum(0).long())


def recur(a: Tensor, b: Tensor) -> Tensor:
    """Return x with x[t] = b[t] + a[t]·x[t + 1] and x[K] = 0, stepping in all blocks at once."""
    size = a.shape[0]
    if size == 1:
        return b
    missing = -size % BLOCK
    a, b = (pad(x, (0, missing)).view(-1, BLOCK).t().contiguous() for x in (a, b))
    products, sums = [a[-1]], [b[-1]]
    for step in reversed(range(BLOCK - 1)):
        products.append(a[step] * products[-1])
        sums.append(torch.addcmul(b[step], a[step], sums[-1]))
    after = pad(recur(products[-1], sums[-1])[1:], (0, 1))
    x = torch.addcmul(torch.stack(sums[::-1]), torch.stack(products[::-1]), after)
    return x.t().reshape(-1)[:size]


OPS = Ops(
    lib=torch,
    sigmoid=torch.sigmoid,
    log_sigmoid=logsigmoid,
    frozen=Tensor.detach,
    constant=torch.no_grad,
    float32=lambda x: torch.as_tensor(x).float(),
    row_index=lambda x: torch.arange(x.shape[0], device=x.device)[:, None],
    segment_sum=segment_sum,
    segment_min=lambda x, ids, size: segment_extreme(x, ids, size, "amin", torch.inf),
    segment_max=lambda x, ids, size: segment_extreme(x, ids, size, "amax", -torch.inf),
    take=take,
    dense_ranks=dense_ranks,
    sort=lambda x: x.sort().values,
    least_from=lambda x: x.flip(0).cummin(0).values.flip(0),
    recur=recur,
)
