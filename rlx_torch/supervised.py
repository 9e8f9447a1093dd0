"""Losses on datasets in torch: as `rlx.algorithms.supervised`.

A pair is two neighbouring segments of one row: the chosen one has an odd segment id, the rejected
one the even id after it. z = Σ_chosen weight·x − Σ_rejected weight·x.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlx.algorithms.algorithm import Algorithm, choose, require_reference
from rlx_torch.segments import same_shape, segment_sum, take

# The loss of a pair by `algorithm.loss`: (z, β) → ℓ, as in rlx.algorithms.supervised.
PAIR_LOSSES = {
    "bradley_terry": lambda z, beta: -logsigmoid(z),
    "dpo": lambda z, beta: -logsigmoid(beta * z),
    "ipo": lambda z, beta: (z - 0.5 / beta) ** 2,
}


def nll_loss(
    target_logprobs_BT: Tensor, entropy_BT: Tensor, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Σ loss_weights · −log π over the demonstration's tokens, and stats as sums.

    Args:
      target_logprobs_BT: [B, T] float32, nats; differentiated. entropy_BT: likewise, for stats.
      batch: loss_mask [B, T] bool, loss_weights [B, T] float32.
    """
    mask = batch["loss_mask"]
    same_shape(target_logprobs_BT, mask, batch["loss_weights"])
    nll = -torch.where(mask, target_logprobs_BT, 0.0)
    loss = (torch.where(mask, batch["loss_weights"], 0.0) * nll).sum()
    stats = {
        "n_valid_tokens": mask,
        "sft_loss": loss,
        "entropy": torch.where(mask, entropy_BT, 0.0),
    }
    return loss, {name: x.detach().sum(dtype=torch.float32) for name, x in stats.items()}


def pair_loss(
    x_BT: Tensor, batch: Mapping[str, Tensor], algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss on pairs by `algorithm.loss` (PAIR_LOSSES) as a sum, and stats as sums.

    Args:
      x_BT: [B, T] float32; target logprobs for DPO and IPO, scores for bradley_terry;
        differentiated.
      batch: all [B, T]: loss_mask bool; loss_weights float32; segment_ids int;
        reference_logprobs float32 for DPO and IPO.
      algorithm: the row of the preset table.

    Raises:
      UserError: DPO or IPO without `reference_logprobs`.
    """
    mask, segments = batch["loss_mask"], batch["segment_ids"]
    same_shape(x_BT, mask, segments, batch["loss_weights"])
    x = torch.where(mask, x_BT.float(), 0.0)
    if algorithm.kind.reference:
        x = x - torch.where(mask, require_reference(batch), 0.0)
    weights = torch.where(mask, batch["loss_weights"], 0.0)
    chosen, rejected = (_by_pair(weights * x, mask, segments, odd) for odd in (1, 0))
    z, present = chosen - rejected, _by_pair(mask.float(), mask, segments, 1) > 0
    scale = algorithm.pair_beta if algorithm.kind.reference else 1.0
    margin = scale * z
    each = choose("loss", algorithm.loss, PAIR_LOSSES)(z, algorithm.pair_beta)
    loss = torch.where(present, each, 0.0).sum()
    stats = {
        "n_valid_tokens": mask,
        "n_pairs": present,
        "pair_loss": loss,
        "pair_accuracy": (z > 0) & present,
        "pair_margin": torch.where(present, margin, 0.0),
        "pair_chosen": torch.where(present, scale * chosen, 0.0),
        "pair_rejected": torch.where(present, scale * rejected, 0.0),
    }
    return loss, {name: s.detach().sum(dtype=torch.float32) for name, s in stats.items()}


def _by_pair(x_BT: Tensor, mask: Tensor, segments: Tensor, odd: int) -> Tensor:
    """Return the sum of x over the masked tokens of every pair's odd, or even, segment.

    Two passes: the second takes out the rounding of the first.
    """
    rows, width = x_BT.shape
    own = mask & (segments % 2 == odd) & (segments > 0)
    slots = rows * (width // 2 + 1)
    row = torch.arange(rows, device=x_BT.device)[:, None]
    index = torch.where(own, row * (width // 2 + 1) + (segments - 1) // 2, slots).reshape(-1)

    def total(x: Tensor) -> Tensor:
        return segment_sum(x.reshape(-1), index, slots)

    count = total(own.float())
    mean = total(x_BT) / count.clamp(min=1.0)
    return mean * count + total(x_BT - take(mean, index, 0.0).reshape(x_BT.shape))
