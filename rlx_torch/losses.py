"""The policy loss in torch: the sums of `rlx.algorithms.losses`, same names.

Everything returned is a sum over the given rows; one division by the minibatch's denominator comes
last. Values: `critic.py`; SFT and pairs: `supervised.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlx.algorithms import signatures
from rlx.algorithms.algorithm import Algorithm, choose, require_reference
from rlx.algorithms.signatures import LossInputs, Ops
from rlx.algorithms.surrogates import SURROGATES, control_weights, kept_sequences
from rlx_torch import kl
from rlx_torch.segments import dense_ranks, same_shape, segment_extreme, segment_sum, take

LARGEST_LOG = 88.72  # nats: of the largest float32


def policy_loss(
    target_logprobs_BT: Tensor,
    entropy_BT: Tensor,
    batch: Mapping[str, Tensor],
    algorithm: Algorithm,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Σ loss_weights · (w·ℓ + sg(w·u)·β·KL − c·H), and the sums behind the statistics.

    u = exp(target − proximal), w = sg(exp(proximal − behaviour)) when decoupled, else 1; ℓ by
    SURROGATES or a user's own, of tensors. Tokens whose ratio, or whose loss by a user's function,
    is not finite are left out and counted.

    Args:
      target_logprobs_BT: [B, T] float32, nats; differentiated.
      entropy_BT: [B, T] float32, nats; differentiated when the bonus is on.
      batch: what the JAX function takes, as tensors; segment_ids int32 or int64.
      algorithm: a row of the preset table.

    Returns:
      The summed loss, float32 scalar, and stats: float32 scalars without gradient.

    Raises:
      UserError: KL in the loss without `reference_logprobs`; a user's own loss that returns
        something else than a loss does.
    """
    mask, advantage, segments = batch["loss_mask"], batch["advantages"], batch["segment_ids"]
    same_shape(target_logprobs_BT, entropy_BT, mask, advantage)
    target = target_logprobs_BT.float()
    proximal = proximal_logprobs(target, batch, algorithm)
    behaviour = batch["behaviour_logprobs"]
    finite = _finite_ratio(target.detach() - proximal) & _finite_ratio(proximal - behaviour)
    if algorithm.advantage_function is not None:
        finite = finite & torch.isfinite(advantage)
    used = mask & finite
    # Swapped before any arithmetic: a NaN behind `where` would still poison the gradient.
    advantage, target = torch.where(used, advantage, 0.0), torch.where(used, target, 0.0)
    log_ratio = target - torch.where(used, proximal, 0.0)
    log_weight = torch.where(used, proximal - behaviour, 0.0)
    levels = {
        "token": lambda x: x,
        "sequence": lambda x: aggregate(x, used, segments, "mean"),
        "sequence_token": lambda x: (aggregate(x, used, segments, "mean") - x).detach() + x,
    }
    leveled = choose("ratio_level", algorithm.ratio_level, levels)
    log_ratio, log_weight = leveled(log_ratio), leveled(log_weight)
    weight, in_bounds = control_weights(log_weight, used, segments, algorithm, OPS)
    entropy = torch.where(used, entropy_BT, 0.0)
    inputs = LossInputs(
        target=target,
        proximal=torch.where(used, proximal, 0.0),
        behaviour=torch.where(used, behaviour, 0.0),
        log_ratio=log_ratio,
        advantage=advantage,
        entropy=entropy,
        mask=used,
        segment_ids=segments,
        ops=OPS,
    )
    kept = kept_sequences(inputs, algorithm)
    weight, in_bounds = torch.where(kept, weight, 0.0), in_bounds & kept
    if algorithm.loss_function is None:
        surrogate, own = choose("loss", algorithm.loss, SURROGATES)(inputs, algorithm)
    else:
        surrogate, own = signatures.own_loss(inputs, algorithm)
        finite = finite & surrogate.isfinite()
        used, surrogate = mask & finite, torch.where(finite, surrogate, 0.0)
        advantage, entropy = (torch.where(used, x, 0.0) for x in (advantage, entropy))
    scale = torch.where(used, batch["loss_weights"], 0.0)
    actor_loss = (scale * weight * surrogate).sum()
    drawn = weight * log_ratio.detach().exp()
    kl_loss = _kl_loss(target, batch, scale * drawn, used, algorithm)
    entropy_loss = -algorithm.entropy_coefficient * (scale * entropy).sum()
    with torch.no_grad():
        stats = {
            "n_valid_tokens": used,
            "n_nonfinite_tokens": mask & ~finite,
            "actor_loss": actor_loss,
            "kl_loss": kl_loss,
            "entropy_loss": entropy_loss,
            "importance_weight": torch.where(used, log_ratio.exp(), 0.0),
            "ppo_approx_kl": torch.where(used, -log_ratio, 0.0),
            "behaviour_weight": torch.where(used, weight, 0.0),
            "behaviour_weight_out_of_bounds": used & ~in_bounds,
            "behaviour_kl": torch.where(
                used, kl.estimate(-log_weight, torch.zeros_like(log_weight), "k3"), 0.0
            ),
            "entropy": entropy,
            "advantage": advantage,
        }
        if "reference_logprobs" in batch:
            reference = batch["reference_logprobs"]
            known = used & torch.isfinite(reference)
            stats["reference_kl"] = kl.estimate(
                torch.where(known, target, 0.0), torch.where(known, reference, 0.0), "k3"
            )
        for name, x in {"actor_clip_ratio": torch.zeros_like(used), **own}.items():
            signatures.check_new(name, stats)
            stats[name] = torch.where(used, x, 0)
        stats = {name: x.sum(dtype=torch.float32) for name, x in stats.items()}
    return actor_loss + kl_loss + entropy_loss, stats


def loss_weights(
    loss_mask: Tensor, sequence_ids: Tensor, group_ids_N: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """Return per-token weights and the denominator of a minibatch: its loss is Σ weight·ℓ / den.

    Args:
      loss_mask: bool, any shape (flat or rows), true for this minibatch's trained tokens.
      sequence_ids: same shape, int in [0, N); N or more for padding.
      group_ids_N: [N] int, the prompt of each sequence.

    Returns:
      weights, float32 of loss_mask's shape, 0 where not trained; denominator, float32 scalar, ≥ 1.
    """
    same_shape(loss_mask, sequence_ids)
    mask = loss_mask.float()
    size = group_ids_N.shape[0]
    per_sequence = segment_sum(mask.reshape(-1), sequence_ids.reshape(-1), size)
    prompts = dense_ranks(group_ids_N)
    per_prompt = segment_sum(per_sequence, prompts, size)
    num_sequences, num_prompts = (per_sequence > 0).sum(), (per_prompt > 0).sum()

    def shared(sizes: Tensor) -> Tensor:
        return mask / take(sizes, sequence_ids, 1.0).clamp(min=1.0)

    table = {
        "token_mean": lambda: (mask, mask.sum()),
        "sequence_mean_token_mean": lambda: (shared(per_sequence), num_sequences),
        "sequence_mean_token_sum": lambda: (mask, num_sequences),
        "constant": lambda: (mask, num_sequences * algorithm.constant_length),
        "prompt_mean": lambda: (shared(per_prompt[prompts]), num_prompts),
    }
    weights, count = choose("reduction", algorithm.reduction, table)()
    count = num_prompts if algorithm.data == "pairs" else count
    return weights, count.float().clamp(min=1.0)


def proximal_logprobs(target: Tensor, batch: Mapping[str, Tensor], algorithm: Algorithm) -> Tensor:
    """Return the clip's anchor: logprobs under the policy before the batch's first update.

    recompute  batch["proximal_logprobs"]; where absent the target itself.
    behaviour  the sampled ones. REINFORCE has the target itself always.
    loglinear  behaviour + α(target − behaviour), α = clip((v_prox − v_behav) /
               (v_target − v_behav), 0, 1), 0 where v_target = v_behav.

    Returns:
      float32 of target's shape, nats; carries no gradient.
    """
    behaviour, frozen = batch["behaviour_logprobs"], target.detach()
    if not algorithm.kind.ratio:
        return frozen
    table = {
        "behaviour": lambda: behaviour,
        "recompute": lambda: batch.get("proximal_logprobs", frozen),
        "loglinear": lambda: _loglinear(frozen, batch),
    }
    return choose("proximal", algorithm.proximal, table)()


def _loglinear(frozen: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what lies between behaviour and target, as far along as the versions do."""
    behaviour = batch["behaviour_logprobs"]
    version = torch.as_tensor(batch["target_version"], dtype=torch.float32, device=frozen.device)
    age = version - batch["versions"]
    alpha = (version.floor() - batch["versions"]) / torch.where(age == 0, 1.0, age)
    alpha = torch.where(age == 0, 0.0, alpha.clamp(0.0, 1.0))
    return behaviour + alpha * (frozen - behaviour)


def within_second_moment(log_weight: Tensor, used: Tensor, limit: float) -> Tensor:
    """Return which tokens M2PO keeps: as many as go, nearest first, with mean square below limit.

    Args:
      log_weight: [F] float32. used: [F] bool; the others are not kept. limit: nats², > 0.

    Returns:
      [F] bool.
    """
    square = torch.where(used, log_weight**2, torch.inf)
    square = torch.where(square.isnan(), torch.inf, square)
    square, order = square.sort(stable=True)
    count = torch.arange(1, square.numel() + 1, device=square.device)
    means = square.cumsum(0) / count  # never falls
    return used & torch.zeros_like(used).scatter(0, order, means < limit)


def aggregate(x: Tensor, used: Tensor, segment_ids: Tensor, how: str) -> Tensor:
    """Return on every token the mean, sum or max of x over the used tokens of its segment."""
    rows, width = x.shape
    # A row of `width` tokens has at most that many segments, and 0 for padding.
    index = torch.arange(rows, device=x.device)[:, None] * (width + 1) + segment_ids
    index, size = index.reshape(-1), rows * (width + 1)

    def total(x: Tensor) -> Tensor:
        return segment_sum(torch.where(used, x, 0.0).reshape(-1), index, size)

    def largest() -> Tensor:
        lifted = torch.where(used, x, -torch.inf).reshape(-1)
        return segment_extreme(lifted, index, size, "amax", -torch.inf)

    table = {
        "mean": lambda: total(x) / total(torch.ones_like(x)).clamp(min=1.0),
        "sum": lambda: total(x),
        "max": largest,
    }
    per = choose("weight_aggregate", how, table)()
    return torch.where(used, per[index].reshape(x.shape), 0.0)


OPS = Ops(torch, torch.sigmoid, Tensor.detach, aggregate)


def _kl_loss(
    target: Tensor, batch: Mapping[str, Tensor], scale: Tensor, used: Tensor, algorithm: Algorithm
) -> Tensor:
    """Return β·Σ scale·KL(target ‖ reference), differentiated; 0 unless KL is in the loss."""
    if not algorithm.kl_in_loss:
        return target.new_zeros(())
    reference = require_reference(batch)
    used = used & torch.isfinite(reference)
    penalty = kl.estimate(
        torch.where(used, target, 0.0), torch.where(used, reference, 0.0), algorithm.kl_estimator
    )
    coefficient = batch.get("kl_coefficient", algorithm.kl_coefficient)
    return coefficient * (torch.where(used, scale, 0.0) * penalty).sum()


def _finite_ratio(log_ratio: Tensor) -> Tensor:
    """Return whether both the log-ratio and its exponential are finite numbers."""
    return (log_ratio > -torch.inf) & (log_ratio < LARGEST_LOG)
