"""Packing of trajectories that begin alike, whose shared tokens are computed once. Numpy only.

Trajectories are merged into trees by their tokens, and a row of the model holds trees depth first.
A token is seen by itself and by the later tokens of the row before its *end*, where its subtree
ends. The loss reads other rows, of trajectories from the token before their first trained one.
`sources` gives for each of their tokens its place in the model's row. Everything after the model's
last layer is thus what it is without trees.

Shapes: F tokens of the flat axis, N trajectories, B rows of a microbatch, C tokens of a row of the
model. The loss has T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rlx.train import packing
from rlx.train.packing import Arrays, FlatBatch, PackPlan

MODES = ("auto", "on", "off")
INPUTS = ("sources", "tree_tokens", "tree_positions", "tree_ends", "tree_counts")  # of the model
ERROR = 0.02  # of a kernel in bfloat16, whose eight bits are 0.4 %
GAIN = 0.9  # `auto` takes trees that cost less than this share of plain rows.


@dataclass(frozen=True, kw_only=True)
class TreePlan(PackPlan):
    """The row of each sequence, in `shapes` of the model's rows, and its place in a tree.

    `shared` counts the first tokens that the sequence before it in its tree has too.
    """

    ranks: np.ndarray  # [N] int64; place in the depth-first order of all trees
    sizes: np.ndarray  # [M] int64; tokens of each tree


def plan(
    flat: FlatBatch,
    ids: np.ndarray,  # [N] indices of sequences
    budget: int,
    buckets: Sequence[int],
    *,
    tree_cost: float = 0.0,
    fork_cost: float = 0.0,
    row_mates: np.ndarray | None = None,
    **how: Any,
) -> TreePlan:
    """Merge sequences into trees and pack these; arguments and errors are those of `packing.plan`.

    A tree is whole where it fits in a row. The tokens that two parts of a cut tree share are
    computed in both. Mates are a tree by themselves.

    Args:
      tree_cost: work of attention per token and key that it sees, over the other work per token.
      fork_cost: tokens that a fork has to save, as a share of those that follow it.
    """
    sizes, first = flat.sizes[ids], flat.starts[ids]
    numbers = flat.tokens["tokens"].astype(">i4")  # their bytes are in the order of the numbers
    texts = [numbers[a : a + n] for a, n in zip(first, sizes, strict=True)]
    mates = np.zeros(len(ids), int) if row_mates is None else row_mates
    order = sorted(range(len(ids)), key=lambda i: (mates[i], texts[i].tobytes()))
    shared = np.array([0, *(_common(texts[a], texts[b]) for a, b in pairwise(order))], np.int64)
    if fork_cost and len(ids):
        shared[np.diff(mates[order], prepend=-1) != 0] = 0
        _cut_forks(shared, sizes[order], fork_cost)
    longest = [b for b in sorted(set(buckets))[::-1] if sizes.max(initial=1) <= b <= budget]
    back, plans = np.argsort(order), list[TreePlan]()
    for length in longest or [budget]:
        if plans and plans[-1].sizes.max() <= length:  # a shorter limit changes nothing
            continue
        tree_of = mates[order]
        if row_mates is None:
            tree_of = _trees(sizes[order], shared, length, tree_cost)
        prefixes = np.where(np.diff(tree_of, prepend=-1) != 0, 0, shared)
        tokens = np.bincount(tree_of, sizes[order] - prefixes).astype(np.int64)
        packed = packing.plan(tokens, budget, buckets, **how)
        rows, prefixes = packed.rows[tree_of][back], prefixes[back]
        plans.append(TreePlan(rows, packed.shapes, prefixes, ranks=back, sizes=tokens))
    return min(plans, key=lambda p: p.padded_tokens + tree_cost * p.token_pairs(sizes))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of first tokens that two sequences share."""
    differ = a[: len(b)] != b[: len(a)]
    return int(differ.argmax()) if differ.any() else len(differ)


def _trees(sizes: np.ndarray, shared: np.ndarray, longest: int, cost: float) -> np.ndarray:
    """Return the tree of each sequence, [N] int64, of those that share most together.

    A tree has at most `longest` tokens or one sequence. A shared token counts as 1, and as `cost`
    for each token that it sees.

    Args:
      sizes: [N] tokens of sequences, depth first. shared: [N], as of `TreePlan`, uncut.
    """
    count, low, ends, merged = len(sizes), 0, np.cumsum(sizes), np.cumsum(shared)
    worth = np.cumsum(shared * (1 + cost * shared))
    least, begins = np.zeros(count + 1), np.zeros(count, np.int64)
    for last in range(count):
        first = np.arange(low, last + 1)
        tokens = ends[last] - ends[first] + sizes[first] - merged[last] + merged[first]  # of a tree
        low += int((tokens[:-1] > longest).sum())  # the first ones have most
        costs = least[low : last + 1] + worth[low : last + 1] - worth[last]
        begins[last] = low + np.argmin(costs)
        least[last + 1] = costs.min()
    is_first, last = np.zeros(count, bool), count
    while last:
        last = int(begins[last - 1])
        is_first[last] = True
    return np.cumsum(is_first) - 1


def _cut_forks(shared: np.ndarray, sizes: np.ndarray, cost: float) -> None:
    """Change `shared` so that each fork saves a share `cost` of the tokens of what it joins.

    Both are [N], as of `_trees`.
    """
    waiting = [(np.arange(len(shared)), 0)]  # neighbours, and what they share at least
    while waiting:
        span, base = waiting.pop()
        fork, tokens = shared[span].min(), (sizes - shared)[span].sum()
        forks, deeper = span[shared[span] == fork], span[shared[span] > fork]
        base = fork if (fork - base) * len(forks) >= cost * tokens else base
        shared[forks] = base
        runs = np.split(deeper, np.flatnonzero(np.diff(deeper) > 1) + 1)
        waiting += [(run, base) for run in runs if len(run)]


def microbatches(flat: FlatBatch, ids: np.ndarray, planned: TreePlan) -> list[Arrays]:
    """Return the packed arrays of some sequences, for the loss and for the model.

    Args: as of `packing.microbatches`.

    Returns:
      The arrays of `packing.microbatches`, [B, T], without tokens that no loss reads, and int32
      arrays: `sources` [B, T], the place in the model's row of each token, 0 at padding;
      `tree_tokens`, `tree_positions`, `tree_ends` [B, C]; `tree_counts` [B, C], how many sequences
      a token belongs to, 0 at padding.
    """
    lengths = np.repeat([c for _, c in planned.shapes], [n for n, _ in planned.shapes])
    beginnings, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    order = np.lexsort((planned.ranks, planned.rows))
    rows, shared, sequences = planned.rows[order], planned.shared[order], ids[order]
    sizes, starts = flat.sizes[sequences], flat.starts[sequences]
    before = np.cumsum(sizes - shared) - (sizes - shared)
    begins = before - before[np.searchsorted(rows, rows, side="left")]
    index, ends, counts = (np.zeros(total, np.int32) for _ in range(3))
    sources = np.zeros(len(flat.tokens["tokens"]) + 1, np.int32)
    path = np.zeros(0, np.int64)
    for row, start, size, prefix, begin in zip(rows, starts, sizes, shared, begins, strict=True):
        path = np.append(path[:prefix], np.arange(begin, begin + size - prefix))
        sources[start : start + size] = path
        slots = beginnings[row] + path
        index[slots[prefix:]] = np.arange(start + prefix, start + size)
        counts[slots] += 1
    until, after = np.zeros(int(sizes.max(initial=0)), np.int64), -1  # ends by position
    for row, size, prefix, begin in list(zip(rows, sizes, shared, begins, strict=True))[::-1]:
        stop = begin + size - prefix
        if row != after:
            until[:], after = stop, row
        ends[beginnings[row] + begin : beginnings[row] + stop] = until[prefix:size]
        until[prefix:] = begin
    arrays = {name: flat.tokens[name][index] * (counts > 0) for name in ("tokens", "positions")}
    arrays |= {"ends": ends, "counts": counts}

    tails = _loss_tails(flat)
    needed = np.bincount(planned.rows, tails.sizes[ids], minlength=len(lengths))
    shapes = []
    for count, length in planned.shapes:
        # 1 or 1.5 times a power of two, of the model's row: each shape is compiled.
        most = int(needed[lengths == length].max())
        least = -(-length // 64)
        widths = (packing.power_of_two(most, least), packing.power_of_two(most, 3 * least))
        shapes.append((count, min(widths)))
    parts = packing.microbatches(tails, ids, PackPlan(planned.rows, tuple(shapes)))
    first = 0
    for part, (count, length) in zip(parts, planned.shapes, strict=True):
        span = slice(first, first + count * length)
        part |= {f"tree_{name}": x[span].reshape(count, length) for name, x in arrays.items()}
        part["sources"] = sources[part["flat_index"]]
        first = span.stop
    return parts


def chains(batch: Arrays) -> np.ndarray:
    """Return the number of each token's chain in its row, [B, C], from 1; 0 at padding.

    A chain's tokens are neighbours whose positions follow each other.
    """
    begins = np.diff(batch["tree_positions"], axis=1, prepend=-2) != 1
    return np.cumsum(begins, axis=1) * (batch["tree_counts"] > 0)


def _loss_tails(flat: FlatBatch) -> FlatBatch:
    """Return the sequences from the token before their first trained one on."""
    count = flat.num_tokens
    size = np.repeat(flat.sizes, flat.sizes)
    trained = np.where(flat.tokens["loss_mask"][:count], flat.tokens["positions"][:count], size)
    skipped = np.minimum.reduceat(trained, flat.starts) - 1
    return replace(flat, starts=flat.starts + skipped, sizes=flat.sizes - skipped)
