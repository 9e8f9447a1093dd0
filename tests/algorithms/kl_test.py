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
