"""SFT, reward model, DPO and IPO against float64 oracles, and what pairs must not depend on."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms import losses, supervised
from rlx.algorithms.algorithm import REDUCTIONS
from rlx.algorithms.presets import PRESETS
from rlx.base import UserError

SEEDS = st.integers(0, 2**32 - 1)
few = settings(derandomize=True, deadline=None, max_examples=15)
PAIRS = ("reward_model", "dpo", "ipo")


@partial(jax.jit, static_argnums=1)
def differentiated(rows, algorithm):
    """Loss, stats and gradient by target (scores for a reward model)."""

    def loss(x):
        if algorithm.loss == "nll":
            return supervised.nll_loss(x, rows["entropy"], rows)
        return supervised.pair_loss(x, rows, algorithm)

    return jax.value_and_grad(loss, has_aux=True)(rows["target"])


plain_weights = jax.jit(losses.loss_weights, static_argnums=3)


def run(cases, batch, algorithm, order=None):
    """Loss over its denominator, stats, and each rollout's gradient."""
    pairs = algorithm.data == "pairs"
    if algorithm.loss == "bradley_terry":  # one score: of the whole answer
        batch = [
            dataclasses.replace(r, mask=np.arange(len(r.mask)) == r.trained()[-1]) for r in batch
        ]
    rows, places = cases.packed(batch, "reference_logprobs", order=order, unit=2 if pairs else 1)
    groups = cases.per_sequence([r.group for r in batch], np.int32, 5000)
    rows["loss_weights"], denominator = plain_weights(
        rows["loss_mask"], rows["sequence_ids"], groups, algorithm
    )
    (loss, stats), slope = differentiated(rows, algorithm)
    assert not np.any(np.asarray(slope)[~rows["loss_mask"]]), "gradient off the mask"
    slopes = [np.asarray(slope)[p] / denominator for p in places]
    return float(loss / denominator), {k: float(v) for k, v in stats.items()}, slopes


def near(got, want):
    got, want = np.concatenate(got), np.concatenate(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_matches_the_oracle(reduction, cases, oracles):
    algorithm = dataclasses.replace(PRESETS["sft"], reduction=reduction, constant_length=7)

    @few
    @given(SEEDS)
    def check(seed):
        batch = cases.random(seed)
        loss, stats, slopes = run(cases, batch, algorithm)
        want, exact, _ = oracles.nll_and_gradient(batch, algorithm)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        near(slopes, exact)
        assert stats["n_valid_tokens"] == sum(len(r.trained()) for r in batch)

    check()


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_match_the_oracle(name, cases, oracles):
    algorithm = PRESETS[name]

    @few
    @given(SEEDS)
    def check(seed):
        batch = cases.pairs(seed)
        loss, stats, slopes = run(cases, batch, algorithm)
        want, exact, margins = oracles.pairs_and_gradient(batch, algorithm)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        near(slopes, exact)
        assert stats["n_pairs"] == len(margins)
        assert stats["pair_accuracy"] == sum(z > 0 for z in margins)
        scale = 1.0 if name == "reward_model" else algorithm.pair_beta
        total = sum(abs(z) for z in margins) * scale
        np.testing.assert_allclose(
            stats["pair_margin"], scale * sum(margins), atol=1e-5 * max(total, 1e-3)
        )
        np.testing.assert_allclose(
            stats["pair_chosen"] - stats["pair_rejected"], stats["pair_margin"],
            atol=1e-4 * max(total, 1.0),
        )  # fmt: skip

    check()


@few
@given(SEEDS, SEEDS)
def test_where_pairs_lie_does_not_matter(cases, seed, other):
    batch = cases.pairs(seed)
    order = np.random.default_rng(other).permutation(len(batch) // 2)
    order = np.stack([2 * order, 2 * order + 1], 1).ravel()
    straight, moved = (run(cases, batch, PRESETS["dpo"], o) for o in (None, order))
    np.testing.assert_allclose(moved[0], straight[0], rtol=1e-6)
    near(moved[2], straight[2])


@pytest.mark.parametrize("name", PAIRS)
def test_exchanging_the_two_turns_the_preference(name, cases):
    batch = cases.pairs(3)
    turned = [r for pair in zip(batch[1::2], batch[::2], strict=True) for r in pair]
    (_, a, _), (_, b, _) = (run(cases, x, PRESETS[name]) for x in (batch, turned))
    np.testing.assert_allclose(a["pair_margin"], -b["pair_margin"], rtol=1e-5, atol=1e-6)
    assert a["pair_accuracy"] + b["pair_accuracy"] == a["n_pairs"]


def test_a_policy_that_is_its_reference_prefers_nothing(cases):
    """DPO begins at log 2 and IPO at (1/2β)², whatever the lengths."""
    batch = [dataclasses.replace(r, reference=r.target) for r in cases.pairs(1)]
    assert run(cases, batch, PRESETS["dpo"])[0] == pytest.approx(math.log(2), rel=1e-6)
    assert run(cases, batch, PRESETS["ipo"])[0] == pytest.approx(25.0, rel=1e-6)


def test_long_answers_do_not_blur_a_small_difference():
    """16k tokens of −5 nats each, and one token that differs by 1e-3: z is that and not 0."""
    length = 16_384
    target = np.full((1, 2 * length), -5.0, np.float32)
    rng = np.random.default_rng(0)
    target[0, length:] += rng.normal(0, 1, length).astype(np.float32)
    target[0, :length] = rng.permutation(target[0, length:])
    target[0, 7] += 1e-3
    rows = {
        "target": target, "loss_mask": np.ones_like(target, bool), "entropy": target,
        "loss_weights": np.ones_like(target), "reference_logprobs": np.zeros_like(target),
        "segment_ids": np.repeat([[1, 2]], length, 1).astype(np.int32),
    }  # fmt: skip
    (_, stats), _ = differentiated(rows, dataclasses.replace(PRESETS["dpo"], pair_beta=1.0))
    exact = target[0, :length].astype(float).sum() - target[0, length:].astype(float).sum()
    assert float(stats["pair_margin"]) == pytest.approx(exact, abs=2e-2)
    assert exact == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("name", PAIRS)
def test_what_lies_off_the_mask_never_matters(name, cases):
    rows, _ = cases.packed(cases.pairs(5), "reference_logprobs", unit=2)
    rows["loss_weights"] = rows["loss_mask"].astype(np.float32)
    dirty = rows | {
        n: np.where(rows["loss_mask"], rows[n], np.nan)
        for n in ("target", "reference_logprobs", "loss_weights", "entropy")
    }
    for clean, poisoned in zip(
        jax.tree.leaves(differentiated(rows, PRESETS[name])),
        jax.tree.leaves(differentiated(dirty, PRESETS[name])),
        strict=True,
    ):
        np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_a_missing_reference_is_an_error(name):
    rows = {"loss_mask": jnp.ones((1, 4), bool), "loss_weights": jnp.ones((1, 4)),
            "segment_ids": jnp.array([[1, 1, 2, 2]])}  # fmt: skip
    with pytest.raises(UserError, match="reference_logprobs"):
        supervised.pair_loss(jnp.zeros((1, 4)), rows, PRESETS[name])
