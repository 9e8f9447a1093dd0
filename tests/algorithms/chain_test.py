"""Every preset from a batch to its gradients, against the oracles' own chain.

What the trainer does between its forward passes (`objective.prepare`, `gather` and the losses), on
random ragged batches in two minibatches of packed rows: rewards, advantages, filters, weights and
denominators of one minibatch, loss and gradients.
"""

import dataclasses
import math
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx import config as config_lib
from rlx.algorithms import losses, presets, supervised
from rlx.train import objective

SEEDS = st.integers(0, 2**32 - 1)
few = settings(derandomize=True, deadline=None, max_examples=8)
MINIBATCHES = 2
VERSION = 6


def row(preset, **overrides):
    config = config_lib.default().algorithm
    config.preset = preset
    for name, value in overrides.items():
        config[name] = value
    return presets.resolve(config, max_new_tokens=18)


ROWS = {
    **{name: row(name) for name in presets.PRESETS},
    "ppo_without_bootstrap": row("ppo", bootstrap_truncated=False, value_clip=0.0, gamma=0.9),
    "overlong_filter": row("dapo", overlong_filter=True),
    "overlong_tokens": row("dapo", overlong_buffer=5.0, overlong_limit=16, overlong_factor=0.3),
    "m2po_tight": row("m2po", second_moment_clip=0.01, clip_low=0.05, clip_high=0.1),
    "m2po_by_sequence": row("m2po_areal", second_moment=0.2, reduction="sequence_mean_token_mean"),
    "by_agent": row("lite_ppo", peers="agent", reward_std="group", advantage_std="group"),
    "by_turn": row("grpo", peers="turn", advantage_mean="group", advantage_std="group", lam=0.9),
    "sapo_decoupled": row("sapo", decoupled=True, sapo_positive=2.0, sapo_negative=3.0),
    "gspo_wide": row("gspo", clip_low=0.2, clip_high=0.3, dual_clip=1.5, weight_upper=1.1),
    "gspo_kl": row("gspo", kl_placement="loss", kl_estimator="k3", kl_coefficient=0.1),
    "rloo_on_policy": row("rloo", decoupled=False, entropy_coefficient=0.05),
    "loglinear": row("dapo", proximal="loglinear", reduction="prompt_mean"),
}


@partial(jax.jit, static_argnums=3)
def prepared(flat, minibatch_of, coefficient, algorithm):
    given = np.int32(VERSION), coefficient, MINIBATCHES, algorithm
    return objective.prepare(flat, minibatch_of, *given)


@partial(jax.jit, static_argnums=4)
def differentiated(rows, per_token, sums, progress, algorithm):
    batch = objective.gather(per_token, rows, sums, progress)

    def policy(target, entropy):
        if algorithm.loss == "nll":
            return supervised.nll_loss(target, entropy, batch)
        if algorithm.data == "pairs":
            return supervised.pair_loss(target, batch, algorithm)
        return losses.policy_loss(target, entropy, batch, algorithm)

    out = jax.value_and_grad(policy, (0, 1), has_aux=True)(rows["target"], rows["entropy"])
    if not algorithm.critic:
        return out, None
    value_loss = jax.value_and_grad(losses.value_loss, has_aux=True)
    return out, value_loss(rows["current_values"], batch, algorithm)


def optional(algorithm):
    """What other networks say, as the trainer would have it."""
    names = []
    if algorithm.needs_proximal_pass(MINIBATCHES):
        names.append("proximal_logprobs")
    if algorithm.needs_anchor:
        names.append("reference_logprobs")
    return [*names, "values"] if algorithm.critic else names


def minibatch_of(batch):
    """The first half of the groups, in order of their ids, is the first minibatch."""
    groups = np.unique([r.group for r in batch])
    return [int(np.searchsorted(groups, r.group) >= (len(groups) + 1) // 2) for r in batch]


def implementation(cases, batch, algorithm, coefficient):
    """Of each minibatch: (loss, gradients by target and by entropy), (value loss, gradients)."""
    flat = cases.flat(batch, *optional(algorithm))
    if algorithm.critic:
        after = [np.append(r.values[1:], r.bootstrap) for r in batch]
        flat["values_after"] = cases.join(after)
    parts = minibatch_of(batch)
    where = cases.per_sequence(parts, np.int32, -1)
    per_token, divisors, sums = prepared(flat, where, coefficient, algorithm)
    starts = np.cumsum([0] + [len(r.mask) for r in batch])
    for index in range(MINIBATCHES):
        ids = [i for i, part in enumerate(parts) if part == index]
        rows, places = cases.packed([batch[i] for i in ids], "current_values",
                                    unit=2 if algorithm.data == "pairs" else 1)  # fmt: skip
        rows["tokens"] = rows["positions"] = rows["segment_ids"]
        rows["flat_index"] = np.full(rows["segment_ids"].shape, cases.flat_size, np.int32)
        for i, place in zip(ids, places, strict=True):
            rows["flat_index"][place] = np.arange(starts[i], starts[i + 1])
        progress = np.float32(index / MINIBATCHES)
        policy, values = differentiated(rows, per_token, sums, progress, algorithm)
        (loss, stats), gradients = policy
        denominator, tokens = divisors[index]
        for gradient in gradients:
            assert not np.any(np.asarray(gradient)[~rows["loss_mask"]]), "gradient off the mask"
        of_policy = [[np.asarray(g)[p] / denominator for p in places] for g in gradients]
        of_values = None
        if values is not None:
            (value_loss, _), slope = values
            tokens = max(float(tokens), 1.0)
            of_values = float(value_loss) / tokens, [np.asarray(slope)[p] / tokens for p in places]
        yield float(loss) / float(denominator), of_policy, of_values, stats


def oracle(oracles, batch, algorithm, coefficient):
    """The same from the equations; and what loss and gradients are accurate relative to."""
    a = dataclasses.replace(algorithm, kl_coefficient=float(coefficient))
    if not a.critic:
        batch = [dataclasses.replace(r, values=np.zeros(len(r.mask)), bootstrap=0.0) for r in batch]
    advantages, returns = oracles.advantages(batch, a)
    largest = largest_advantage(oracles, batch, a)
    batch = [
        dataclasses.replace(r, advantages=adv, returns=ret)
        for r, adv, ret in zip(batch, advantages, returns, strict=True)
    ]
    parts = minibatch_of(batch)
    for index in range(MINIBATCHES):
        own = [r for r, part in zip(batch, parts, strict=True) if part == index]
        if a.overlong_filter:
            own = oracles.without_overlong(own)
        if a.data != "rollouts":
            if a.data == "pairs":
                loss, slopes, _ = oracles.pairs_and_gradient(own, a)
                scale = abs(loss)
            else:
                loss, slopes, scale = oracles.nll_and_gradient(own, a)
            gradients = [slopes, [np.zeros(len(r.mask)) for r in own]]
            yield loss, gradients, None, (scale, biggest(gradients))
            continue
        weights = oracles.token_weights(own, a)
        total = sum(len(r.trained()) for r in own)
        if a.second_moment:
            kept = oracles.within_second_moment(own, a.second_moment)
            own = [dataclasses.replace(r, mask=k) for r, k in zip(own, kept, strict=True)]
        if algorithm.second_moment_clip:
            tau = oracles.second_moment_bound(own, a.second_moment_clip)
            low = max(algorithm.clip_low, 1 - math.exp(-tau))
            high = max(algorithm.clip_high, math.exp(tau) - 1 if tau < 700 else math.inf)
            a = dataclasses.replace(a, clip_low=low, clip_high=high)
        version = VERSION + index / MINIBATCHES
        loss, *gradients, _ = oracles.loss_and_gradient(own, a, version, weights)
        values = oracles.value_loss_and_gradient(own, a, total) if a.critic else None
        scales = [0.0, 0.0]
        for extreme in (largest, -largest):
            same = [dataclasses.replace(r, advantages=r.mask * extreme) for r in own]
            _, *slopes, terms = oracles.loss_and_gradient(same, a, version, weights)
            scales = [max(scales[0], terms), max(scales[1], biggest(slopes))]
        yield loss, gradients, values, scales


def largest_advantage(oracles, batch, a):
    """The largest one, or what it was before the mean was taken out.

    A mean of float32 numbers leaves their rounding behind, and a deviation below them magnifies it.
    """
    before = dataclasses.replace(a, advantage_mean="none")
    return max(np.abs(x).max() for b in (a, before) for x in oracles.advantages(batch, b)[0])


def biggest(gradients):
    return max((np.abs(x).max() for gradient in gradients for x in gradient), default=0.0)


@pytest.mark.parametrize("name", ROWS)
def test_a_preset_is_its_papers_from_rewards_to_gradients(name, cases, oracles):
    algorithm = ROWS[name]
    coefficient = np.float32(1.7 * algorithm.kl_coefficient)  # as if it had adapted

    @few
    @given(SEEDS)
    def check(seed):
        batch = cases.pairs(seed) if algorithm.data == "pairs" else cases.random(seed)
        got = implementation(cases, batch, algorithm, coefficient)
        want = oracle(oracles, batch, algorithm, coefficient)
        for (loss, slopes, values, _), exact in zip(got, want, strict=True):
            scale, slope_scale = exact[3]
            near([[loss]], [[exact[0]]], scale)
            for mine, theirs in zip(slopes, exact[1], strict=True):
                near(mine, theirs, slope_scale)
            if values is not None:
                near([[values[0]]], [[exact[2][0]]], exact[2][0])
                near(values[1], exact[2][1], biggest([exact[2][1]]))

    check()


def near(got, want, scale):
    """Within 1e-6 of `scale`."""
    got, want = (np.concatenate([*x, np.zeros(1)]) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(scale, 1e-30))
