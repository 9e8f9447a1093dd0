"""The policy loss in torch: the sums of `rlx.algorithms.losses.policy_loss`, same names.

Weight control is the token-level one; what is missing is refused by name.
"""

from collections.abc import Mapping

import torch

from rlx.algorithms.presets import Algorithm
from rlx.base import UserError


def policy_loss(
    target_logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    algorithm: Algorithm,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Σ loss_weights · w·ℓ and the sums behind the step's statistics.

    u = exp(target − proximal), ℓ = max(−uA, −clip(u, 1 − ε, 1 + ε_hi)·A); w = sg(exp(proximal −
    behaviour)) when decoupled, else 1.

    Args:
      target_logprobs: [B, T] float32, nats; differentiated.
      entropy: [B, T] float32, nats; for statistics.
      batch: [B, T] each: loss_mask bool, behaviour_logprobs, advantages, loss_weights float32, and
        proximal_logprobs when the target has moved since.
      algorithm: a row of the preset table.

    Raises:
      UserError: for a field of the algorithm that this loss does not have.
    """
    _refuse(algorithm)
    behaviour, advantage = batch["behaviour_logprobs"], batch["advantages"]
    proximal = batch.get("proximal_logprobs", target_logprobs.detach())
    if algorithm.proximal == "behaviour":
        proximal = behaviour
    log_ratio, log_weight = target_logprobs - proximal, proximal - behaviour
    used = batch["loss_mask"] & torch.isfinite(log_ratio.exp()) & torch.isfinite(log_weight.exp())
    log_ratio = torch.where(used, log_ratio, 0.0)
    weight = control_weights(torch.where(used, log_weight, 0.0), algorithm)
    surrogate, clipped = clipped_surrogate(log_ratio, advantage, algorithm)
    terms = torch.where(used, batch["loss_weights"] * weight * surrogate, 0.0)
    loss = terms.sum()
    stats = {
        "n_valid_tokens": used.sum(),
        "actor_loss": loss.detach(),
        "actor_clip_ratio": (clipped & used).sum(),
        "importance_weight": torch.where(used, log_ratio.detach().exp(), 0.0).sum(),
        "behaviour_weight": torch.where(used, weight, 0.0).sum(),
        "entropy": torch.where(used, entropy, 0.0).sum(),
    }
    return loss, stats


def clipped_surrogate(
    log_ratio: torch.Tensor, advantage: torch.Tensor, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(−uA, −clip(u)·A) with dual clip, and where a clip took the gradient away."""
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    plain, held = -ratio * advantage, -bounded * advantage
    loss, clipped = torch.maximum(plain, held), held > plain
    if algorithm.dual_clip:
        ceiling = -algorithm.dual_clip * advantage
        beyond = (advantage < 0) & (ceiling < loss)
        loss, clipped = torch.where(beyond, ceiling, loss), clipped | beyond
    return loss, clipped


def control_weights(log_weight: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    """exp(proximal − behaviour) held within [weight_lower, weight_upper], without gradient."""
    log_weight = log_weight.detach()
    if not algorithm.decoupled:
        return torch.ones_like(log_weight)
    weight = log_weight.exp()
    if algorithm.weight_action == "none":
        return weight
    held = weight.clamp(algorithm.weight_lower, algorithm.weight_upper)
    if algorithm.weight_action == "truncate":
        return held
    return torch.where(held == weight, weight, 0.0)


def _refuse(algorithm: Algorithm) -> None:
    """Raises UserError for the first field outside what this file computes."""
    has = {
        "proximal": ("recompute", "behaviour"),
        "kl_placement": ("none", "reward"),
        "entropy_coefficient": (0.0,),
        **({"weight_level": ("token",)} if algorithm.weight_action != "none" else {}),
        **({"weight_statistic": ("ratio",)} if algorithm.weight_action != "none" else {}),
    }
    for field, choices in has.items():
        if (value := getattr(algorithm, field)) not in choices:
            raise UserError(
                f"algorithm.{field}={value!r} is not in the torch loss (it has "
                f"{', '.join(map(repr, choices))}); use --config.trainer=jax"
            )
