"""Packing: every token once, rows as first-fit decreasing says, few shapes."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import Group, Trajectory, UserError
from rlx.config import default
from rlx.train import packing


def trajectory(rng, prompt: int, completion: int, name: str = "0.0", **fields) -> Trajectory:
    size = prompt + completion
    sampled = np.arange(size) >= prompt
    values = {
        "tokens": rng.integers(1, 1000, size).astype(np.int32),
        "loss_mask": sampled,
        "behaviour_logprobs": np.where(sampled, -rng.random(size), 0).astype(np.float32),
        "versions": np.where(sampled, rng.integers(0, 5, size), -1).astype(np.int32),
        "reward": float(rng.random()),
        "stop_reason": "stop",
        "trajectory_id": name,
    }
    return Trajectory(**{**values, **fields})


def groups_of(lengths_by_group, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Group(10 + g, tuple(trajectory(rng, p, c, f"{g}.{i}") for i, (p, c) in enumerate(lengths)))
        for g, lengths in enumerate(lengths_by_group)
    ]


def naive_first_fit_decreasing(sizes, capacity):
    """The textbook loop."""
    free, rows = [], [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        row = next((row for row, room in enumerate(free) if room >= sizes[i]), len(free))
        if row == len(free):
            free.append(capacity)
        free[row] -= sizes[i]
        rows[i] = row
    return rows


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 120))
def test_equals_the_textbook_loop(sizes, capacity):
    rows = packing.first_fit_decreasing(np.array(sizes), capacity)
    assert rows.tolist() == naive_first_fit_decreasing(sizes, capacity)


lengths = st.lists(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=5),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(lengths, st.sampled_from([60, 100, 256]), st.sampled_from([1, 2]), st.sampled_from([0, 0.1]))
def test_every_token_once_and_unchanged(shape, budget, shards, cost):
    groups = groups_of(shape)
    flat = packing.flatten(groups)
    ids = np.arange(flat.num_sequences)
    planned = packing.plan(flat.sizes, budget, (8, 16, 64, 128), shards=shards, attention_cost=cost)
    batches = packing.microbatches(flat, ids, planned)
    assert [batch["tokens"].shape for batch in batches] == list(planned.shapes)
    seen = []
    for batch in batches:
        rows, length = batch["tokens"].shape
        assert rows % shards == 0
        assert rows * length <= budget * shards
        for row in range(rows):
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                where = np.flatnonzero(batch["segment_ids"][row] == segment)
                sequence = batch["sequence_ids"][row, where[0]]
                seen.append(sequence)
                t = [t for g in groups for t in g.trajectories][sequence]
                assert np.array_equal(where, where[0] + np.arange(len(t.tokens)))  # contiguous
                assert np.array_equal(batch["positions"][row, where], np.arange(len(t.tokens)))
                for name in ("tokens", "loss_mask", "behaviour_logprobs", "versions"):
                    assert np.array_equal(batch[name][row, where], getattr(t, name)), name
                source = batch["flat_index"][row, where]
                assert np.array_equal(flat.tokens["tokens"][source], t.tokens)
        padding = batch["segment_ids"] == 0
        assert not batch["loss_mask"][padding].any()
        assert (batch["versions"][padding] == -1).all()
        assert (batch["flat_index"][padding] == len(flat.tokens["tokens"])).all()
        assert (batch["sequence_ids"][padding] == len(flat.sequences["valid"])).all()
    assert sorted(seen) == list(ids)


def test_flat_arrays():
    groups = groups_of([[(2, 3), (2, 0)], [(1, 4)]])
    flat = packing.flatten(groups)
    assert flat.num_tokens == 5 + 2 + 5
    assert flat.tokens["tokens"].shape == (1024,)
    assert flat.sequences["group_ids"][:3].tolist() == [0, 0, 1]
    assert flat.sequences["valid"].tolist() == [True] * 3 + [False] * 5
    assert flat.tokens["sequence_ids"][:13].tolist() == [0] * 5 + [1] * 2 + [2] * 5 + [8]
    assert flat.tokens["positions"][:12].tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]


def test_unequal_arrays_name_the_trajectory():
    rng = np.random.default_rng(0)
    broken = trajectory(rng, 2, 3, "7.1", versions=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"7\.1.*\[4, 5\]"):
        packing.flatten([Group(7, (broken,))])


def test_a_trained_first_token_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="first token is trained on"):
        packing.flatten([Group(7, (trajectory(rng, 0, 3, "7.1"),))])


def test_too_long_a_sequence_names_both_numbers():
    with pytest.raises(UserError, match=r"microbatch=4096 .* \(5310 tokens\); raise it"):
        packing.plan(np.array([10, 5310]), 4096, (128, 8192))


def test_the_shortest_bucket_unless_rows_would_be_half_empty():
    even = packing.plan(np.full(64, 128), 4096, (128, 256, 512), attention_cost=5e-4)
    assert even.row_length == 128
    just_over_half = packing.plan(np.full(64, 70), 4096, (128, 256, 512), attention_cost=5e-4)
    assert just_over_half.row_length == 512  # 7 a row instead of 1
    dear = packing.plan(np.full(64, 70), 4096, (128, 256, 512), attention_cost=1.0)
    assert dear.row_length == 128


def test_a_budget_between_buckets_is_a_row():
    assert packing.plan(np.array([260]), 300, (128, 256, 512)).row_length == 300


def gsm8k_like(n, seed=0):
    """Prompts of 60-200 tokens, completions log-normal around 200, cut at 1024."""
    rng = np.random.default_rng(seed)
    completions = np.minimum(rng.lognormal(5.3, 0.5, n).astype(int) + 1, 1024)
    return rng.integers(60, 200, n) + completions


BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize("num_sequences", [256, 1024, 8192])
def test_gsm8k_like_lengths_fill_the_budget(num_sequences):
    for seed in range(3):
        sizes = gsm8k_like(num_sequences, seed)
        planned = packing.plan(sizes, 16384, BUCKETS, attention_cost=6e-5)
        assert sizes.sum() / planned.padded_tokens >= 0.95


def test_few_shapes_over_many_batches():
    shapes = {}
    for seed in range(0, 100, 4):
        sizes = gsm8k_like(int(100 + 3 * seed), seed)
        planned = packing.plan(sizes, 65536, BUCKETS, attention_cost=6e-5)
        for rows, length in planned.shapes:
            shapes.setdefault(length, set()).add(rows)
    assert len(shapes) <= 3
    assert max(len(rows) for rows in shapes.values()) <= 5


def long_tailed(seed, n=512):
    """Answers of 2,000 tokens in the median, and up to 31,000."""
    return np.random.default_rng(seed).lognormal(7.6, 0.9, n).clip(50, 31_000).astype(int)


@pytest.mark.parametrize("shards", [1, 8])
def test_one_long_answer_does_not_lengthen_every_row(shards):
    sizes = np.append(np.clip(long_tailed(0) // 4, 50, 2000), 30_000)
    buckets = default().train.row_buckets
    planned = packing.plan(sizes, 32_768, buckets, attention_cost=6e-5, shards=shards)
    assert planned.shapes[0] == (shards, 32_768), "the longest first: memory fails at once"
    assert {length for _, length in planned.shapes[1:]} <= {512, 1024, 2048, 4096}
    flat_rows = packing.plan(sizes, 32_768, (32_768,), attention_cost=6e-5, shards=shards)
    assert planned.cost(6e-5) < 0.75 * flat_rows.cost(6e-5)
    if shards == 1:  # where attention does not look beyond a segment, full rows are what counts
        assert {*packing.plan(sizes, 32_768, buckets).shapes} == {(1, 32_768)}


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=200),
    st.sampled_from([1, 4]),
    st.sampled_from([0.0, 1e-3, 1e-1]),
)
def test_rows_of_several_lengths_hold_what_one_length_does_and_cost_less(sizes, shards, cost):
    sizes, buckets = np.array(sizes), (32, 64, 128, 256, 512)
    planned = packing.plan(sizes, 1024, buckets, attention_cost=cost, shards=shards)
    again = packing.plan(sizes, 1024, buckets, attention_cost=cost, shards=shards)
    assert (planned.shapes, planned.rows.tolist()) == (again.shapes, again.rows.tolist())
    lengths = np.repeat(*np.array(planned.shapes).T[::-1])
    used = np.bincount(planned.rows, sizes, len(lengths))
    assert (used <= lengths).all()
    assert [n for _, n in planned.shapes] == sorted((n for _, n in planned.shapes), reverse=True)
    one = min(
        packing.plan(sizes, 1024, (n,), attention_cost=cost, shards=shards).cost(cost)
        for n in buckets
        if n >= sizes.max()
    )
    assert planned.cost(cost) <= packing.NEAR_TIE * one


def test_long_tails_take_few_shapes():
    shapes = set()
    for seed in range(30):
        sizes = long_tailed(seed, 200 + 10 * seed)
        buckets = default().train.row_buckets
        shapes |= {*packing.plan(sizes, 32_768, buckets, attention_cost=6e-5).shapes}
    lengths = {length for _, length in shapes}
    assert len(lengths) <= 10, "every other bucket"
    assert all(len({n for n, other in shapes if other == length}) <= 5 for length in lengths)


def test_a_large_batch_packs_without_a_loop_over_its_tokens():
    sizes = gsm8k_like(8192)
    rng = np.random.default_rng(0)
    groups = [
        Group(g, tuple(trajectory(rng, 50, int(s) - 50) for s in sizes[g * 16 : g * 16 + 16]))
        for g in range(512)
    ]
    start = time.thread_time()  # of this thread alone, whatever else the machine does
    flat = packing.flatten(groups)
    planned = packing.plan(flat.sizes, 16384, BUCKETS, attention_cost=6e-5)
    packing.microbatches(flat, np.arange(8192), planned)
    assert time.thread_time() - start < 10  # 0.3 s; a loop over tokens and rows takes minutes


def test_minibatches_are_whole_groups():
    flat = packing.flatten(groups_of([[(1, 2)] * 3, [(1, 2)], [(1, 2)] * 2]))
    parts = packing.minibatch_ids(flat, 2)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4, 5]]
    assert len(packing.minibatch_ids(flat, 8)) == 3


@pytest.mark.parametrize(("most", "width"), [(0, 4), (4, 4), (5, 16), (16, 16), (17, 64)])
def test_segment_sizes_hold_every_segment_of_a_row(most, width):
    ids = np.zeros((3, 80), np.int32)
    ids[1, : 2 * most] = np.repeat(np.arange(most) + 1, 2)
    sizes = packing.segment_sizes(ids)
    assert sizes.shape == (3, width)
    assert sizes.dtype == np.int32
    assert sizes.tolist()[1] == [2] * most + [0] * (width - most)
    assert not sizes[[0, 2]].any()
