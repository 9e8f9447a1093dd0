"""Trees of trajectories: each token sees its own path, and an update is the one of plain rows."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms.presets import PRESETS
from rlx.base import Group, Trajectory, UserError
from rlx.model import attention, packed_attention, sharding
from rlx.model import params as parameters
from rlx.train import objective, packing, prefix_trees, update
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


def branching(seed=0, count=4, samples=5, masked=False, system=0, **fields):
    """Groups whose trajectories share a prompt, and some of them sampled turns too.

    All prompts begin with the same `system` tokens.
    """
    rng = np.random.default_rng(seed)
    groups, first = [], [(int(x), False) for x in rng.integers(1, 32, system)]
    for g in range(count):
        prompt = first + [(int(x), False) for x in rng.integers(1, 32, rng.integers(3, 12))]
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
       st.sampled_from([0.0, 0.3]))  # fmt: skip
def test_a_token_sees_its_path_and_nothing_else(texts, budget, shards, cost, fork_cost):
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
    how = {"tree_cost": cost, "shards": shards, "fork_cost": fork_cost}
    plan = prefix_trees.plan(flat, ids, budget, (8, 16), **how)
    seen, computed = [], 0
    for batch, shape in zip(prefix_trees.microbatches(flat, ids, plan), plan.shapes, strict=True):
        assert batch["tree_tokens"].shape == shape
        assert len(batch["tokens"]) == shape[0]
        assert shape[0] % shards == 0
        assert shape[0] * shape[1] <= budget * shards
        computed += int((batch["tree_counts"] > 0).sum())
        for row in range(shape[0]):
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


def of_a_kind(groups, algorithm):
    """Groups with what the algorithm asks for; some answers were cut off."""

    def changed(i, t):
        noise = np.random.default_rng(i).normal(-4.0, 0.3, len(t.tokens)).astype(np.float32)
        teacher = np.where(t.loss_mask, noise, 0.0) if algorithm.kl_anchor == "teacher" else None
        stop = "length" if i % 3 == 1 and algorithm.data == "rollouts" else "stop"
        return dataclasses.replace(t, reference_logprobs=teacher, stop_reason=stop)

    return [
        dataclasses.replace(
            g, trajectories=tuple(changed(i, t) for i, t in enumerate(g.trajectories))
        ) for g in groups
    ]  # fmt: skip


CASES = {
    "grpo": {"algorithm.entropy_coefficient": 0.05},
    "ppo": {"algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_an_update_with_trees_is_the_update_of_plain_rows(
    preset, model_config, make_config, monkeypatch
):
    """Sampled tokens that two trajectories share are trained with the advantage of each."""
    options = {"algorithm.preset": preset, **CASES.get(preset, {})}
    algorithm = TrainOptions.of(make_config(**options)).algorithm
    samples = 2 if algorithm.data == "pairs" else 5
    groups = branching(count=8 if samples == 2 else 4, samples=samples)
    if samples == 2:
        groups = [
            dataclasses.replace(g, trajectories=tuple(
                dataclasses.replace(t, reward=1.0 - i) for i, t in enumerate(g.trajectories)
            )) for g in groups
        ]  # fmt: skip
    groups = of_a_kind(groups, algorithm)

    def prepare(state, flat, minibatch_of, count):
        given = flat, jnp.asarray(minibatch_of), state.step, state.kl_coefficient
        return objective.prepare(*given, count, algorithm)

    monkeypatch.setattr(update.JaxUpdate, "_prepare", staticmethod(prepare))
    with jax.disable_jit():  # compiling each preset would take ten times as long
        require_same(*both(model_config, make_config, groups, options))


SMALL_BUDGET = {"train.max_tokens_per_microbatch": 128}
OTHERS = {
    "microbatches": (None, SMALL_BUDGET, {}),
    "masks": (None, {}, {"masked": True}),
    "lora": (None, {"lora.rank": 2}, {}),
    "system prompt": (None, {"algorithm.preset": "sft"}, {"system": 9, "samples": 1, "count": 9}),
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


def group_of(shared, size):
    """A group in order of its tokens: sequence n begins with shared[n] tokens of the one before."""
    tokens, own = np.zeros(size, np.int32), []
    for i, first in enumerate(shared):
        tokens = np.concatenate([tokens[:first], np.full(size - first, i + 1)]).astype(np.int32)
        sampled, zeros = np.arange(size) >= 40, np.zeros(size, np.int32)
        logprobs = zeros.astype(np.float32)
        own.append(Trajectory(tokens, sampled, logprobs, zeros, 0.0, "stop", str(i)))
    return packing.flatten([Group(0, tuple(own))])


def test_auto_counts_the_pairs_that_see_each_other(model_config, make_config):
    """Eight samples in one tree of 380 tokens: its square is more than that of plain rows."""
    options = {"train.row_buckets": (100, 400), **AUTO}
    trainer = update.JaxUpdate(model_config, TrainOptions.of(make_config(**options)))
    flat = group_of([0, *[60] * 7], 100)
    cost, ids = trainer._tree_cost, np.arange(8)
    assert 380 * (1 + cost * 380) > 800 * (1 + cost * 100)
    assert trainer._pack(flat, ids)[0].shared.sum() == 420
    assert 0.9 * (800 + cost * 8 * 100**2) > 400 + cost * (8 * 100**2 - 7 * 60**2)


@pytest.mark.parametrize(
    ("shared", "cost", "kept"),
    [
        # Later ones have 110 tokens of their own, and the fork at 20 saves 20 of them. The one at
        # 30 saves 20 of 40, or 60 where the other is cut.
        ([0, 30, 30, 20, 30, 30], 0.18, [0, 30, 30, 20, 30, 30]),
        ([0, 30, 30, 20, 30, 30], 0.19, [0, 30, 30, 0, 30, 30]),
        ([0, 30, 30, 20, 30, 30], 1.49, [0, 30, 30, 0, 30, 30]),
        ([0, 30, 30, 20, 30, 30], 1.51, [0, 0, 0, 0, 0, 0]),
        ([0, 21, 21, 20, 21, 21], 0.1, [0, 20, 20, 20, 20, 20]),
        ([0, 21, 21, 20, 21, 21], 0.0, [0, 21, 21, 20, 21, 21]),
    ],
)
def test_a_fork_has_to_save_its_cost(shared, cost, kept):
    flat = group_of(shared, 50)
    plan = prefix_trees.plan(flat, np.arange(6), 512, (512,), fork_cost=cost)
    assert plan.shared.tolist() == kept
    assert plan.sizes.sum() == 300 - sum(kept)


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
            monkeypatch.setattr(update, "FORK_COST", 0.0)
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
    auto = update.JaxUpdate(model or model_config, TrainOptions.of(make_config(**AUTO)))
    flat = packing.flatten(branching(count=8, samples=8))
    assert auto._pack(flat, np.arange(flat.num_sequences))[0].shared.sum() == 0


def fails(*_):
    raise ValueError("no engine\nof cuDNN")


@pytest.mark.parametrize(
    ("error", "words"),
    [(lambda *_: 0.001, ""), (lambda *_: 0.5, "is wrong by 50.0%"),
     (lambda *_: np.nan, "is wrong by nan"),
     (fails, r"no attention over trees on this device \(no engine\)")],
)  # fmt: skip
def test_a_gpu_has_trees_if_its_attention_over_them_is_right(
    error, words, model_config, make_config, monkeypatch
):
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(update, "attention_kind", lambda *_: "packed")
    monkeypatch.setattr(update, "tree_error", error)
    monkeypatch.setattr(sharding, "target_device", lambda: gpu)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(update.JaxUpdate, "_compile", lambda *_: None)
    made = {}
    for how in (AUTO, OFF):
        made[how["train.share_prefixes"]] = update.JaxUpdate(
            model_config, TrainOptions.of(make_config(**how))
        )
    assert made["off"]._prefix_mode == "off"
    assert made["auto"]._prefix_mode == ("off" if words else "auto")
    if words:
        with pytest.raises(UserError, match=words):
            update.JaxUpdate(model_config, TrainOptions.of(make_config(**ON)))
