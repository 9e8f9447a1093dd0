"""The estimators: their formulas, their clamp, and that they estimate the KL divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.algorithms import kl


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_formula_and_gradient(estimator, oracles):
    rng = np.random.default_rng(0)
    logp, ref = rng.normal(-2, 4, (2, 200)).astype(np.float32)
    got = jax.jit(kl.estimate, static_argnums=2)(logp, ref, estimator)
    pairs = list(zip(logp.astype(float), ref.astype(float), strict=True))
    np.testing.assert_allclose(got, [oracles.kl(p, q, estimator) for p, q in pairs], rtol=2e-6,
                               atol=1e-6)  # fmt: skip
    want = [oracles.kl_slope(p, q, estimator) for p, q in pairs]
    slopes = jax.jit(jax.grad(lambda p: kl.estimate(p, ref, estimator).sum()))(logp)
    np.testing.assert_allclose(slopes, want, rtol=2e-6, atol=1e-6)


def test_one_token_cannot_overflow():
    wild = jnp.array([-1e30, 1e30])
    assert np.isfinite(kl.estimate(wild, jnp.zeros(2), "k3")).all()


@pytest.mark.parametrize(("estimator", "tolerance"), [("k1", 1e-6), ("k3", 1e-6), ("k2", 0.05)])
def test_the_mean_over_the_policy_is_the_divergence(estimator, tolerance):
    rng = np.random.default_rng(1)
    p, q = (jax.nn.log_softmax(jnp.asarray(rng.normal(0, 0.3, 50), jnp.float32)) for _ in range(2))
    exact = jnp.sum(jnp.exp(p) * (p - q))
    mean = jnp.sum(jnp.exp(p) * kl.estimate(p, q, estimator))
    np.testing.assert_allclose(mean, exact, rtol=tolerance, atol=1e-7 + tolerance * float(exact))


adapt = jax.jit(kl.adapt)


@pytest.mark.parametrize("share", [0.01, 1.0, 30.0])
def test_adaptation_is_the_papers(share):
    """1909.08593, §2.2, in float64; a batch beyond the horizon counts as the horizon."""
    rng = np.random.default_rng(0)
    for beta, observed, target in rng.exponential(1.0, (20, 3)):
        error = min(max(observed / target - 1, -0.2), 0.2)
        want = beta * (1 + error * min(share, 1.0))
        got = adapt(beta, observed, share * 500, target=target, horizon=500)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got > 0


def test_a_coefficient_finds_the_divergence_it_is_asked_for():
    """A policy whose divergence is 0.02/β: β must settle where that is the target."""
    beta = 5.0
    for _ in range(400):
        beta = float(adapt(beta, 0.02 / beta, 100, target=0.1, horizon=1000))
    assert beta == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("unknown", [np.nan, np.inf, -np.inf])
def test_an_unknown_divergence_leaves_the_coefficient(unknown):
    assert float(adapt(0.3, unknown, 8, target=0.1, horizon=10)) == pytest.approx(0.3)
