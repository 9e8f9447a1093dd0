"""Estimators of the KL divergence, in torch: as `rlx.algorithms.kl`."""

import torch
from torch import Tensor

from rlx.algorithms.algorithm import choose

CLAMP = 10.0  # nats


def estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(π ‖ π_ref) per token.

    With Δ = log π − log π_ref clamped to ±10: k1 = Δ, k2 = Δ²/2, k3 = e^(−Δ) − 1 + Δ.

    Args:
      logprobs, reference_logprobs: same shape, float32, nats.
      estimator: k1 | k2 | k3.
    """
    delta = (logprobs - reference_logprobs).clamp(-CLAMP, CLAMP)
    table = {
        "k1": lambda: delta,
        "k2": lambda: 0.5 * delta**2,
        "k3": lambda: torch.expm1(-delta) + delta,
    }
    return choose("kl_estimator", estimator, table)()


def adapt(
    coefficient: Tensor, observed: Tensor, trajectories: Tensor, *, target: float, horizon: int
) -> Tensor:
    """Return β ← β · (1 + clip(KL / target − 1, ±0.2) · min(trajectories / horizon, 1))."""
    error = (observed / target - 1.0).clamp(-0.2, 0.2)
    share = (trajectories / horizon).clamp(max=1.0)
    return torch.where(torch.isfinite(error), coefficient * (1.0 + error * share), coefficient)
