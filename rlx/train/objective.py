"""The inputs of each microbatch's loss, computed from a flat batch, and the loss.

For JAX and torch, without importing either.
Shapes: F tokens of the flat axis, N trajectories, B rows of a microbatch, T tokens of a row.
"""

from collections.abc import Callable, Mapping, Sequence

from rlx.algorithms import losses, supervised
from rlx.algorithms.advantages import advantages, next_trained, shares
from rlx.algorithms.algorithm import Algorithm
from rlx.algorithms.array_ops import Array, ops_of
from rlx.base import Group, refuse
from rlx.model import kept_tokens
from rlx.train import prefix_trees
from rlx.train.packing import FlatBatch

MODEL_INPUTS = (
    "tokens", "positions", "segment_ids", "segment_sizes", "loss_mask", *kept_tokens.INPUTS,
    *prefix_trees.INPUTS,
)  # fmt: skip
LOSS_INPUTS = (*MODEL_INPUTS, "behaviour_logprobs", "versions")

Batch = Mapping[str, Array]
Stats = dict[str, Array]


def require(groups: Sequence[Group], flat: FlatBatch, algorithm: Algorithm) -> None:
    """Raise UserError or ValueError for groups that this algorithm cannot be trained on."""
    if not flat.num_sequences:
        raise ValueError("an update needs at least one trajectory")
    for group in groups if algorithm.data == "pairs" else ():
        if len(group.trajectories) != 2:
            raise ValueError(
                f"group {group.group_id} has {len(group.trajectories)} trajectories; "
                f"loss={algorithm.loss} wants a chosen and a rejected one"
            )
    refuse((
        (algorithm.kl_anchor == "teacher" and "reference_logprobs" not in flat.tokens,
         "algorithm.kl_anchor=teacher and the trajectories have no logprobs of a teacher; "
         "set teacher.path or teacher.addresses"),
        (algorithm.peers == "turn" and "turn_ids" not in flat.tokens,
         "algorithm.peers=turn and the trajectories have no turns; use a workflow of "
         "several turns, or set peers=prompt"),
    ))  # fmt: skip


def prepare(
    flat: Batch,
    minibatch_of: Array,  # [N] int32; the minibatch of each sequence, −1 at padding
    step: Array,  # int32, the version before the batch
    kl_coefficient: Array,  # float32, β of this batch
    num_minibatches: int,
    algorithm: Algorithm,
) -> tuple[Batch, tuple[tuple[Array, Array], ...], Stats]:
    """Compute the loss's inputs for each token of a flat batch.

    Args:
      flat: as of `advantages.advantages`, with `values_after` [F] (V of the state after each token)
        in place of bootstrap_values.

    Returns:
      [F] float32 arrays to gather from (advantages, loss_weights, and where they exist
      proximal_logprobs, reference_logprobs, values, returns and clip_bound); for each minibatch the
      denominator of its loss and its number of trained tokens, float32; sums for metrics.
    """
    ids, ops = flat["sequence_ids"], ops_of(flat["loss_mask"])
    lib, flat = ops.lib, {**flat, "kl_coefficient": kl_coefficient}
    if "values_after" in flat:
        flat["bootstrap_values"] = _last(flat.pop("values_after"), ids, flat["valid"].shape[0])
    out = advantages(flat, algorithm)
    mask = trained = _trained_mask(flat, algorithm)
    part_of = ops.take(minibatch_of, ids, -1)
    bound = weights = lib.zeros_like(mask, dtype=lib.float32)
    divisors = []
    for index in range(num_minibatches):
        part = mask & (part_of == index)
        share, denominator = losses.loss_weights(
            part, ids, flat["group_ids"], algorithm, flat.get("run_ids")
        )
        if algorithm.second_moment:
            log_weight = flat["behaviour_logprobs"] - flat["proximal_logprobs"]
            kept = losses.within_second_moment(log_weight, part, algorithm.second_moment)
            share, trained = lib.where(kept, share, 0.0), trained & (kept | (part_of != index))
        if algorithm.second_moment_clip:
            log_ratio = flat["proximal_logprobs"] - flat["behaviour_logprobs"]
            tau = losses.second_moment_bound(
                log_ratio, out["advantages"], part, algorithm.second_moment_clip
            )
            bound = lib.where(part, tau, bound)
        weights = weights + share
        divisors.append((denominator, lib.sum(part, dtype=lib.float32)))
    per_token = {"advantages": out["advantages"], "loss_weights": weights}
    if algorithm.second_moment_clip:
        per_token["clip_bound"] = bound
    if "values" in flat:
        per_token["returns"] = out["returns"]
    for name in ("proximal_logprobs", "reference_logprobs", "values"):
        if name in flat:
            per_token[name] = flat[name]
    weight = shares(flat["valid"], flat.get("run_ids"))
    sums = {
        "shaped_reward": lib.sum(weight * out["shaped_rewards"]),
        "kl_reward": lib.sum(out["kl_rewards"]),
        "n_nonfinite_kl": out["nonfinite_kl"],
        "n_left_out": lib.sum(flat["loss_mask"] & ~trained),
        "kl_coefficient": kl_coefficient,
        "version": ops.float32(step),
    }
    return per_token, tuple(divisors), sums


def _trained_mask(flat: Batch, algorithm: Algorithm) -> Array:
    """Return the tokens that are trained on: [F] bool."""
    mask, ids = flat["loss_mask"], flat["sequence_ids"]
    if algorithm.kind.scores:  # the score of an answer is at its last token
        return mask & ~next_trained(mask, ids)[1]
    if algorithm.overlong_filter:
        return mask & ~ops_of(mask).take(flat["cut"], ids, False)
    return mask


def _last(x_F: Array, sequence_ids_F: Array, size: int) -> Array:
    """Return x at the last token of each sequence; [size] float32, 0 if it has none."""
    ops = ops_of(x_F)
    after = ops.lib.concatenate([sequence_ids_F[1:], ops.lib.full_like(sequence_ids_F[:1], size)])
    last = sequence_ids_F != after
    return ops.segment_sum(ops.lib.where(last, x_F, 0.0), sequence_ids_F, size)


def gather(per_token: Batch, batch: Batch, sums: Stats, progress: Array) -> Batch:
    """Return the microbatch with its rows of the flat arrays, and the minibatch's scalars.

    `loss_mask` loses tokens of weight 0 (filtered, or dropped by M2PO).

    Args:
      per_token: [F] float32 arrays; 0 is gathered at padding.
      batch: [B, T] arrays with `flat_index`.
      sums: from `prepare`. progress: float32, share of the batch's minibatches done.
    """
    index, ops = batch["flat_index"], ops_of(batch["flat_index"])
    rows = {name: ops.take(values, index, 0.0) for name, values in per_token.items()}
    inputs = {name: batch[name] for name in LOSS_INPUTS if name in batch}
    inputs["sampled"] = batch["loss_mask"]
    inputs["loss_mask"] = inputs["loss_mask"] & (rows["loss_weights"] > 0)
    scalars = {
        "target_version": sums["version"] + progress,
        "kl_coefficient": sums["kl_coefficient"],
    }
    return {**inputs, **rows, **scalars}


def loss(
    batch: Batch,
    algorithm: Algorithm,
    *,
    logprobs: Callable[[], tuple[Array, Array]],
    scores: Callable[[], Array],
) -> tuple[Array, Stats]:
    """Return the microbatch's summed loss and its summed stats.

    Args:
      batch: from `gather`.
      logprobs: returns the target's log-probabilities and entropies, [B, T] float32 each; called
        except for reward models. scores: returns the value head's output, [B, T] float32.
    """
    if algorithm.kind.scores:
        return supervised.pair_loss(scores(), batch, algorithm)
    target, entropy = logprobs()
    if algorithm.data == "demonstrations":
        return supervised.nll_loss(target, entropy, batch)
    if algorithm.data == "pairs":
        return supervised.pair_loss(target, batch, algorithm)
    total, stats = losses.policy_loss(target, entropy, batch, algorithm)
    return total, stats | losses.lag_stats(target, batch)
