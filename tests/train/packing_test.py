"""Packing: every token once, rows as first-fit decreasing says, few shapes."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import Group, Trajectory, UserError
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
@given(lengths, st.sampled_from([60, 100, 256]), st.sampled_from([1, 2]), st.integers(0, 5))
def test_every_token_once_and_unchanged(shape, budget, shards, at_least):
    groups = groups_of(shape)
    flat = packing.flatten(groups)
    ids = np.arange(flat.num_sequences)
    planned = packing.plan(flat.sizes, budget, (64, 128, 256), shards=shards, at_least=at_least)
    batches = packing.microbatches(flat, ids, planned)
    assert len(batches) >= at_least
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
    for seed in range(100):
        sizes = gsm8k_like(int(100 + 3 * seed), seed)
        planned = packing.plan(sizes, 65536, BUCKETS, attention_cost=6e-5)
        shapes.setdefault(planned.row_length, set()).update(planned.microbatch_rows)
    assert len(shapes) <= 3
    assert max(len(rows) for rows in shapes.values()) <= 5


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
