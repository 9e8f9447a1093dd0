"""Trees of trajectories: each token sees its own path, and an update is the one of plain rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import Group, Trajectory, UserError
from rlx.model import attention, packed_attention
from rlx.model import params as parameters
from rlx.train import packing, prefix_trees, update
from rlx.train.train_options import TrainOptions
from tests.model.attention_test import tree_kernel
from tests.train.sharded_update import MIXTURE, OTHER, masks

SGD = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.0, "optimizer.learning_rate": 1.0,
       "critic.learning_rate": 1.0, "train.row_buckets": (128,)}  # fmt: skip
ON, OFF, AUTO = ({"train.share_prefixes": how} for how in ("on", "off", "auto"))


def conversation(rng, tokens, turns, name, longest=6, vocab=32, **fields):
    """A trajectory that begins with (token, sampled) pairs and goes on for some turns."""
    tokens = list(tokens)
    for _ in range(turns):
        size = int(rng.integers(1, longest))
        tokens += [(int(rng.integers(1, vocab)), False)] * int(rng.integers(1, 3))
        tokens += [(int(x), True) for x in rng.integers(1, vocab, size)]
    ids, sampled = (np.array(x) for x in zip(*tokens, strict=True))
    noise = np.where(sampled, -3.5 + 0.3 * rng.normal(size=len(ids)), 0)
    versions = np.where(sampled, 0, -1).astype(np.int32)
    stop = "length" if rng.random() < 0.3 else "stop"
    values = {"reward": float(rng.random()), "stop_reason": stop, "trajectory_id": name}
    values |= fields
    logprobs = noise.astype(np.float32)
    return Trajectory(ids.astype(np.int32), sampled, logprobs, versions, **values), tokens


def branching(seed=0, count=4, samples=5, masked=False, **fields):
    """Groups whose trajectories share a prompt, and some of them sampled turns too."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(count):
        prompt = [(int(x), False) for x in rng.integers(1, 32, rng.integers(3, 12))]
        own, stems = [], [prompt]
        for i in range(samples):
            stem = stems[rng.integers(len(stems))]
            made, stem = conversation(rng, stem, 1 + (i % 2), f"{g}.{i}", **fields)
            more = masks(rng, made.tokens) if masked else {}
            own.append(dataclasses.replace(made, **more))
            stems.append(stem[: rng.integers(len(prompt), len(stem) + 1)])
        groups.append(Group(g, tuple(own)))
    return groups


sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12
)  # fmt: skip


@settings(deadline=None)
@given(sequences, st.sampled_from([12, 16, 40]), st.sampled_from([1, 2]), st.sampled_from([0, 0.1]),
       st.booleans())  # fmt: skip
def test_a_token_sees_its_path_and_nothing_else(texts, budget, shards, cost, fork_once):
    rng, whole, groups = np.random.default_rng(len(texts)), [], []
    for i, text in enumerate(texts):
        whole.append(np.array(text, np.int32))
        trained = rng.random(len(text)) < 0.3
        trained[0] = False
        zeros = np.zeros(len(text), np.int32)
        own = Trajectory(
            whole[-1], trained, zeros.astype(np.float32), zeros, 0.0, "stop", str(i)
        )  # fmt: skip
        groups.append(Group(i, (own,)))
    flat, ids = packing.flatten(groups), np.arange(len(whole))
    how = {"tree_cost": cost, "shards": shards, "fork_once": fork_once}
    plan = prefix_trees.plan(flat, ids, budget, (8, 16), **how)
    seen, computed = [], 0
    for batch, shape in zip(prefix_trees.microbatches(flat, ids, plan), plan.shapes, strict=True):
        assert batch["tree_tokens"].shape == shape
        assert len(batch["tokens"]) == shape[0]
        assert shape[0] % shards == 0
        assert shape[0] * shape[1] <= budget * shards
        computed += int((batch["tree_counts"] > 0).sum())
        chains = prefix_trees.chains(batch)
        for row in range(shape[0]):
            begins = np.flatnonzero(np.diff(chains[row], prepend=0) > 0)
            firsts = batch["tree_positions"][row, begins]
            trees = np.cumsum(firsts == 0)
            forks = {(tree, first) for tree, first in zip(trees, firsts, strict=True) if first}
            assert not fork_once or len(forks) == len({tree for tree, _ in forks})
            places, ends = np.arange(shape[1]), batch["tree_ends"][row]
            uses = np.zeros(shape[1], int)
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                slots = np.flatnonzero(batch["segment_ids"][row] == segment)
                sequence = batch["sequence_ids"][row, slots[0]]
                seen.append(sequence)
                text, trained = whole[sequence], groups[sequence].trajectories[0].loss_mask
                first = np.flatnonzero(trained)[0] - 1 if trained.any() else len(text) - 1
                assert np.array_equal(batch["tokens"][row, slots], text[first:])
                for slot, position in zip(slots, range(first, len(text)), strict=True):
                    at = batch["sources"][row, slot]
                    path = np.flatnonzero((places <= at) & (at < ends))
                    assert np.array_equal(batch["tree_tokens"][row, path], text[: position + 1])
                    assert np.array_equal(batch["tree_positions"][row, path], range(position + 1))
                uses[path] += 1
            assert np.array_equal(uses, batch["tree_counts"][row])
    assert sorted(seen) == list(ids)
    assert computed == flat.num_tokens - plan.shared.sum()


def test_trees_stay_whole_where_they_fit_and_are_cut_where_not():
    rng = np.random.default_rng(0)
    prompt = [(int(x), False) for x in rng.integers(1, 1000, 20)]
    groups = [
        Group(0, tuple(conversation(rng, prompt, 2, str(i), vocab=1000)[0] for i in range(8)))
    ]
    flat = packing.flatten(groups)
    ids, unique = np.arange(8), flat.num_tokens - 7 * 20
    whole = prefix_trees.plan(flat, ids, 256, (256,))
    assert flat.num_tokens - whole.shared.sum() == unique
    cut = prefix_trees.plan(flat, ids, 64, (64,))
    parts = len(set(cut.rows))
    assert 1 < parts < 8
    assert flat.num_tokens - cut.shared.sum() == unique + 20 * (parts - 1)
    for cost, some in ((0.0, True), (10.0, False)):  # a short prefix is not worth long rows
        short = dataclasses.replace(flat, starts=flat.starts + 18, sizes=flat.sizes - 18)
        planned = prefix_trees.plan(short, ids, 256, (256,), tree_cost=cost)
        assert (planned.shared.sum() > 0) == some
    with pytest.raises(UserError, match=r"max_tokens_per_microbatch=16 .* below"):
        prefix_trees.plan(flat, ids, 16, (64,))


def gap(a, b):
    gaps = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), a, b)
    return max(jax.tree.leaves(gaps))


def both(model, make_config, groups, options, first=ON, second=OFF):
    """Parameters (and a critic's) and metrics after an update by two trainers, and the first."""
    params = parameters.init(model, jax.random.key(0))
    moved = jax.tree.map(lambda p: p + 0.01 * jnp.sign(p), params)  # off the reference
    found = []
    for more in (first, second):
        trainer = update.JaxUpdate(
            model, TrainOptions.of(make_config(**{**SGD, **options, **more})),
            source=lambda _: params,
        )  # fmt: skip
        state = trainer.init(None if options.get("lora.rank") else moved)
        if state.critic is not None:
            head = 0.3 * jax.random.normal(jax.random.key(3), (1, model.model_dim))
            own = {**state.critic.params, "value_head": head}
            state = state.replace(critic=state.critic.replace(params=own))
        if options.get("lora.rank"):  # or half of the adapters would have no gradient
            state = state.replace(params=jax.tree.map(lambda p: p + 0.01, state.params))
        begun = jax.tree.map(np.array, state.params)
        losses = trainer.evaluate(state, groups)
        scores = trainer.logprobs(state, groups)
        state, metrics = trainer.update(state, groups)
        learned = (state.params, state.critic and state.critic.params)
        found.append((learned, dict(metrics), losses, scores))
        assert gap(begun, state.params) > 1e-4, "nothing was learned"
    return found


PACKED = {"pad_ratio", "row_length", "n_microbatches", "n_shared_tokens", "model_flops"}


def require_same(one, other, shared=True):
    (a, metrics, losses, scores), (b, others, again, plain) = one, other
    assert gap(a, b) < 1e-5
    assert losses == pytest.approx(again, rel=1e-5, abs=1e-5)
    for x, y in zip(scores, plain, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert set(metrics) == set(others)
    for name in set(metrics) - PACKED:
        assert metrics[name] == pytest.approx(others[name], rel=1e-5, abs=1e-5), name
    assert (metrics["n_shared_tokens"] > 20) == shared
    assert (metrics["model_flops"] < others["model_flops"]) == shared


CASES = {
    "grpo": {"algorithm.entropy_coefficient": 0.05},
    "gspo": {},
    "gmpo": {},
    "ppo": {"algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1},
    "sft": {},
    "dpo": {},
    "reward_model": {},
}


@pytest.mark.parametrize("preset", CASES)
def test_an_update_with_trees_is_the_update_of_plain_rows(preset, model_config, make_config):
    """Sampled tokens that two trajectories share are trained with the advantage of each."""
    samples = 2 if preset in ("dpo", "reward_model") else 5
    groups = branching(count=8 if samples == 2 else 4, samples=samples)
    if samples == 2:
        groups = [
            dataclasses.replace(g, trajectories=tuple(
                dataclasses.replace(t, reward=1.0 - i) for i, t in enumerate(g.trajectories)
            )) for g in groups
        ]  # fmt: skip
    options = {"algorithm.preset": preset, **CASES[preset]}
    require_same(*both(model_config, make_config, groups, options))


SMALL_BUDGET = {"train.max_tokens_per_microbatch": 128}
OTHERS = {
    "microbatches": (None, SMALL_BUDGET, {}),
    "masks": (None, {}, {"masked": True}),
    "lora": (None, {"lora.rank": 2}, {}),
    "windows": (OTHER, {}, {}),
    "experts": (MIXTURE, {"train.balance_coefficient": 0.1}, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_and_microbatches_do_not_matter(name, model_config, make_config):
    """The balance loss of a mixture counts a shared token as often as plain rows have it."""
    model, options, fields = OTHERS[name]
    one, other = both(model or model_config, make_config, branching(1, **fields), options)
    if name == "microbatches":
        assert one[1]["n_microbatches"] > 1
    require_same(one, other)


def test_auto_takes_what_costs_less(model_config, make_config, make_groups):
    """Long prompts are shared; prompts that differ leave the batch in plain rows."""
    trainer = update.JaxUpdate(model_config, TrainOptions.of(make_config(**AUTO)))
    for groups, shares in ((branching(count=8, samples=8), True), (make_groups(n=1), False)):
        flat = packing.flatten(groups)
        plan, parts = trainer._pack(flat, np.arange(flat.num_sequences))
        assert all(("sources" in part) == shares for part in parts)
        assert (plan.shared.sum() > 0) == shares


def test_trees_that_fork_once_are_cut_where_others_fork_again():
    """Two conversations of a group share 30 tokens, which cost less computed twice than six."""
    rng = np.random.default_rng(0)
    prompt = [(int(x), False) for x in rng.integers(1, 1000, 20)]
    turns = [conversation(rng, prompt, 4, "", vocab=1000)[1][:30] for _ in range(2)]
    own = [conversation(rng, t, 2, f"{i}{j}", vocab=1000)[0]
           for i, t in enumerate(turns) for j in range(3)]  # fmt: skip
    flat = packing.flatten([Group(0, tuple(own))])
    shared = {}
    for once in (False, True):
        plan = prefix_trees.plan(flat, np.arange(6), 512, (512,), fork_once=once)
        shared[once] = int(plan.shared.sum())
    assert shared == {False: 4 * 30 + 20, True: 4 * 30}


@pytest.mark.parametrize("preset", ["gspo", "ppo"])
def test_an_update_with_packed_trees_is_the_update_of_plain_rows(
    preset, model_config, make_config, monkeypatch
):
    """As on a GPU, with a stand-in for cuDNN's calls."""
    params = parameters.init(model_config, jax.random.key(0))
    found = {}
    for share in ("off", "on"):
        if share == "on":
            monkeypatch.setattr(packed_attention, "kernel", tree_kernel)
            for module in (update, attention):
                monkeypatch.setattr(module, "attention_kind", lambda *_: "packed")
        keys = {**SGD, "algorithm.preset": preset, "train.share_prefixes": share}
        trainer = update.JaxUpdate(model_config, TrainOptions.of(make_config(**keys)))
        groups = branching(count=2, samples=4)
        state, metrics = trainer.update(trainer.init(params), groups)
        found[share] = state.params, metrics
    assert gap(found["on"][0], found["off"][0]) < 1e-5
    assert gap(found["on"][0], params) > 1e-4
    assert found["on"][1]["n_shared_tokens"] > 20
    for name in set(found["on"][1]) - PACKED:
        assert found["on"][1][name] == pytest.approx(found["off"][1][name], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("how", "model", "words"),
    [("mask", None, "share_prefixes=on and cuDNN's attention has trees from Hopper on"),
     ("packed", OTHER, "without sliding windows")],
)  # fmt: skip
def test_trees_are_refused_by_name_and_auto_is_off(
    how, model, words, model_config, make_config, monkeypatch
):
    monkeypatch.setattr(update, "attention_kind", lambda *_: how)
    with pytest.raises(UserError, match=words):
        update.JaxUpdate(model or model_config, TrainOptions.of(make_config(**ON)))
    monkeypatch.setattr(update, "attention_kind", lambda *_: "packed")
    trainer = update.JaxUpdate(model_config, TrainOptions.of(make_config(**AUTO)))
    flat = packing.flatten(branching(count=8, samples=8))
    assert trainer._pack(flat, np.arange(flat.num_sequences))[0].shared.sum() == 0
