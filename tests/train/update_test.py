"""The update: however it is cut, packed or placed, it is the same update."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.base import Group, UserError
from rlx.model import decoder
from rlx.train import checkpoint, packing, step_metrics, update
from rlx.train.train_options import TrainOptions
from tests.fixtures.commands import with_devices


def run(trainer, params, batches):
    """The state and metrics after some batches."""
    state, metrics = trainer.init(params), None
    for groups in batches:
        state, metrics = trainer.update(state, groups)
    return state, metrics


def distance(a, b):
    """Largest absolute difference of two parameter trees."""
    gaps = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), a.params, b.params)
    return max(float(gap) for gap in jax.tree.leaves(gaps))


def same_bits(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# SGD makes a difference of gradients a difference of parameters; Adam's sign would hide scale.
SGD = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.0, "optimizer.learning_rate": 1.0}
SMALL = {"train.max_tokens_per_microbatch": 64}
TWO = {"train.minibatches": 2}


def test_one_update_is_plain_gradient_descent_on_the_papers_loss(
    model_config, trainer, params, make_groups
):
    """GRPO from its formula, one sequence a row, padded."""
    groups = make_groups()
    state, metrics = run(trainer(**SGD), params, [groups])
    trajectories = [t for g in groups for t in g.trajectories]

    def padded(values, width=32):
        return np.stack([np.pad(v, (0, width - len(v))) for v in values])

    tokens = padded([t.tokens for t in trajectories])
    mask = padded([t.loss_mask for t in trajectories])
    behaviour = padded([t.behaviour_logprobs for t in trajectories])
    rewards = [np.array([t.reward for t in g.trajectories]) for g in groups]
    normal = [(r - r.mean()) / (r.std(ddof=1) + 1e-5) for r in rewards]
    advantage = np.concatenate(normal)[:, None]
    batch = {
        "tokens": tokens,
        "positions": np.broadcast_to(np.arange(32), tokens.shape),
        "segment_ids": padded([np.ones(len(t.tokens), np.int32) for t in trajectories]),
    }

    def loss(params):
        target = decoder.logprobs(params, model_config, batch)[0]
        frozen = jax.lax.stop_gradient(target)
        weight = jnp.exp(frozen - behaviour)
        weight = jnp.where(weight > 5, 0.0, weight)
        terms = -jnp.exp(target - frozen) * advantage * weight * mask
        return jnp.mean(terms.sum(1) / mask.sum(1))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    for new, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, want, atol=2e-6)
    assert metrics["actor_loss"] == pytest.approx(float(value), abs=1e-6)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_metrics(trainer, params, make_groups):
    batches = [make_groups(0), make_groups(1, version=0)]
    _, metrics = run(trainer(), params, batches)
    trajectories = [t for g in batches[1] for t in g.trajectories]
    total = sum(len(t.tokens) for t in trajectories)
    trained = sum(t.num_trained for t in trajectories)
    expected = {
        "n_seqs": 16,
        "n_prompts": 4,
        "n_tokens": total,
        "n_valid_tokens": trained,
        "avg_seq_len": total / 16,
        "avg_prompt_len": (total - trained) / 16,
        "no_eos_ratio": np.mean([t.truncated for t in trajectories]),
        "task_reward": np.mean([t.reward for t in trajectories]),
        "final_reward": np.mean([t.reward for t in trajectories]),
        "kl_reward": 0.0,
        "staleness_min": 1,
        "staleness_mean": 1.0,
        "staleness_max": 1,
        "crossed_ratio": 0.0,
        "importance_weight": 1.0,
        "actor_clip_ratio": 0.0,
        "ppo_approx_kl": 0.0,
        "skipped_updates": 0.0,
        "learning_rate": 1e-2,
        "info/length": trained / 16,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert metrics["staleness_histogram"] == {"1": trained}
    assert metrics["tokens_per_version"] == {"0": trained}
    assert 0 < metrics["entropy"] < np.log(32) + 1e-3
    assert 0 <= metrics["pad_ratio"] < 1
    assert metrics["behaviour_weight"] > 0
    assert metrics["behaviour_kl"] > 0
    assert all(np.isfinite(v) for v in metrics.values() if not isinstance(v, dict))


def test_tokens_after_an_update_in_flight_are_counted_by_turn(make_groups):
    [group, *_] = make_groups(0)
    t = group.trajectories[0]
    mask = np.array([0, 1, 1, 1, 0, 1, 1], bool)
    versions = np.array([-1, 3, 3, 4, -1, 5, 6], np.int32)
    for turns, share in ((None, 3 / 5), (np.array([0, 0, 0, 0, 1, 1, 1]), 2 / 5)):
        one = dataclasses.replace(t, loss_mask=mask, versions=versions, turn_ids=turns)
        found = step_metrics.crossed_ratio([dataclasses.replace(group, trajectories=(one,))])
        assert found == share


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean"])
def test_several_microbatches_are_one(trainer, params, make_groups, reduction):
    groups = make_groups()
    options = {**SGD, "algorithm.reduction": reduction}
    one, metrics = run(trainer(**options), params, [groups])
    many, metrics_many = run(trainer(**options, **SMALL), params, [groups])
    assert metrics["n_microbatches"] == 1
    assert metrics_many["n_microbatches"] >= 3
    assert distance(one, many) < 3e-6
    for name, value in metrics.items():
        if isinstance(value, float) and name != "pad_ratio":
            assert metrics_many[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_rows_of_several_lengths_are_rows_of_one(trainer, params, make_groups):
    groups = [*make_groups(num_groups=8), *make_groups(seed=5, num_groups=1, n=2, longest=110)]
    one = trainer(**SGD, **{"train.row_buckets": (128,), "train.max_tokens_per_microbatch": 256})
    own = trainer(**SGD, **{"train.row_buckets": (32, 64, 128)})
    flat = packing.flatten(groups)
    lengths = {length for _, length in own._pack(flat, np.arange(flat.num_sequences))[0].shapes}
    assert len(lengths) > 1, "this batch no longer has rows of several lengths"
    (a, metrics), (b, others) = (run(each, params, [groups]) for each in (one, own))
    assert distance(a, b) < 3e-6
    for name in ("actor_loss", "grad_norm", "entropy"):
        assert others[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def test_order_of_groups_and_samples_does_not_matter(trainer, params, make_groups):
    groups = make_groups()
    turned = [Group(g.group_id, g.trajectories[::-1]) for g in groups[::-1]]
    a, _ = run(trainer(**SGD), params, [groups])
    b, _ = run(trainer(**SGD), params, [turned])
    assert distance(a, b) < 3e-6


def test_same_state_and_groups_give_the_same_bits(trainer, params, make_groups):
    batches = [make_groups(seed) for seed in range(2)]
    a, _ = run(trainer(**TWO), params, batches)
    b, _ = run(trainer(**TWO), params, batches)
    assert same_bits(a, b)


def test_resuming_gives_the_bits_of_the_run_that_never_stopped(
    trainer, params, make_groups, tmp_path
):
    batches = [make_groups(seed) for seed in range(4)]
    straight, _ = run(trainer(), params, batches)
    halfway, _ = run(trainer(), params, batches[:2])
    checkpoint.save(tmp_path, 2, halfway, {})
    state = checkpoint.restore_latest(tmp_path, trainer().restore).state
    assert int(state.step) == 2
    for groups in batches[2:]:
        state, _ = trainer().update(state, groups)
    assert same_bits(straight, state)


def test_decoupled_is_plain_ppo_when_the_behaviour_is_the_policy_itself(
    trainer, params, make_groups
):
    """With w = 1 and u = 1 both are the plain policy gradient."""
    groups = _with_own_logprobs(trainer(), params, make_groups())
    decoupled, metrics = run(trainer(**SGD), params, [groups])
    plain, _ = run(trainer(**SGD, **{"algorithm.decoupled": False}), params, [groups])
    assert metrics["behaviour_weight"] == pytest.approx(1.0, abs=1e-5)
    assert distance(decoupled, plain) < 3e-6


def _with_own_logprobs(trainer, params, groups):
    """The groups as if `params` itself had sampled them."""
    scores = iter(trainer.logprobs(trainer.init(params), groups))
    return [
        dataclasses.replace(
            g,
            trajectories=tuple(
                dataclasses.replace(t, behaviour_logprobs=np.where(t.loss_mask, next(scores), 0))
                for t in g.trajectories
            ),
        )
        for g in groups
    ]


def test_logprobs_are_those_of_each_sequence_alone(model_config, trainer, params, make_groups):
    groups = make_groups()
    alone = jax.jit(functools.partial(decoder.logprobs, config=model_config))
    scores = iter(trainer(**TWO).logprobs(trainer().init(params), groups))
    for t in (t for g in groups for t in g.trajectories):
        size = len(t.tokens)
        batch = {
            "tokens": np.pad(t.tokens, (0, 32 - size))[None],
            "positions": np.arange(32)[None],
            "segment_ids": (np.arange(32) < size).astype(np.int32)[None],
        }
        expected = alone(params, batch=batch)[0][0, :size]
        expected = np.where(t.loss_mask, expected, 0.0)  # nobody asks about a prompt's tokens
        np.testing.assert_allclose(next(scores), expected, atol=1e-5)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_minibatches_anchor_at_the_policy_before_the_batch(trainer, params, make_groups, proximal):
    """The second minibatch has a ratio other than 1: the anchor does not follow the target.

    Anchoring at the policy before each minibatch would give ratio 1 in both.
    """
    anchored = trainer(**TWO, **{"algorithm.proximal": proximal})
    state, metrics = run(anchored, params, [make_groups(5)])
    assert int(state.step) == 1
    assert int(state.updates) == 2
    assert abs(metrics["ppo_approx_kl"]) > 1e-3
    assert metrics["importance_weight"] != pytest.approx(1.0, abs=1e-4)


def test_an_interpolated_anchor_knows_which_minibatch_it_is_for(trainer, params, make_groups):
    """Tokens of version 0 in the batch after version 1: α = (1 − 0)/(1 − 0), then 1/(1½ − 0)."""
    options = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.0, "train.minibatches": 2}
    still = trainer(**options, **{"algorithm.proximal": "loglinear"})
    groups = make_groups()
    state = still.init(params)
    gaps = [
        (scores - t.behaviour_logprobs)[t.loss_mask]
        for t, scores in zip(
            (t for g in groups for t in g.trajectories),
            still.logprobs(state, groups),
            strict=True,
        )
    ]
    _, metrics = still.update(state.replace(step=jnp.int32(1)), groups)
    second = np.concatenate(gaps[len(gaps) // 2 :])
    want = -(1 - 1 / 1.5) * second.sum() / len(np.concatenate(gaps))
    assert metrics["ppo_approx_kl"] == pytest.approx(want, rel=1e-4)


def test_recomputed_anchor_equals_its_own_forward_pass(trainer, params, make_groups):
    """Two minibatches with a learning rate of 0: the anchor is the target in both."""
    still = trainer(**TWO, **{"optimizer.learning_rate": 0.0})
    _, metrics = run(still, params, [make_groups()])
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ppo_approx_kl"] == pytest.approx(0.0, abs=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_version(
    trainer, params, make_groups
):
    broken = {**params, "final_norm": params["final_norm"].at[0].set(jnp.inf)}
    before = trainer().init(broken)
    kept = jax.tree.map(np.array, before)
    state, metrics = trainer().update(before, make_groups())
    assert metrics["skipped_updates"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    assert int(state.step) == 1
    assert int(state.updates) == 0
    assert same_bits(state.params, kept.params)
    assert same_bits(state.opt_state, kept.opt_state)


def test_clipping_is_by_global_norm(trainer, params, make_groups):
    clipped = trainer(**{**SGD, "optimizer.clip_norm": 1e-3})
    state, metrics = run(clipped, params, [make_groups()])
    assert metrics["grad_norm"] > 1e-2
    moved = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), state.params, params)
    norm = np.sqrt(sum(float(x) for x in jax.tree.leaves(moved)))
    assert norm == pytest.approx(1e-3, rel=1e-2)


def test_learning_raises_the_rewarded_sequence(trainer, params, make_groups):
    """One prompt, two completions, one rewarded: its probability rises, the other's falls."""
    (group,) = make_groups(3, num_groups=1, n=2)
    good, bad = group.trajectories
    group = Group(0, (dataclasses.replace(good, reward=1.0), dataclasses.replace(bad, reward=0.0)))

    def totals(params):
        scores = trainer().logprobs(trainer().init(params), [group])
        return [s[t.loss_mask].sum() for s, t in zip(scores, group.trajectories, strict=True)]

    before = totals(params)
    state = trainer().init(params)
    for _ in range(5):
        (fresh,) = _with_own_logprobs(trainer(), state.params, [group])
        state, _ = trainer().update(state, [fresh])
    after = totals(state.params)
    assert after[0] > before[0] + 1
    assert after[1] < before[1] - 1


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_kl_pulls_towards_the_reference(
    model_config, make_config, trainer, params, make_groups, placement
):
    """With equal rewards the KL term is all there is; from the reference itself it is nothing."""
    config = make_config(
        **SGD,
        **{
            "algorithm.kl_placement": placement,
            "algorithm.kl_coefficient": 1.0,
            "algorithm.kl_estimator": "k2",
        },
    )
    groups = _with_own_logprobs(trainer(), params, make_groups())
    groups = [
        Group(g.group_id, tuple(dataclasses.replace(t, reward=1.0) for t in g.trajectories))
        for g in groups
    ]
    pulled = update.JaxUpdate(model_config, TrainOptions.of(config), source=lambda _: params)
    _, metrics = run(pulled, params, [groups])
    assert float(metrics["grad_norm"]) < 1e-5
    assert metrics["kl_reward"] == pytest.approx(0.0, abs=1e-9)
    other = jax.tree.map(lambda p: p + 0.05, params)
    groups = _with_own_logprobs(trainer(), other, groups)
    _, metrics = run(pulled, other, [groups])
    assert metrics["grad_norm"] > 1e-4
    assert (metrics["kl_reward"] < 0) == (placement == "reward")
    assert (metrics["kl_loss"] > 0) == (placement == "loss")


def test_kl_without_a_reference_is_an_error(model_config, make_config):
    with pytest.raises(UserError, match="needs a reference policy"):
        update.JaxUpdate(
            model_config, TrainOptions.of(make_config(**{"algorithm.preset": "reinforce_pp"}))
        )


def test_a_reference_that_follows_needs_a_term_that_asks_for_one(model_config, make_config):
    with pytest.raises(UserError, match=r"reference.mode=ema .* grpo has none"):
        TrainOptions.of(make_config(**{"reference.mode": "ema"}))


def test_a_teacher_is_asked_for_where_trajectories_have_none(trainer, params, make_groups):
    taught = trainer(**{"algorithm.preset": "distill"})
    with pytest.raises(UserError, match=r"no logprobs of a teacher; set teacher.path"):
        taught.update(taught.init(params), make_groups())


def test_peers_of_a_turn_need_trajectories_that_tell_their_turns(trainer, params, make_groups):
    by_turn = trainer(**{"algorithm.peers": "turn"})
    with pytest.raises(UserError, match=r"peers=turn .* have no turns; .* peers=prompt"):
        by_turn.update(by_turn.init(params), make_groups())


def test_bfloat16_parameters_have_float32_moments(trainer, params, make_groups):
    narrow = trainer(**{"model.dtype": "bfloat16", "model.compute_dtype": "bfloat16"})
    state, _ = run(narrow, params, [make_groups()])
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(state.opt_state) if x.ndim} == {"float32"}
    types = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype), narrow.abstract_state)


@pytest.fixture
def compilations():
    """The names of programs compiled so far, growing."""
    names = []

    def listen(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("options", [{}, {**SGD, **SMALL}, TWO], ids=["one", "several", "two"])
def test_nothing_recompiles_after_warm_up(trainer, params, make_groups, compilations, options):
    """Lengths, rewards and versions vary; shapes and so programs do not."""
    steady = trainer(**options)
    state = steady.init(params)
    for seed in range(8):
        state, metrics = steady.update(state, make_groups(seed))
        dict(metrics)
    jax.jit(lambda x: x + len(options))(1.0)
    assert compilations, "the listener hears nothing"
    compilations.clear()
    for seed in range(8, 24):
        state, metrics = steady.update(state, make_groups(seed, version=seed))
        dict(metrics)
    assert not compilations


@pytest.mark.parametrize("options", [{}, {"algorithm.preset": "ppo"}], ids=["grpo", "ppo"])
@pytest.mark.parametrize("mesh", ["", "fsdp:1"])
def test_a_state_that_rested_trains_to_the_same_bits(
    trainer, params, make_groups, tmp_path, compilations, mesh, options
):
    """In the host's memory between steps; weights, scores and checkpoints are made from there."""
    batches = [make_groups(seed) for seed in range(3)]
    resting = trainer(**options, **{"train.mesh": mesh})
    plain, _ = run(resting, params, batches)
    state = resting.rest(resting.init(params))
    for number, groups in enumerate(batches):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
        before, (state, _) = state, resting.update(state, groups)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state)}
        assert kinds == {jax.devices()[0].default_memory().kind}
        scores, weights = resting.logprobs(state, groups), resting.weights(state).arrays()
        losses = resting.evaluate(state, groups)
        before, state = state, resting.rest(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert resting.evaluate(state, groups) == losses
        for own, wanted in zip(resting.logprobs(state, groups), scores, strict=True):
            np.testing.assert_array_equal(own, wanted)
        for name, tensor in resting.weights(state).arrays().items():
            np.testing.assert_array_equal(tensor, weights[name])
        if number == 1:
            compilations.clear()
    assert not compilations, "a state that rested has the programs of one that did not"
    assert same_bits(state, plain)
    assert same_bits(resting.rest(state), plain), "it rests already"
    resting.save(tmp_path, state).result()
    assert same_bits(resting.restore(tmp_path), plain)


def test_metrics_wait_for_nobody_until_read(trainer, params, make_groups):
    _, metrics = run(trainer(), params, [make_groups()])
    assert "not read yet" in repr(metrics)
    assert set(metrics) >= {"task_reward", "entropy"}
    assert "not read yet" not in repr(metrics)


@pytest.mark.parametrize(
    "case",
    [
        ("accumulated", "data:4,tensor:2"),
        ("experts", "fsdp:2,expert:2,tensor:2"),
        *(
            pytest.param((x,), marks=pytest.mark.slow)
            for x in ("ppo", "lora", "joined", "dpo", "experts", "masks", "trees")
        ),
        pytest.param(("windows", "context:2,tensor:4"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_sharded_is_unsharded(case):
    """The same updates on one device and on meshes of 8, in a process with 8 devices."""
    program = Path(__file__).with_name("sharded_update.py")
    subprocess.run(
        [sys.executable, program, *case],
        check=True, timeout=900, env=with_devices(8),
    )  # fmt: skip
