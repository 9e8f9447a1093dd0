"""Losses on datasets, as sums on packed rows: SFT; reward model, DPO and IPO on pairs.

A pair is two neighbouring segments of one row: the chosen one has an odd segment id, the rejected
one the even id after it. Losses are functions of a number z for each pair:

    z = Σ_chosen weight·x − Σ_rejected weight·x

For DPO and IPO, x = log π − log π_ref. For a reward model x is the value head's score, and the
weight is 1 at the last trained token, 0 elsewhere.
"""

from collections.abc import Mapping

from rlx.algorithms.algorithm import Algorithm, choose, require_reference
from rlx.algorithms.array_ops import Array, ops_of, same_shape


def nll_loss(
    target_logprobs_BT: Array, entropy_BT: Array, batch: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Return the negative log-likelihood of demonstrations as a sum, and stats as sums.

        −log π

    Args:
      target_logprobs_BT: [B, T] float32, nats; differentiated. entropy_BT: likewise, for stats.
      batch: loss_mask [B, T] bool, loss_weights [B, T] float32.
    """
    mask, ops = batch["loss_mask"], ops_of(target_logprobs_BT)
    lib = ops.lib
    same_shape(target_logprobs_BT, mask, batch["loss_weights"])
    nll = -lib.where(mask, target_logprobs_BT, 0.0)
    loss = lib.sum(lib.where(mask, batch["loss_weights"], 0.0) * nll)
    stats = {"n_valid_tokens": mask, "sft_loss": loss, "entropy": lib.where(mask, entropy_BT, 0.0)}
    return loss, ops.totals(stats)


def bradley_terry(z: Array, algorithm: Algorithm) -> Array:
    """Return the reward model's loss of each pair (2203.02155, eq. 1).

        −log σ(z)

    z and the result: float32, one number a pair.
    """
    return -ops_of(z).log_sigmoid(z)


def dpo(z: Array, algorithm: Algorithm) -> Array:
    """Return DPO's loss of each pair (2305.18290, eq. 7).

        −log σ(pair_beta·z)

    z and the result: float32, one number a pair.
    """
    return -ops_of(z).log_sigmoid(algorithm.pair_beta * z)


def ipo(z: Array, algorithm: Algorithm) -> Array:
    """Return IPO's loss of each pair (2310.12036, eq. 17, with z of length-averaged sums).

        (z − 1/(2·pair_beta))²

    z and the result: float32, one number a pair.
    """
    return (z - 0.5 / algorithm.pair_beta) ** 2


PAIR_LOSSES = {"bradley_terry": bradley_terry, "dpo": dpo, "ipo": ipo}  # by `algorithm.loss`


def pair_loss(
    x_BT: Array, batch: Mapping[str, Array], algorithm: Algorithm
) -> tuple[Array, dict[str, Array]]:
    """Return the loss on pairs by `algorithm.loss` (PAIR_LOSSES) as a sum, and stats as sums.

    Args:
      x_BT: [B, T] float32; target logprobs for DPO and IPO, scores for bradley_terry;
        differentiated.
      batch: all [B, T]: loss_mask bool; loss_weights float32; segment_ids int32;
        reference_logprobs float32 for DPO and IPO.
      algorithm: the row of the preset table.

    Returns:
      The summed loss, float32 scalar, and stats as sums; pair_accuracy counts pairs with z > 0,
      pair_margin is z (times β for DPO and IPO, the implicit reward). UserError for DPO or IPO
      without `reference_logprobs`.
    """
    mask, segments, ops = batch["loss_mask"], batch["segment_ids"], ops_of(x_BT)
    lib = ops.lib
    same_shape(x_BT, mask, segments, batch["loss_weights"])
    x = lib.where(mask, ops.float32(x_BT), 0.0)
    if algorithm.kind.reference:
        x = x - lib.where(mask, require_reference(batch), 0.0)
    weights = lib.where(mask, batch["loss_weights"], 0.0)
    chosen, rejected = (_by_pair(weights * x, mask, segments, odd) for odd in (1, 0))
    z, present = chosen - rejected, _by_pair(ops.float32(mask), mask, segments, 1) > 0
    scale = algorithm.pair_beta if algorithm.kind.reference else 1.0
    losses = choose("loss", algorithm.loss, PAIR_LOSSES)(z, algorithm)
    loss = lib.sum(lib.where(present, losses, 0.0))
    stats = {
        "n_valid_tokens": mask,
        "n_pairs": present,
        "pair_loss": loss,
        "pair_accuracy": (z > 0) & present,
        "pair_margin": lib.where(present, scale * z, 0.0),
        "pair_chosen": lib.where(present, scale * chosen, 0.0),
        "pair_rejected": lib.where(present, scale * rejected, 0.0),
    }
    return loss, ops.totals(stats)


def _by_pair(x_BT: Array, mask: Array, segments: Array, odd: int) -> Array:
    """Return the sum of x over the masked tokens of every pair's odd, or even, segment."""
    rows, width = x_BT.shape
    ops = ops_of(x_BT)
    side = mask & (segments % 2 == odd) & (segments > 0)
    slots = rows * (width // 2 + 1)
    index = ops.row_index(x_BT) * (width // 2 + 1) + (segments - 1) // 2
    index = ops.lib.where(side, index, slots).reshape(-1)  # beyond the end: dropped

    def total(x):
        return ops.segment_sum(x.reshape(-1), index, slots)

    # The second pass corrects the first one's rounding, because differences of pairs are small.
    count = total(ops.float32(side))
    mean = total(x_BT) / ops.lib.clip(count, 1.0, None)
    return mean * count + total(x_BT - ops.take(mean, index, 0.0).reshape(x_BT.shape))
