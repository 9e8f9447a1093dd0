"""The critic's loss against its float64 oracle, and what its clip is for."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms import losses
from rlx.algorithms.presets import PRESETS

PPO = PRESETS["ppo"]
few = settings(derandomize=True, deadline=None, max_examples=15)


@partial(jax.jit, static_argnums=1)
def differentiated(rows, algorithm):
    return jax.value_and_grad(losses.value_loss, has_aux=True)(
        rows["current_values"], rows, algorithm
    )


@pytest.mark.parametrize("clip", [0.5, 0.05, 0.0])
def test_value_and_gradient_match_the_oracle(clip, cases, oracles):
    algorithm = dataclasses.replace(PPO, value_clip=clip)

    @few
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        batch = cases.random(seed)
        rows, places = cases.packed(batch, "values", "returns", "current_values")
        (loss, stats), slope = differentiated(rows, algorithm)
        total = max(sum(len(r.trained()) for r in batch), 1)
        want, slopes = oracles.value_loss_and_gradient(batch, algorithm)
        np.testing.assert_allclose(loss / total, want, rtol=1e-6)
        assert not np.any(np.asarray(slope)[~rows["loss_mask"]])
        got = np.concatenate([np.asarray(slope)[p] for p in places]) / total
        exact = np.concatenate(slopes)
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
        mean = sum(r.current_values[r.mask].sum() for r in batch)
        np.testing.assert_allclose(stats["value"], mean, rtol=1e-5, atol=1e-5)

    check()


def one(value, before, target):
    """The loss and gradient of a single token."""
    numbers = {"values": before, "returns": target, "current_values": value}
    rows = {name: jnp.full((1, 1), x) for name, x in numbers.items()}
    rows["loss_mask"] = jnp.ones((1, 1), bool)
    (loss, stats), slope = differentiated(rows, PPO)
    return float(loss), float(slope[0, 0]), float(stats["value_clip_ratio"])


def test_a_value_beyond_the_clip_on_the_way_to_its_target_stops():
    assert one(1.8, 1.0, 3.0) == pytest.approx((0.5 * 1.5**2, 0.0, 1.0))


def test_a_value_beyond_the_clip_that_moved_away_comes_back():
    """Without the max the clip would hold a wrong value for ever: its gradient would be 0."""
    assert one(0.2, 1.0, 3.0) == pytest.approx((0.5 * 2.8**2, -2.8, 0.0))


def test_what_lies_off_the_mask_never_matters(cases):
    names = ("values", "returns", "current_values")
    rows, _ = cases.packed(cases.random(4, count=6, empty=False), *names)
    dirty = rows | {n: np.where(rows["loss_mask"], rows[n], np.nan) for n in names}
    for clean, poisoned in zip(
        jax.tree.leaves(differentiated(rows, PPO)),
        jax.tree.leaves(differentiated(dirty, PPO)),
        strict=True,
    ):
        np.testing.assert_array_equal(clean, poisoned)
