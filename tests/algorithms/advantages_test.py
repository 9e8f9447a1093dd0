"""Rewards to advantages against float64 oracles, and the identities that hold between them."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms import advantages as adv
from rlx.algorithms.algorithm import LEVELS
from rlx.algorithms.presets import PRESETS
from rlx.base import UserError

GRPO = PRESETS["grpo"]
OPTIONAL = ("proximal_logprobs", "reference_logprobs", "values", "bootstrap_values")
SEEDS = st.integers(0, 2**32 - 1)
few = settings(derandomize=True, deadline=None, max_examples=8)


def variant(**fields):
    return dataclasses.replace(GRPO, **fields)


@partial(jax.jit, static_argnums=1)
def compute(flat, algorithm):
    return adv.advantages(flat, algorithm)


standardise = jax.jit(adv.standardise, static_argnames=("mean", "std", "leave_one_out"))
token_rewards = jax.jit(adv.token_rewards)
gae = jax.jit(adv.gae, static_argnums=5)


PIPELINES = {
    "grpo": GRPO,
    "overlong": variant(
        overlong_buffer=6, overlong_limit=14, overlong_factor=0.7, reward_bias=-0.3,
        reward_scale=1.7, reward_clip=2.0,
    ),
    "gae": variant(gamma=0.97, lam=0.9),
    "batch": variant(reward_mean="batch", reward_std="batch", gamma=0.9, lam=0.5),
    "leave_one_out": variant(leave_one_out=True, reward_std="none"),
    # What is divided by is not near 0, where float32 and float64 part.
    "maxrl": dataclasses.replace(PRESETS["maxrl"], reward_bias=9.0),
    "maxrl_of_others": variant(reward_std="mean", leave_one_out=True, lam=0.9, reward_bias=9.0),
    "renormalised": variant(reward_mean="none", reward_std="none", advantage_mean="batch",
                            advantage_std="batch", gamma=0.95),
    "per_group": variant(advantage_mean="group", advantage_std="group", lam=0.8),
    "per_agent": variant(peers="agent", advantage_mean="group", advantage_std="group", lam=0.8),
    "per_turn": variant(peers="turn", advantage_mean="group", advantage_std="group", lam=0.8),
    "without_bootstrap": variant(bootstrap_truncated=False, gamma=0.97, lam=0.9),
    "kl_k1": variant(kl_placement="reward", kl_estimator="k1", kl_coefficient=0.3),
    "kl_k2": variant(kl_placement="reward", kl_estimator="k2", kl_coefficient=0.3, gamma=0.9),
    "kl_k3": variant(kl_placement="reward", kl_estimator="k3", kl_coefficient=0.3,
                     advantage_mean="batch", advantage_std="batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_matches_the_oracle(name, cases, oracles):
    algorithm = PIPELINES[name]

    @few
    @given(SEEDS)
    def check(seed):
        batch = cases.random(seed)
        got = compute(cases.flat(batch, *OPTIONAL), algorithm)
        want_advantages, want_returns = oracles.advantages(batch, algorithm)
        close(cases.split(got["advantages"], batch), want_advantages)
        close(cases.split(got["returns"], batch), want_returns)
        shaped = [oracles.shaped_reward(r, algorithm) for r in batch]
        close([got["shaped_rewards"][: len(batch)]], [np.array(shaped)])
        assert not np.any(got["shaped_rewards"][len(batch) :])

    check()


def close(got, want, relative=1e-6):
    """Within 1e-6 of the largest number of its kind, or of 1: sums lose what cancels."""
    got, want = np.concatenate(got), np.concatenate(want)
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=relative, atol=2 * relative * scale)


def test_it_compiles_once_for_one_shape(cases):
    traced = jax.jit(
        chex.assert_max_traces(adv.advantages, n=1), static_argnums=1
    )  # a second trace raises
    for seed in range(3):
        traced(cases.flat(cases.random(seed)), GRPO)


@pytest.mark.parametrize("std", LEVELS)
@pytest.mark.parametrize("mean", LEVELS)
def test_standardise_matches_the_oracle(mean, std, oracles):
    @few
    @given(SEEDS, st.integers(1, 12), st.booleans())
    def check(seed, count, leave_one_out):
        rng = np.random.default_rng(seed)
        x = np.zeros(16, np.float32)
        x[:count] = rng.normal(3, 2, count)
        x[count:] = np.nan  # what lies in the padding must not matter
        groups = rng.integers(-3, 3, 16)
        got = standardise(
            x, groups, np.arange(16) < count, mean=mean, std=std, leave_one_out=leave_one_out
        )
        want = oracles.standardised(
            x[:count].astype(float), groups[:count], mean, std, leave_one_out
        )
        np.testing.assert_allclose(got[:count], want, rtol=1e-5, atol=4e-6)
        assert not np.any(got[count:])

    check()


def test_equal_rewards_give_exactly_zero():
    """8 × 0.1 in float32 has a mean beside 0.1; over σ + 1e-5 that would be a false signal."""
    for value in (0.1, 1 / 3, -0.7, 1e3):
        x = jnp.full(8, value, jnp.float32)
        for level in ("group", "batch"):
            out = standardise(x, jnp.zeros(8), jnp.ones(8, bool), mean=level, std=level)
            np.testing.assert_array_equal(out, 0.0)


def test_a_group_of_one():
    one = (jnp.array([3.0]), jnp.array([7]), jnp.array([True]))
    np.testing.assert_allclose(standardise(*one, mean="group", std="group"), [0.0])
    # Nobody is left to be the baseline: it is 0, and σ is 1.
    left = standardise(*one, mean="group", std="group", leave_one_out=True)
    np.testing.assert_allclose(left, [3.0 / (1 + 1e-5)], rtol=1e-6)


def test_no_std_means_no_division():
    x = jnp.array([1.0, 2.0])
    out = standardise(x, jnp.zeros(2), jnp.ones(2, bool), mean="group", std="none")
    np.testing.assert_array_equal(out, [-0.5, 0.5])  # not over 1 + 1e-5


def test_groups_are_known_by_id_not_by_stride():
    """A partial group first: strides of two would mix the groups from there on."""
    rewards = jnp.array([5.0, 1.0, 3.0, 10.0, 30.0])
    groups = jnp.array([8, 2, 2, 4, 4])
    out = standardise(rewards, groups, jnp.ones(5, bool), mean="group", std="none")
    np.testing.assert_allclose(out, [0, -1, 1, -10, 10])


def test_a_long_batch_is_normalised_in_two_passes():
    """A one-pass E[x²] − E[x]² in float32 would give σ = 0 here."""
    x = np.random.default_rng(0).normal(1000.0, 0.01, 100_000).astype(np.float32)
    args = (jnp.asarray(x), jnp.zeros(x.size, jnp.int32), jnp.ones(x.size, bool))
    exact = (x - x.mean(dtype=np.float64)) / (x.std(ddof=1, dtype=np.float64) + 1e-5)
    for level in ("batch", "group"):
        out = standardise(*args, mean=level, std=level)
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)


@few
@given(SEEDS, SEEDS)
def test_permuting_sequences_permutes_advantages(cases, seed, other):
    batch = cases.random(seed)
    order = np.random.default_rng(other).permutation(len(batch))
    algorithm = PIPELINES["per_group"]
    straight = cases.split(compute(cases.flat(batch), algorithm)["advantages"], batch)
    moved_batch = [batch[i] for i in order]
    moved = cases.split(compute(cases.flat(moved_batch), algorithm)["advantages"], moved_batch)
    close(moved, [straight[i] for i in order])


def test_a_reward_survives_an_ending_on_observations():
    """The last tokens are a tool's: a reward placed on the last token would not be trained on."""
    mask = jnp.array([0, 1, 1, 0, 0, 0, 1, 0], bool)
    ids = jnp.array([0, 0, 0, 0, 0, 1, 1, 2])
    out = token_rewards(jnp.array([5.0, 7.0]), mask, ids)
    np.testing.assert_array_equal(out, [0, 0, 5, 0, 0, 0, 7, 0])
    undiscounted = gae(out, jnp.zeros(8), mask, ids, jnp.zeros(2), GRPO)
    np.testing.assert_array_equal(undiscounted, [0, 5, 5, 0, 0, 0, 7, 0])


def test_maxrl_by_hand():
    """One success of four: 3 and −1; none, or rewards around 0: nothing."""
    rewards = jnp.array([1.0, 0, 0, 0, 0, 0, -1.0, 1.0])
    groups, valid = jnp.array([0, 0, 0, 0, 1, 1, 2, 2]), jnp.ones(8, bool)
    out = standardise(rewards, groups, valid, mean="group", std="mean")
    np.testing.assert_allclose(out, [3, -1, -1, -1, 0, 0, 0, 0])


def test_gae_steps_over_observations_and_stops_at_the_end():
    """By hand: γ = λ = ½, one observation between two trained tokens, then another trajectory."""
    mask = jnp.array([1, 0, 1, 1], bool)
    ids = jnp.array([0, 0, 0, 1])
    values = jnp.array([1.0, 99.0, 2.0, 4.0])
    rewards = jnp.array([0.0, 0.0, 8.0, 16.0])
    a = gae(rewards, values, mask, ids, jnp.zeros(2), variant(gamma=0.5, lam=0.5))
    # δ_2 = 8 − 2; δ_0 = ½·2 − 1 = 0, A_0 = 0 + ¼·6.
    np.testing.assert_allclose(a, [1.5, 0, 6, 12])


def test_only_truncated_trajectories_bootstrap(cases):
    base = cases.random(3, count=2, empty=False)
    batch = [
        dataclasses.replace(r, truncated=t, bootstrap=10.0, reward=0.0)
        for r, t in zip(base, (True, False), strict=True)
    ]
    algorithm = variant(reward_mean="none", reward_std="none")
    out = compute(cases.flat(batch, "bootstrap_values"), algorithm)
    cut, ended = cases.split(out["advantages"], batch)
    np.testing.assert_allclose(cut[batch[0].mask], 10.0)
    np.testing.assert_allclose(ended, 0.0)


def test_a_reward_is_compared_within_its_agent(cases):
    """One prompt, two agents: compared with the second, all of the first would lose."""
    base = cases.random(3, count=4, empty=False)
    batch = [
        dataclasses.replace(r, group=5, agent=agent, reward=reward)
        for r, agent, reward in zip(base, (0, 0, 1, 1), (0.0, 1.0, 10.0, 11.0), strict=True)
    ]
    algorithm = variant(peers="agent", reward_std="none")
    out = cases.split(compute(cases.flat(batch), algorithm)["advantages"], batch)
    for got, rollout, want in zip(out, batch, (-0.5, 0.5, -0.5, 0.5), strict=True):
        np.testing.assert_allclose(got[rollout.mask], want)


def test_advantages_are_compared_within_their_turn():
    """Two rollouts of two turns of one token; discounting makes the first turn's smaller."""
    mask, ids = jnp.ones(4, bool), jnp.array([0, 0, 1, 1])
    flat = {
        "loss_mask": mask, "sequence_ids": ids, "rewards": jnp.array([2.0, 6.0]),
        "group_ids": jnp.array([3, 3]), "truncated": jnp.zeros(2, bool),
        "valid": jnp.ones(2, bool), "behaviour_logprobs": jnp.zeros(4),
        "turn_ids": jnp.array([0, 1, 0, 1]),
    }  # fmt: skip
    algorithm = variant(reward_mean="none", reward_std="none", peers="turn", gamma=0.5,
                        advantage_mean="group")  # fmt: skip
    out = compute(flat, algorithm)["advantages"]
    np.testing.assert_allclose(out, [-1, -2, 1, 2])  # of 1, 3 in turn 0 and 2, 6 in turn 1


@few
@given(SEEDS)
def test_a_leave_one_out_baseline_knows_nothing_of_its_own_sample(cases, seed):
    """Raising one reward raises its own advantage by as much and no other above where it was."""
    batch = cases.random(seed, count=6, empty=False, singles=False)
    raised = [dataclasses.replace(batch[0], reward=batch[0].reward + 1.0), *batch[1:]]
    before, after = (
        [a[r.trained()[-1]] for a, r in zip(
            cases.split(compute(cases.flat(x), PRESETS["rloo"])["advantages"], x), x, strict=True)]
        for x in (batch, raised)
    )  # fmt: skip
    moved = np.subtract(after, before)
    peers = [i for i in range(1, 6) if batch[i].group == batch[0].group]
    np.testing.assert_allclose(moved[0], 1.0, atol=1e-5)
    np.testing.assert_allclose(moved[peers], -1.0 / len(peers), atol=1e-5)
    others = [i for i in range(1, 6) if i not in peers]
    np.testing.assert_array_equal(moved[others], 0.0)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "sapo", "m2po", "m2po_areal"]
)
def test_a_group_of_equal_rewards_teaches_nothing(name, cases):
    """Neither whole groups, nor partial ones, nor those that were all cut off."""
    batch = [
        dataclasses.replace(r, reward=(0.1, 1 / 3)[r.group % 2], truncated=True, group=r.group % 2)
        for r in cases.random(8, count=9, empty=False)
    ]
    out = compute(cases.flat(batch), PRESETS[name])["advantages"]
    np.testing.assert_array_equal(out, 0.0)


def test_grpo_gives_every_token_its_groups_score_and_nothing_else(cases):
    """Re-standardising over the batch would change these numbers."""
    batch = cases.random(11, count=8, binary=True, singles=False, empty=False)
    out = cases.split(compute(cases.flat(batch), GRPO)["advantages"], batch)
    for got, rollout in zip(out, batch, strict=True):
        peers = [r.reward for r in batch if r.group == rollout.group]
        score = (rollout.reward - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-5)
        np.testing.assert_allclose(got[rollout.mask], score, rtol=1e-6)


def test_kl_uses_the_proximal_policy_where_known(cases):
    batch = cases.random(5)
    algorithm = PIPELINES["kl_k1"]
    flat = cases.flat(batch, "proximal_logprobs", "reference_logprobs")
    known = compute(flat, algorithm)["kl_rewards"]
    sampled = compute(cases.flat(batch, "reference_logprobs"), algorithm)["kl_rewards"]
    delta = flat["proximal_logprobs"] - flat["reference_logprobs"]
    np.testing.assert_allclose(known, np.where(flat["loss_mask"], -0.3 * delta, 0), atol=1e-6)
    delta = flat["behaviour_logprobs"] - flat["reference_logprobs"]
    np.testing.assert_allclose(sampled, np.where(flat["loss_mask"], -0.3 * delta, 0), atol=1e-6)


def test_a_missing_reference_is_an_error(cases):
    with pytest.raises(UserError, match="reference_logprobs"):
        compute(cases.flat(cases.random(0)), PIPELINES["kl_k3"])


def test_a_non_finite_kl_is_counted_and_left_out(cases):
    batch = cases.random(2, count=3, empty=False)
    flat = cases.flat(batch, "reference_logprobs")
    spot = int(np.flatnonzero(flat["loss_mask"])[0])
    flat["reference_logprobs"][spot] = -np.inf
    flat["reference_logprobs"][~flat["loss_mask"]] = np.nan  # nobody looks there
    out = compute(flat, PIPELINES["kl_k3"])
    assert int(out["nonfinite_kl"]) == 1
    assert float(out["kl_rewards"][spot]) == 0.0
    assert np.isfinite(out["advantages"]).all()


def test_the_overlong_penalty_by_hand():
    algorithm = variant(overlong_buffer=4, overlong_limit=10, overlong_factor=0.5)
    lengths = jnp.array([1, 6, 8, 10, 11, 40])
    out = adv.shape_rewards(jnp.ones(6), lengths, algorithm)
    np.testing.assert_allclose(out, [1.0, 1.0, 0.75, 0.5, 0.5, 0.5])


def test_large_rewards_keep_their_order_unless_a_clip_is_set():
    rewards, lengths = jnp.array([100.0, 60.0, 30.0, 25.0]), jnp.ones(4, int)
    for preset in PRESETS.values():
        if preset.reward_scale:
            shaped = adv.shape_rewards(rewards, lengths, preset)
            np.testing.assert_allclose(shaped - shaped[0], [0.0, -40.0, -70.0, -75.0])
    clipped = adv.shape_rewards(rewards, lengths, variant(reward_clip=26.0))
    np.testing.assert_allclose(clipped, [26.0, 26.0, 26.0, 25.0])
