"""What learns beside the policy: critic, reference, β; and the trainers that are other rows."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.algorithms.presets import PRESETS
from rlx.base import Group, UserError
from rlx.model import decoder
from rlx.model import params as parameters
from rlx.train import checkpoint, update
from rlx.train.train_options import TrainOptions
from tests.fixtures import rounding

SGD = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.0, "optimizer.learning_rate": 1.0,
       "critic.learning_rate": 1.0}  # fmt: skip
FILTERED = {**SGD, "algorithm.overlong_filter": True}
CUT = {"train.max_tokens_per_microbatch": 128, "train.row_buckets": (64, 128)}
# Whatever a state can hold, at once: a critic that warms up, an EMA of the policy, a β that adapts.
WHOLE = {
    "algorithm.preset": "ppo", "algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1,
    "algorithm.kl_target": 0.02, "algorithm.kl_horizon": 100, "reference.mode": "ema",
    "reference.decay": 0.75, "critic.warmup_steps": 1, "train.minibatches": 2,
    "critic.learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def trainers(model_config, make_config, params):
    """trainers(**overrides) → a JaxUpdate whose frozen reference is the first policy."""
    made = {}

    def make(**overrides):
        key = tuple(sorted(overrides.items()))
        if key not in made:
            config = make_config(**overrides)
            made[key] = update.JaxUpdate(
                model_config, TrainOptions.of(config), source=lambda _: params
            )
        return made[key]

    return make


@pytest.fixture(scope="module")
def oracles():
    path = Path(__file__).parents[1] / "algorithms" / "oracles.py"
    spec = importlib.util.spec_from_file_location("train_oracles", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def host(tree):
    return jax.tree.map(np.array, tree)


def same_bits(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def gap(a, b):
    """Largest absolute difference of two trees."""
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def pairs(make_groups, seed=0, num_groups=6):
    """Groups of a chosen and a rejected one."""
    return [
        dataclasses.replace(
            g,
            trajectories=tuple(
                dataclasses.replace(t, reward=reward)
                for t, reward in zip(g.trajectories, (1.0, 0.0), strict=True)
            ),
        )
        for g in make_groups(seed, num_groups=num_groups, n=2)
    ]


def with_value_head(state, seed=3):
    """A critic that has an opinion: the one it begins with is 0 everywhere."""
    critic = state.critic
    head = 0.3 * jax.random.normal(jax.random.key(seed), critic.params["value_head"].shape)
    return state.replace(critic=critic.replace(params={**critic.params, "value_head": head}))


# The critic.


def test_the_policy_waits_for_its_critic_bit_for_bit(trainers, params, make_groups):
    trainer = trainers(**WHOLE)
    state = trainer.init(params)
    before = host(state)
    state, metrics = trainer.update(state, make_groups(0))
    assert same_bits(state.params, before.params)
    assert same_bits(state.opt_state, before.opt_state)
    assert (int(state.updates), int(state.critic.updates), int(state.step)) == (0, 2, 1)
    assert metrics["skipped_updates"] == 0
    assert gap(state.critic.params, before.critic.params) > 1e-3
    state, _ = trainer.update(state, make_groups(1))
    assert gap(state.params, before.params) > 1e-3
    assert (int(state.updates), int(state.critic.updates), int(state.step)) == (2, 4, 2)


def test_values_returns_and_advantages_are_those_of_each_sequence_alone(
    trainers, params, make_groups, oracles
):
    """Values by a forward pass of one sequence, GAE by the oracle: value loss and advantages."""
    trainer = trainers(**SGD, **{"algorithm.preset": "ppo"})
    groups = make_groups(4, longest=8)  # some are cut off, and bootstrap
    state = with_value_head(trainer.init(params))
    critic = host(state.critic.params)
    config = dataclasses.replace(trainer.model, value_head=True)
    values = jax.jit(lambda params, batch: decoder.values(params, config, batch))
    rollouts = []
    for group in groups:
        for t in group.trajectories:
            size = len(t.tokens)
            own = values(
                critic,
                {
                    "tokens": np.pad(t.tokens, (0, 32 - size))[None],
                    "positions": np.arange(32)[None],
                    "segment_ids": (np.arange(32) < size).astype(np.int32)[None],
                },
            )
            own = np.asarray(own, np.float64)[0, :size]
            zeros = np.zeros(size)
            rollouts.append(
                oracles.Rollout(
                    mask=t.loss_mask, reward=t.reward, group=group.group_id, truncated=t.truncated,
                    target=zeros, proximal=zeros, behaviour=zeros, reference=zeros,
                    values=np.append(0.0, own[:-1]), entropy=zeros, versions=t.versions,
                    bootstrap=own[-1],
                )
            )  # fmt: skip
    assert any(r.truncated for r in rollouts)
    assert not all(r.truncated for r in rollouts)
    algorithm = PRESETS["ppo"]
    advantages, returns = oracles.advantages(rollouts, algorithm)
    rollouts = [
        dataclasses.replace(r, returns=ret, current_values=r.values)
        for r, ret in zip(rollouts, returns, strict=True)
    ]
    loss, _ = oracles.value_loss_and_gradient(rollouts, algorithm)
    _, metrics = trainer.update(state, groups)
    trained = sum(r.mask.sum() for r in rollouts)
    assert metrics["value_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["advantage"] == pytest.approx(
        sum(a.sum() for a in advantages) / trained, rel=1e-4
    )
    assert metrics["value"] == pytest.approx(
        sum(r.values[r.mask].sum() for r in rollouts) / trained, rel=1e-4
    )
    assert metrics["critic_grad_norm"] > 0


def test_the_policys_schedule_counts_its_own_updates(trainers, params, make_groups):
    """Two of four batches are the critic's alone: the policy's rate falls over its other four."""
    trainer = trainers(
        **{**SGD, "total_steps": 4, "critic.warmup_steps": 2, "train.minibatches": 2,
           "algorithm.preset": "ppo", "optimizer.schedule": "linear",
           "optimizer.learning_rate": 1e-3}
    )  # fmt: skip
    state, rates, moves = trainer.init(params), [], []
    for seed in range(4):
        before = host(state.params)
        state, metrics = trainer.update(state, make_groups(seed))
        rates.append(metrics["learning_rate"])
        moves.append(gap(state.params, before) > 0)
    assert moves == [False, False, True, True]
    assert rates == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.25e-3])
    # The optimizer goes by the same count: after its four updates the rate is 0.
    before = host(state.params)
    state, metrics = trainer.update(state, make_groups(4))
    assert (metrics["learning_rate"], gap(state.params, before)) == (0, 0)


@pytest.mark.parametrize(
    ("preset", "steps", "words"),
    [("ppo", 10, "leaves none of total_steps=10"), ("grpo", 1, "grpo has none; set algorithm.cri")],
)
def test_a_warm_up_that_cannot_be_is_refused(model_config, make_config, preset, steps, words):
    config = make_config(**{"algorithm.preset": preset, "critic.warmup_steps": steps})
    with pytest.raises(UserError, match=words):
        TrainOptions.of(config)


def test_a_critic_learns_the_values(trainers, params, make_groups):
    trainer = trainers(**WHOLE)
    state, errors = trainer.init(params), []
    for _ in range(6):
        state, metrics = trainer.update(state, make_groups(2, longest=8))
        errors.append(metrics["value_error"])
    assert errors[-1] < 0.7 * errors[0]


def test_a_critic_has_a_learning_rate_of_its_own_and_the_policys_clip(model_config, make_config):
    own = {"algorithm.preset": "ppo", "critic.learning_rate": 0.25, "optimizer.clip_norm": 0.5}
    trainer = update.JaxUpdate(model_config, TrainOptions.of(make_config(**{**SGD, **own})))
    for learner, rate in ((trainer.learner, 1.0), (trainer.critic_learner, 0.25)):
        ones = {"bias": jnp.ones(1)}
        updates, _ = learner.optimizer.update(ones, learner.optimizer.init(ones), ones)
        assert updates["bias"] == -rate
        assert learner.clip_norm == 0.5


def test_a_critic_divides_by_tokens_whatever_the_policy_divides_by(trainers, params, make_groups):
    """Sixteen sequences have some 130 tokens: the policy's own divisor here is an eighth."""
    norms = []
    for reduction in ("token_mean", "sequence_mean_token_sum"):
        options = {**SGD, "algorithm.preset": "ppo", "algorithm.reduction": reduction}
        if reduction == "token_mean":
            del options["algorithm.reduction"]  # as above: nothing compiles again
        trainer = trainers(**options)
        _, metrics = trainer.update(with_value_head(trainer.init(params)), make_groups(4))
        norms.append((metrics["critic_grad_norm"], metrics["grad_norm"]))
    (critic, policy), (same, larger) = norms
    assert same == pytest.approx(critic, rel=1e-6)
    assert larger > 4 * policy


# However it is cut, packed or placed.


@pytest.mark.parametrize("preset", ["ppo", "m2po", "m2po_areal", "dpo"])
def test_microbatches_rows_and_order_do_not_matter(preset, trainers, params, make_groups):
    """M2PO looks at the whole minibatch; a critic and a pair must not be cut in two."""
    options = {**SGD, "algorithm.preset": preset}
    ends = []
    groups = pairs(make_groups) if preset == "dpo" else make_groups(0)
    if preset == "m2po_areal":
        options |= {"algorithm.second_moment": 0.03, "algorithm.clip_low": 0.2,
                    "optimizer.learning_rate": 0.1}  # fmt: skip
    turned = [
        Group(g.group_id, g.trajectories if preset == "dpo" else g.trajectories[::-1])
        for g in groups[::-1]
    ]
    moved = jax.tree.map(lambda p: p + 0.01 * jnp.sign(p), params)  # off the reference
    for cut, batch in (({}, groups), (CUT, turned)):
        trainer = trainers(**options, **cut)
        state = trainer.init(moved)
        if preset == "ppo":
            state = with_value_head(state)
        before = host(state.params)
        state, metrics = trainer.update(state, batch)
        ends.append((state, dict(metrics)))
    (one, a), (many, b) = ends
    assert a["n_microbatches"] == 1
    assert b["n_microbatches"] >= 2
    assert gap(one.params, before) > 1e-3
    assert gap(one, many) < 5e-6
    assert (a["n_left_out"] > 10) == (preset == "m2po_areal")
    for name, value in a.items():
        if isinstance(value, float) and name != "pad_ratio":
            assert b[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name


def test_what_lag_came_to_is_one_number_for_every_objective(trainers, params, make_groups):
    """`lag_kl` needs no proximal policy, and counts the tokens that M2PO leaves out."""
    groups, seen, whole = make_groups(), {}, {}
    for name, algorithm in {
        "decoupled": {"algorithm.preset": "grpo"},
        "coupled": {"algorithm.preset": "grpo", "algorithm.decoupled": False},
        "m2po": {"algorithm.preset": "m2po_areal"},
    }.items():
        for into, minibatches in ((seen, 4), (whole, 1)):
            trainer = trainers(**SGD, **algorithm, **{"train.minibatches": minibatches})
            _, metrics = trainer.update(trainer.init(params), groups)
            into[name] = dict(metrics)
    for runs in (seen, whole):
        values = [metrics["lag_kl"] for metrics in runs.values()]
        assert values == pytest.approx([values[0]] * 3, rel=1e-6)
        assert values[0] > 1e-3
    assert whole["m2po"]["n_left_out"] > 10
    assert whole["decoupled"]["lag_kl"] == pytest.approx(whole["decoupled"]["behaviour_kl"])
    assert whole["coupled"]["behaviour_kl"] == 0
    assert "n_sampled_tokens" not in whole["coupled"]


def test_bfloat16_moves_the_policy_as_its_roundings_do(trainers, model_config, make_groups):
    """Three batches on a sharp policy: what rounding the matrices does, times `OF_A_LAYER`."""
    sharper = dataclasses.replace(model_config, initializer_range=0.2)
    sharp, moves = parameters.init(sharper, jax.random.key(0)), []
    begins = (sharp, "float32"), (rounding.rounded(sharp), "float32"), (sharp, "bfloat16")
    for begin, dtype in begins:
        keys = {"optimizer.learning_rate": 0.01, "model.compute_dtype": dtype}
        trainer = trainers(**FILTERED | keys)
        state = trainer.init(begin)
        for seed in range(3):
            state, _ = trainer.update(state, make_groups(seed, longest=15))
        moves.append(jax.tree.map(jnp.subtract, state.params, begin))
    exact, matrices, found = moves
    inherent = rounding.apart(matrices, exact)
    assert 1e-4 < rounding.apart(found, exact) <= rounding.OF_A_LAYER * inherent


# The reference policy, and what a checkpoint keeps.


def test_an_averaged_reference_and_its_coefficient(trainers, params, make_groups):
    trainer = trainers(**WHOLE)
    state = trainer.init(params)
    assert same_bits(state.reference, state.params)
    coefficient = float(state.kl_coefficient)
    assert coefficient == pytest.approx(0.1)
    for seed in range(3):
        before = host(state.reference)
        state, metrics = trainer.update(state, make_groups(seed))
        want = jax.tree.map(
            lambda old, new: 0.75 * old + 0.25 * np.array(new), before, state.params
        )
        assert gap(state.reference, want) < 1e-6
        error = np.clip(metrics["reference_kl"] / 0.02 - 1, -0.2, 0.2)
        assert metrics["kl_coefficient"] == pytest.approx(coefficient, rel=1e-6)
        if seed:  # in the first batch the policy waits for its critic
            coefficient *= 1 + error * 16 / 100
        assert float(state.kl_coefficient) == pytest.approx(coefficient, rel=1e-5)
    assert gap(state.reference, state.params) > 1e-3


def test_a_copied_reference_stands_still_in_between(model_config, params):
    """Copied after every second batch, on a state of one number."""
    kl = dataclasses.replace(PRESETS["grpo"], kl_placement="loss")
    options = TrainOptions(kl, reference_mode="copy", reference_every=2)
    trainer = update.JaxUpdate(model_config, options, source=lambda _: params)
    state = trainer.first_state({"x": jnp.float32(0.0)})
    end_batch, seen = jax.jit(trainer.end_batch), []
    for value in (0.1, 0.2, 0.3, 0.7, 0.9):
        moved = state.replace(params={"x": jnp.float32(value)})
        state = end_batch(moved, jnp.float32(0.0), jnp.float32(1.0), jnp.float32(1.0))
        seen.append(np.float32(state.reference["x"]))
    np.testing.assert_array_equal(seen, np.float32([0.0, 0.2, 0.2, 0.7, 0.7]))
    frozen = dataclasses.replace(options, reference_mode="frozen")
    trainer = update.JaxUpdate(model_config, frozen, source=lambda _: params)
    assert trainer.first_state({"x": jnp.float32(0.0)}).reference is None


def test_an_average_of_a_bfloat16_policy_moves(model_config, params):
    """A step of (1 − decay) of a small change is below half of bfloat16's spacing at 1."""
    kl = dataclasses.replace(PRESETS["grpo"], kl_placement="loss", kl_coefficient=0.1)
    options = TrainOptions(kl, reference_mode="ema", reference_decay=0.99)
    trainer = update.JaxUpdate(model_config, options, source=lambda _: params)
    state = trainer.first_state({"x": jnp.ones((), jnp.bfloat16)})
    moved = state.replace(params={"x": jnp.bfloat16(1.125)})
    state = jax.jit(trainer.end_batch)(moved, jnp.float32(0.0), jnp.float32(1.0), jnp.float32(1.0))
    assert float(state.reference["x"]) == pytest.approx(1.00125, abs=1e-6)
    assert state.params["x"].dtype == jnp.bfloat16


def test_resuming_ppo_gives_the_bits_of_the_run_that_never_stopped(
    trainers, params, make_groups, tmp_path
):
    trainer = trainers(**WHOLE)
    batches = [make_groups(seed) for seed in range(4)]
    state = trainer.init(params)
    for index, groups in enumerate(batches):
        state, _ = trainer.update(state, groups)
        if index == 1:
            checkpoint.save(tmp_path, 2, state, {})
            halfway = host(state)
    back = checkpoint.restore_latest(tmp_path, trainer.restore).state
    assert same_bits(back, halfway)
    for groups in batches[2:]:
        back, _ = trainer.update(back, groups)
    assert same_bits(back, state)


# Batches with little or nothing to learn from.


def test_an_all_truncated_batch_is_filtered_and_changes_nothing(trainers, params, make_groups):
    trainer = trainers(**FILTERED)
    groups = [
        Group(
            g.group_id, tuple(dataclasses.replace(t, stop_reason="length") for t in g.trajectories)
        )
        for g in make_groups(0)
    ]
    state = trainer.init(params)
    before = host(state.params)
    state, metrics = trainer.update(state, groups)
    assert same_bits(state.params, before)
    assert metrics["n_valid_tokens"] == 0
    assert metrics["n_left_out"] == sum(t.num_trained for g in groups for t in g.trajectories)
    assert all(np.isfinite(v) for v in metrics.values() if not isinstance(v, dict))


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (0.25, 0.5)])
def test_a_cut_trajectory_is_filtered_whole_whatever_its_turns_are_worth(
    rewards, trainers, params, make_groups
):
    trainer, (group,) = trainers(**FILTERED), make_groups(0, num_groups=1, n=3)
    first, *others = group.trajectories
    turns = (np.arange(len(first.tokens)) > np.flatnonzero(first.loss_mask)[0]).astype(np.int32)
    own = {"turn_ids": turns, "turn_rewards": rewards if len(set(rewards)) > 1 else ()}
    cut = dataclasses.replace(first, stop_reason="length", reward=rewards[0], **own)
    _, metrics = trainer.update(trainer.init(params), [Group(0, (cut, *others))])
    assert metrics["n_left_out"] == first.num_trained


def test_groups_of_one_and_of_equal_rewards_change_nothing(trainers, params, make_groups):
    trainer = trainers(**FILTERED)
    ones = make_groups(1, num_groups=3, n=1)
    equal = [
        Group(g.group_id + 3, tuple(dataclasses.replace(t, reward=0.1) for t in g.trajectories))
        for g in make_groups(2, num_groups=3, n=3)
    ]
    state = trainer.init(params)
    before = host(state.params)
    state, metrics = trainer.update(state, [*ones, *equal])
    assert same_bits(state.params, before)
    assert metrics["grad_norm"] == 0.0


# The other rows.


@pytest.mark.parametrize(
    ("preset", "better"),
    [("sft", lambda m: -m["sft_loss"]), ("reward_model", lambda m: m["pair_margin"]),
     ("dpo", lambda m: m["pair_margin"])],
)  # fmt: skip
def test_another_trainer_learns_what_it_is_shown(preset, better, trainers, params, make_groups):
    """Its loss on the same data, by `evaluate`, is that of the update; and it falls."""
    groups = make_groups(5, n=1) if preset == "sft" else pairs(make_groups)
    trainer = trainers(**SGD, **{"algorithm.preset": preset})
    state = trainer.init(params)
    shown, seen = [], []
    for _ in range(8):
        seen.append(trainer.evaluate(state, groups))
        state, metrics = trainer.update(state, groups)
        shown.append(metrics)
    name = "sft_loss" if preset == "sft" else "pair_loss"
    for a, b in zip(seen, shown, strict=True):
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6)
    assert better(shown[-1]) > better(shown[0]) + 0.1
    assert shown[-1][name] < 0.9 * shown[0][name]
    if preset != "sft":
        assert shown[0][name] == pytest.approx(np.log(2), rel=1e-4)
        assert shown[-1]["pair_accuracy"] == 1.0


@pytest.mark.parametrize("n", [1, 3])
def test_a_pair_is_two(n, trainers, params, make_groups):
    trainer = trainers(**SGD, **{"algorithm.preset": "dpo"})
    with pytest.raises(ValueError, match=f"{n} trajectories; loss=dpo wants a chosen and a rej"):
        trainer.update(trainer.init(params), make_groups(0, n=n))
