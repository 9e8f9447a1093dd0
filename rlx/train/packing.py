"""Packing of groups into rows: flat arrays, full rows, few shapes. Numpy only.

Shapes: F tokens of the flat axis, N trajectories, B rows of a microbatch, T tokens of a row.

*Flat*: trajectories end to end on one axis, for advantages and loss weights.
*Packed*: [B, T] rows for the model; `flat_index` points from each slot into the flat axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.base import Group, UserError, joined_masks, malformed, turn_starts

Arrays = dict[str, np.ndarray]

MIN_FLAT = 1024  # tokens of the smallest flat bucket.
MIN_SEQUENCES = 8  # sequences of the smallest bucket.
MIN_SEGMENTS = 4  # segments of a row in the smallest bucket.
ROW_CANDIDATES = 3  # row lengths that are compared.
SPLIT_GAIN = 0.9  # several row lengths must cost less than this share: microbatches cost extra.
NEAR_TIE = 1.03  # of plans within this factor, longer rows win, because shapes change less.
FILL_CANDIDATES = 64  # sizes tried for the rest of a row.


@dataclass(frozen=True)
class FlatBatch:
    """All trajectories of a train batch on one axis, padded to powers of two.

    Attributes:
      tokens: per-token arrays [F]: `tokens`, `positions`, `sequence_ids` (N_padded at padding),
        `versions` int32, `loss_mask` bool, `behaviour_logprobs` float32; if all trajectories have
        them, `turn_ids` int32 and `reference_logprobs` float32.
      sequences: arrays [N_padded], an entry for each reward: of a trajectory, or of its turns.
        `rewards`, `baselines` float32; `group_ids`, `run_ids` int32 (dense, from 0 in order;
        padding has the last one's id + 1), `agent_ids` int32 (dense); `truncated`, `valid` bool.
    """

    tokens: Arrays
    sequences: Arrays
    starts: np.ndarray  # int64; of each trajectory its first token on F
    sizes: np.ndarray  # int64; its tokens
    groups: np.ndarray  # int64; its group
    owners: np.ndarray  # int64; the trajectory of each reward
    num_groups: int
    masks: Arrays  # `joined_masks` of the trajectories
    images: tuple[tuple[str, ...], ...] = ()  # names of each trajectory's images; (): none has any

    @property
    def num_sequences(self) -> int:
        return len(self.sizes)

    @property
    def num_runs(self) -> int:
        return int(self.sequences["run_ids"][: len(self.owners)].max(initial=-1)) + 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding, prompts included."""
        return int(self.sizes.sum())

    def row_mates(self, ids: np.ndarray) -> np.ndarray:
        """Return the groups of sequences `ids` as indices from 0, for `plan`: [N'] int64."""
        return np.unique(self.groups[ids], return_inverse=True)[1]

    def minibatch_of(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the minibatch of each reward, [N_padded] int32, −1 at padding.

        `parts` are the indices of each minibatch's trajectories, from `minibatch_ids`.
        """
        minibatches = np.empty(self.num_sequences, np.int32)
        for index, ids in enumerate(parts):
            minibatches[ids] = index
        out = np.full(len(self.sequences["valid"]), -1, np.int32)
        out[: len(self.owners)] = minibatches[self.owners]
        return out

    def arrays(self) -> Arrays:
        """Return the inputs of advantages in one dict."""
        return {**self.tokens, **self.sequences}


@dataclass(frozen=True)
class PackPlan:
    """The row of each sequence, and how rows make microbatches."""

    rows: np.ndarray  # [N] int64; the row of each sequence, counted over all microbatches
    shapes: tuple[tuple[int, int], ...]  # (rows, row length) of each microbatch, the longest first
    # [N] int64; first tokens of each sequence that are computed for another one; empty: none
    shared: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def row_length(self) -> int:
        """Tokens of the longest rows."""
        return max((length for _, length in self.shapes), default=0)

    @property
    def padded_tokens(self) -> int:
        return sum(rows * length for rows, length in self.shapes)

    def token_pairs(self, sizes: np.ndarray) -> float:
        """Return twice the pairs of tokens that see each other; sizes: [N], of the sequences."""
        return float((sizes**2).sum() - (self.shared**2).sum())

    def cost(self, attention_cost: float) -> float:
        """Return Σ rows · T · (1 + attention_cost · T) over the microbatches."""
        return sum(n * length * (1 + attention_cost * length) for n, length in self.shapes)


def power_of_two(n: int, least: int) -> int:
    """Return the smallest power-of-two multiple of `least` that is ≥ n."""
    while least < n:
        least *= 2
    return least


def flatten(groups: Sequence[Group]) -> FlatBatch:
    """Concatenate the trajectories of a train batch, in order; ValueError for a malformed one."""
    trajectories = [t for g in groups for t in g.trajectories]
    for t in trajectories:
        if wrong := malformed(t):
            raise ValueError(f"trajectory {t.trajectory_id}: {wrong}")
    sizes = np.array([len(t.tokens) for t in trajectories], np.int64)
    starts = np.cumsum(sizes) - sizes
    begins = [turn_starts(t) for t in trajectories]
    owners = np.repeat(np.arange(len(sizes)), np.array([len(turns) for turns in begins], int))
    beginnings = np.concatenate([np.zeros(0, np.int64), *begins]) + starts[owners]
    num_tokens, count = int(sizes.sum()), len(owners)
    flat = power_of_two(num_tokens, MIN_FLAT)
    padded = power_of_two(count, MIN_SEQUENCES)

    def per_token(name: str, dtype: Any, pad: float) -> np.ndarray:
        out = np.full(flat, pad, dtype)
        if trajectories:
            parts = [getattr(t, name) for t in trajectories]
            np.concatenate(parts, out=out[:num_tokens], casting="unsafe")
        return out

    sequence_ids = np.full(flat, padded, np.int32)
    sequence_ids[:num_tokens] = np.repeat(
        np.arange(count), np.diff(beginnings, append=num_tokens).astype(np.int64)
    )
    positions = np.zeros(flat, np.int32)
    positions[:num_tokens] = np.arange(num_tokens) - np.repeat(starts, sizes)
    tokens = {
        "tokens": per_token("tokens", np.int32, 0),
        "positions": positions,
        "sequence_ids": sequence_ids,
        "loss_mask": per_token("loss_mask", bool, False),
        "behaviour_logprobs": per_token("behaviour_logprobs", np.float32, 0.0),
        "versions": per_token("versions", np.int32, -1),
    }
    for name, dtype in (("turn_ids", np.int32), ("reference_logprobs", np.float32)):
        if trajectories and all(getattr(t, name) is not None for t in trajectories):
            tokens[name] = per_token(name, dtype, 0)

    def per_sequence(values: Any, dtype: Any, pad: float) -> np.ndarray:
        out = np.full(padded, pad, dtype)
        out[:count] = values
        return out

    rewards = [r for t in trajectories for r in t.turn_rewards or (t.reward,)]
    baselines = np.array([t.baseline for t in trajectories], np.float32)[owners]
    cut = np.array([t.truncated for t in trajectories], bool)[owners]
    group_of = np.repeat(
        np.arange(len(groups)), np.array([len(g.trajectories) for g in groups], int)
    )
    runs: dict[tuple[int, str], int] = {}
    ids = [(i, t.run_id) for i, g in enumerate(groups) for t in g.trajectories]
    run_of = np.array([runs.setdefault(each, len(runs)) for each in ids], np.int64)
    agents = np.unique([t.agent for t in trajectories], return_inverse=True)[1]
    sequences = {
        "rewards": per_sequence(rewards, np.float32, 0.0),
        "baselines": per_sequence(baselines, np.float32, 0.0),
        "group_ids": per_sequence(group_of[owners], np.int32, len(groups)),
        "run_ids": per_sequence(run_of[owners], np.int32, len(runs)),
        "agent_ids": per_sequence(agents[owners], np.int32, 0),
        "truncated": per_sequence(cut & (np.diff(owners, append=-1) != 0), bool, False),
        "cut": per_sequence(cut, bool, False),  # of a truncated trajectory, every turn
        "valid": per_sequence(True, bool, False),
    }
    masks, images = joined_masks(trajectories), tuple(t.images for t in trajectories)
    return FlatBatch(
        tokens, sequences, starts, sizes, group_of, owners, len(groups), masks,
        images if any(images) else (),
    )  # fmt: skip


def first_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Put each sequence, longest first, into the first row with room.

    Takes sizes, [N] integers in [1, capacity], tokens. Returns [N] int64, rows from 0 without gaps.
    """
    # Equal sizes are placed together, without a loop over sequences; ties keep their order.
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    rows = np.empty(len(sizes), np.int64)
    free = np.full(len(sizes), capacity, np.int64)
    used = start = 0
    for size, count in zip(distinct[::-1], counts[::-1], strict=True):
        room = free[: used + count] // size
        placed = np.minimum(np.cumsum(room), count)
        per_row = np.diff(placed, prepend=0)
        rows[order[start : start + count]] = np.repeat(np.arange(len(per_row)), per_row)
        free[: len(per_row)] -= per_row * size
        used = max(used, int(np.flatnonzero(per_row)[-1]) + 1)
        start += count
    return rows


def fullest_rows(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Fill rows one by one with the longest sequence left and the sizes that fill its row best.

    Args and result are those of `first_fit_decreasing`.
    """
    # On GSM8K's lengths in rows of 1024 tokens, rows are 99.9 % full, by first fit 97.8 %. First
    # fit is better where about two sequences share a row.
    waiting: dict[int, list[int]] = {}  # size → its sequences, longest sizes first
    for index in np.argsort(-sizes, kind="stable").tolist():
        waiting.setdefault(int(sizes[index]), []).append(index)
    rows, row = np.empty(len(sizes), np.int64), 0
    while waiting:
        longest = next(iter(waiting))
        for size in [longest, *_best_filling(waiting, longest, capacity - longest)]:
            rows[waiting[size].pop(0)] = row
            if not waiting[size]:
                del waiting[size]
        row += 1
    return rows


def _best_filling(waiting: dict[int, list[int]], longest: int, room: int) -> list[int]:
    """Return sizes with the largest sum up to `room`, chosen from FILL_CANDIDATES sizes."""
    # Subset sums are the bits of an integer.
    fitting = [size for size in waiting if size <= room]
    sums, history = 1, []  # bit n: some subset sums to n
    for size in fitting[:: -(-len(fitting) // FILL_CANDIDATES) or 1]:
        for _ in range(min(len(waiting[size]) - (size == longest), room // size)):
            history.append((size, sums))
            sums |= (sums << size) & ((2 << room) - 1)
        if sums >> room:
            break
    chosen, total = [], sums.bit_length() - 1
    for size, before in reversed(history):
        if not before >> total & 1:
            chosen.append(size)
            total -= size
    return chosen


def _microbatch_rows(num_rows: int, full: int, shards: int) -> tuple[int, ...]:
    """Return the rows of each microbatch: full ones, and ½, ¼ and ⅛ ones at most once each."""
    # A batch that fits in one microbatch gets as few fourths of a full one as hold it.
    eighth = -(-full // (8 * shards)) * shards
    fourth = min(2 * eighth, full)
    if num_rows <= full:
        return (min(-(-num_rows // fourth) * fourth, full),) if num_rows else ()
    count, rest = divmod(num_rows, full)
    units = -(-rest // eighth)
    if units * eighth >= full:
        count, units = count + 1, 0
    return (full,) * count + tuple(eighth << bit for bit in (2, 1, 0) if units >> bit & 1)


def plan(
    sizes: np.ndarray,  # [N] tokens of each sequence
    budget: int,
    buckets: Sequence[int],  # row lengths to choose from, tokens
    *,
    attention_cost: float = 0.0,
    shards: int = 1,  # row shards; the rows of each microbatch are a multiple of it
    row_mates: np.ndarray | None = None,  # [N] int64; equal ones share a row (the two of a pair)
) -> PackPlan:
    """Choose the row length of each microbatch and pack, at the least `PackPlan.cost`.

    Short rows waste tokens; long rows waste attention, which is quadratic in T. A few sequences
    that are much longer than the others get their own microbatches.

    Args:
      budget: tokens of a microbatch on each row shard, on its `context` devices together; UserError
        for a longer sequence or pair.
      attention_cost: work of attention per token and key, over the other work per token; 0 if
        attention skips other segments.
    """
    if row_mates is not None:
        units = np.bincount(row_mates, sizes).astype(np.int64)
        packed = plan(units, budget, buckets, attention_cost=attention_cost, shards=shards)
        return replace(packed, rows=packed.rows[row_mates])
    longest = int(sizes.max(initial=1))
    if longest > budget:
        raise UserError(
            f"train.max_tokens_per_microbatch={budget} (on all devices of a row) is below the "
            f"longest trajectory or pair ({longest} tokens); raise it or lower "
            "sampling.max_new_tokens"
        )
    lengths = sorted(b for b in set(buckets) if b <= budget)
    if not lengths or lengths[-1] < longest:
        lengths.append(budget)
    uniform = _in_rows_of_one_length(sizes, budget, lengths, attention_cost, shards)
    coarse = lengths[::-2][::-1]  # every other length, for few shapes
    bounds = _length_classes(sizes, budget, coarse, attention_cost, shards)
    of_class = np.searchsorted(bounds, sizes)
    rows = np.empty(len(sizes), np.int64)
    shapes: list[tuple[int, int]] = []
    for index in range(len(bounds))[::-1]:
        members = np.flatnonzero(of_class == index)
        part = _in_rows_of_one_length(sizes[members], budget, coarse, attention_cost, shards)
        rows[members] = part.rows + sum(n for n, _ in shapes)
        shapes += part.shapes
    split = PackPlan(rows, tuple(shapes))
    worth = split.cost(attention_cost) < SPLIT_GAIN * uniform.cost(attention_cost)
    return split if worth else uniform


def _in_rows_of_one_length(
    sizes: np.ndarray, budget: int, lengths: list[int], attention_cost: float, shards: int
) -> PackPlan:
    """Return the cheapest plan, within NEAR_TIE, among the shortest row lengths that fit."""
    plans = []
    for length in [n for n in lengths if n >= sizes.max(initial=1)][:ROW_CANDIDATES]:
        rows = min((pack(sizes, length) for pack in _PACKERS), key=lambda r: r.max(initial=-1))
        parts = _microbatch_rows(int(rows.max(initial=-1)) + 1, budget // length * shards, shards)
        plans.append(PackPlan(rows, tuple((count, length) for count in parts)))
    least = min(p.cost(attention_cost) for p in plans)
    return [p for p in plans if p.cost(attention_cost) <= NEAR_TIE * least][-1]


def _length_classes(
    sizes: np.ndarray, budget: int, lengths: list[int], attention_cost: float, shards: int
) -> list[int]:
    """Return the upper bounds of the cheapest classes of lengths, a row length for each."""
    # An estimate: a sequence over half a row gets its own row, and the others leave no gaps.
    ordered = np.sort(sizes)
    before = np.concatenate([[0], np.cumsum(ordered)])
    ends, halves = (
        np.searchsorted(ordered, np.array(lengths) // part, side="right") for part in (1, 2)
    )
    best: list[tuple[float, int, list[int]]] = []  # (cost, classes, bounds) up to each length
    for length, end, half in zip(lengths, ends, halves, strict=True):
        options = []
        for start, (cost, count, bounds) in [
            (0, (0.0, 0, [])), *zip(ends, best, strict=False)
        ]:  # fmt: skip
            rows = max(-(-(before[end] - before[start]) // length), end - max(half, start))
            padded = length * sum(_microbatch_rows(rows, budget // length * shards, shards))
            more = padded * (1 + attention_cost * length)
            options.append((cost + more, count + 1, [*bounds, length]))
        best.append(min(options))
        if end == len(sizes):
            break
    return best[-1][2]


def microbatches(flat: FlatBatch, ids: np.ndarray, packed: PackPlan) -> list[Arrays]:
    """Return the packed arrays of sequences `ids` [N'], which are in the order of `packed`'s plan.

    Returns:
      [B, T] arrays of each microbatch: `tokens`, `positions`, `sequence_ids`, `loss_mask`,
      `behaviour_logprobs`, `versions` as in `flat.tokens`; int32 `segment_ids`, from 1 in each row
      and 0 at padding; int32 `flat_index` into the flat axis. At padding the index is the axis's
      size, which a gather with fill and a scatter with drop ignore. If a trajectory of the batch
      has images, `images` [B] has for each row a tuple of its segments' names, each a tuple.
    """
    lengths = np.repeat([length for _, length in packed.shapes], [n for n, _ in packed.shapes])
    total, beginnings = int(lengths.sum()), np.cumsum(lengths) - lengths
    order = np.lexsort((ids, packed.rows))
    sizes, rows, starts = flat.sizes[ids][order], packed.rows[order], flat.starts[ids][order]
    before = np.cumsum(sizes) - sizes
    first = np.searchsorted(rows, rows, side="left")  # index of the row's first sequence
    offset = beginnings[rows] + before - before[first]
    within = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
    slots = np.repeat(offset, sizes) + within

    padding = len(flat.tokens["tokens"])
    index = np.full(total, padding, np.int32)
    index[slots] = np.repeat(starts, sizes) + within
    segments = np.zeros(total, np.int32)
    segments[slots] = np.repeat(np.arange(len(rows)) - first + 1, sizes)
    out = {"flat_index": index, "segment_ids": segments}
    for name, pad in _PADDING.items():
        source = flat.tokens[name]
        values = np.full(total, pad, source.dtype)
        values[slots] = source[index[slots]]
        out[name] = values
    out["sequence_ids"][segments == 0] = len(flat.sequences["valid"])
    cuts = np.cumsum([rows * length for rows, length in packed.shapes])[:-1]
    parts = {name: np.split(values, cuts) for name, values in out.items()}
    if flat.images:
        images = np.empty(len(lengths), object)
        images.fill(())
        for row, sequence in zip(rows, ids[order], strict=True):
            images[row] += (flat.images[sequence],)
        parts["images"] = np.split(images, np.cumsum([count for count, _ in packed.shapes])[:-1])
    return [
        {name: x[i] if name == "images" else x[i].reshape(shape) for name, x in parts.items()}
        for i, shape in enumerate(packed.shapes)
    ]


def segment_sizes(segment_ids: np.ndarray) -> np.ndarray:
    """Return the tokens of each segment of `segment_ids` [B, T] as [B, M] int32, 0 for none.

    M is the least of 4, 16, 64, … that holds the segments of every row.
    """
    rows, most = len(segment_ids), int(segment_ids.max(initial=0))
    width = MIN_SEGMENTS
    while width < most:
        width *= 4
    keys = (np.arange(rows)[:, None] * (width + 1) + segment_ids).ravel()
    counts = np.bincount(keys, minlength=rows * (width + 1)).reshape(rows, width + 1)
    return counts[:, 1:].astype(np.int32)


_PACKERS = (first_fit_decreasing, fullest_rows)
_PADDING = {
    "tokens": 0, "positions": 0, "sequence_ids": 0, "loss_mask": False, "behaviour_logprobs": 0.0,
    "versions": -1,
}  # fmt: skip


def minibatch_ids(flat: FlatBatch, count: int) -> list[np.ndarray]:
    """Return the indices of each minibatch's sequences: whole groups, in order, split evenly.

    `count` is the number of minibatches, at most that of groups.
    """
    parts = np.array_split(np.arange(flat.num_groups), min(count, flat.num_groups))
    return [np.flatnonzero(np.isin(flat.groups, part)) for part in parts]
