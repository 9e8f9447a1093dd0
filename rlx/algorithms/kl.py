"""Estimators of the KL divergence between two policies from one sampled token."""

from rlx.algorithms.algorithm import choose
from rlx.algorithms.array_ops import Array, ops_of

CLAMP = 10.0  # nats: the exponential in k3 must not overflow on one unlucky token


def estimate(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    """Estimate KL(π ‖ π_ref) per token, from tokens drawn from π.

        k1  Δ
        k2  Δ²/2
        k3  e^(−Δ) − 1 + Δ

    Δ = log π − log π_ref clamped to ±10. k1 and k3 are unbiased, k2 and k3 never negative. http://joschu.net/blog/kl-approx.html

    Both logprobs and the result have one shape, float32, nats.
    """
    lib = ops_of(logprobs).lib
    delta = lib.clip(logprobs - reference_logprobs, -CLAMP, CLAMP)
    table = {
        "k1": lambda: delta,
        "k2": lambda: 0.5 * delta**2,
        "k3": lambda: lib.expm1(-delta) + delta,
    }
    return choose("kl_estimator", estimator, table)()


def adapt(
    coefficient: Array, observed: Array, trajectories: Array, *, target: float, horizon: int
) -> Array:
    """Return β after a batch, higher if the divergence is above its target, lower if below.

        β ← β · (1 + clip(KL / target − 1, ±0.2) · trajectories / horizon)   (1909.08593, §2.2)

    Args:
      coefficient: β > 0, float32 scalar.
      observed: mean KL of the batch's trained tokens, nats; if not finite, β stays as it is.
      trajectories: number in the batch. target: nats, > 0. horizon: trajectories, ≥ 1.
    """
    lib = ops_of(observed).lib
    error = lib.clip(observed / target - 1.0, -0.2, 0.2)
    # A batch far beyond the horizon must not turn the sign of β.
    share = lib.clip(trajectories / horizon, None, 1.0)
    return lib.where(lib.isfinite(observed), coefficient * (1.0 + error * share), coefficient)
