"""Array functions of the algorithms, which are written once for JAX's arrays and torch's tensors.

Imports neither. An id at or above the number of segments is padding: it adds nothing and reads the
fill. No result's shape depends on data, for compilers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlx.algorithms.algorithm import choose

Array: TypeAlias = Any  # of JAX or of torch


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of one library; K numbers, `size` segments."""

    lib: Any  # jax.numpy or torch, for functions that both name alike.
    sigmoid: Callable
    log_sigmoid: Callable
    frozen: Callable  # x → x without gradient.
    constant: Callable[[], AbstractContextManager]  # context without gradients.
    float32: Callable  # array or number → float32 array.
    row_index: Callable  # [B, …] → [B, 1], the index of each row.
    segment_sum: Callable  # (x [K], ids [K], size) → [size].
    segment_min: Callable  # as segment_sum; inf for an empty segment.
    segment_max: Callable  # as segment_sum; −inf for an empty segment.
    take: Callable  # (x [size], ids, fill) → x[ids], of the shape of ids.
    dense_ranks: Callable  # ids [K] of any values → integers from 0 without gaps, in their order.
    sort: Callable  # x [K] ≥ 0 or inf → ascending.
    least_from: Callable  # [K] → the minimum of each entry and later ones.
    recur: Callable  # (a [K], b [K]) → x with x[t] = b[t] + a[t]·x[t + 1] and x[K] = 0.

    def aggregate(self, x: Any, used: Any, segment_ids: Any, how: str) -> Any:
        """Return on every token the mean, sum or max of x over the used tokens of its segment.

        Args:
          x: [B, T] float32. used: [B, T] bool; 0 is returned elsewhere. segment_ids: [B, T] int.
        """
        rows, width = x.shape
        # A row of `width` tokens has at most that many segments, and 0 for padding.
        index = (self.row_index(x) * (width + 1) + segment_ids).reshape(-1)
        size = rows * (width + 1)

        def over(x: Any, fill: float, combine: Callable) -> Any:
            return combine(self.lib.where(used, x, fill).reshape(-1), index, size)

        def total(x: Any) -> Any:
            return over(x, 0.0, self.segment_sum)

        table = {
            "mean": lambda: total(x) / self.lib.clip(total(self.lib.ones_like(x)), 1.0, None),
            "sum": lambda: total(x),
            "max": lambda: over(x, -self.lib.inf, self.segment_max),
        }
        per = choose("weight_aggregate", how, table)()
        return self.lib.where(used, per[index].reshape(x.shape), 0.0)

    def totals(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return the sum of each statistic, float32 scalars without gradient."""
        with self.constant():
            total = {k: self.lib.sum(x, dtype=self.lib.float32) for k, x in stats.items()}
            return {name: self.frozen(x) for name, x in total.items()}


def ops_of(x: Any) -> Ops:
    """Return torch's functions for a tensor, else JAX's; only that library is imported."""
    if hasattr(x, "requires_grad_"):
        from rlx.algorithms import torch_ops

        return torch_ops.OPS
    from rlx.algorithms import jax_ops

    return jax_ops.OPS


def same_shape(*arrays: Any) -> None:
    """Raise AssertionError unless all shapes are equal."""
    shapes = [tuple(x.shape) for x in arrays]
    assert len(set(shapes)) == 1, f"shapes differ: {shapes}"
