"""The losses of a policy and of its critic as sums, on packed rows; see also `supervised.py`.

Sums over microbatches and devices are divided once, by the minibatch's denominator.
"""

import math
from collections.abc import Mapping

from rlx.algorithms import kl, signatures
from rlx.algorithms.algorithm import Algorithm, choose, require_reference
from rlx.algorithms.array_ops import Array, ops_of, same_shape
from rlx.algorithms.signatures import LossInputs
from rlx.algorithms.surrogates import SURROGATES, control_weights, kept_sequences
from rlx.base import UserError

# Divisors of summed stats: none for COUNTS, the minibatch's denominator for LOSSES, the number of
# pairs for names that begin with PAIRS, `n_valid_tokens` for others.
COUNTS = ("n_valid_tokens", "n_nonfinite_tokens", "n_pairs")
LOSSES = ("actor_loss", "kl_loss", "entropy_loss", "sft_loss", "pair_loss", "balance_loss")
LAG = ("lag_kl", "n_sampled_tokens")  # a sum, and its divisor
PAIRS = "pair_"
LARGEST_LOG = 88.72  # nats: of the largest float32


def policy_loss(
    target_logprobs_BT: Array, entropy_BT: Array, batch: Mapping[str, Array], algorithm: Algorithm
) -> tuple[Array, dict[str, Array]]:
    """Return the policy loss as a sum, and the sums for the step's statistics.

        Σ loss_weights · (w·ℓ + sg(w·u)·β·KL − entropy_coefficient·H)
        u = exp(target − proximal)
        w = sg(exp(proximal − behaviour)), or 1 where not decoupled (2505.24298)

    With ratio_level=sequence the logs of u and w are means over the sequence's trained tokens
    (GSPO, 2507.18071, eq. 7); sequence_token has these values with each token's own gradient
    (GSPO-token, eq. 14). `algorithm.loss` names ℓ: one of SURROGATES, or a user's own.

    KL in the loss has the weight sg(w·u), which is target / behaviour within w's bounds. Its
    gradient thus has the same mean at every lag.

    Tokens whose ratio, own loss or own advantage is not finite are counted, and excluded from the
    loss and every mean.

    Args:
      target_logprobs_BT: [B, T] float32, nats; differentiated.
      entropy_BT: [B, T] float32, nats; differentiated when the bonus is on.
      batch: all [B, T]: loss_mask bool; behaviour_logprobs, advantages, loss_weights float32;
        segment_ids int32 (0 is padding). Optional: proximal_logprobs, by default the target's;
        for KL in the loss reference_logprobs, and kl_coefficient if β is not the algorithm's;
        for loglinear versions int32 and the scalar target_version, see `proximal_logprobs`;
        for second_moment_clip clip_bound float32.
      algorithm: the row of the preset table; static under jit.

    Returns:
      The summed loss, float32 scalar, and stats, among them those of ℓ: float32 scalars, named as
      the metrics that `summarise` makes of them. UserError for KL in the loss without
      `reference_logprobs`, or an unfit result of a user's own loss.
    """
    mask, advantage, segments = batch["loss_mask"], batch["advantages"], batch["segment_ids"]
    same_shape(target_logprobs_BT, entropy_BT, mask, advantage)
    ops = ops_of(target_logprobs_BT)
    lib, target = ops.lib, ops.float32(target_logprobs_BT)
    proximal = proximal_logprobs(target, batch, algorithm)
    behaviour = batch["behaviour_logprobs"]
    finite = _finite_ratio(ops.frozen(target) - proximal) & _finite_ratio(proximal - behaviour)
    if algorithm.advantage_function is not None:
        finite = finite & lib.isfinite(advantage)
    used = mask & finite
    # Replace NaN before any arithmetic: behind `where` it would still poison the gradient.
    advantage, target = lib.where(used, advantage, 0.0), lib.where(used, target, 0.0)
    log_ratio = target - lib.where(used, proximal, 0.0)
    log_weight = lib.where(used, proximal - behaviour, 0.0)
    levels = {
        "token": lambda x: x,
        "sequence": lambda x: ops.aggregate(x, used, segments, "mean"),
        "sequence_token": lambda x: ops.frozen(ops.aggregate(x, used, segments, "mean") - x) + x,
    }
    leveled = choose("ratio_level", algorithm.ratio_level, levels)
    log_ratio, log_weight = leveled(log_ratio), leveled(log_weight)
    weight, in_bounds = control_weights(log_weight, used, segments, algorithm, ops)
    entropy = lib.where(used, entropy_BT, 0.0)
    inputs = LossInputs(
        target=target, proximal=lib.where(used, proximal, 0.0),
        behaviour=lib.where(used, behaviour, 0.0), log_ratio=log_ratio, advantage=advantage,
        entropy=entropy, mask=used, segment_ids=segments, ops=ops,
        clip_bound=batch.get("clip_bound"),
    )  # fmt: skip
    kept = kept_sequences(inputs, algorithm)
    weight, in_bounds = lib.where(kept, weight, 0.0), in_bounds & kept
    if algorithm.loss_function is None:
        surrogate, extra = choose("loss", algorithm.loss, SURROGATES)(inputs, algorithm)
    else:
        surrogate, extra = signatures.own_loss(inputs, algorithm)
        finite = finite & lib.isfinite(surrogate)
        used, surrogate = mask & finite, lib.where(finite, surrogate, 0.0)
        advantage, entropy = (lib.where(used, x, 0.0) for x in (advantage, entropy))
    scale = lib.where(used, batch["loss_weights"], 0.0)
    actor_loss = lib.sum(scale * weight * surrogate)
    kl_weight = weight * lib.exp(ops.frozen(log_ratio))
    kl_loss = _kl_loss(target, batch, scale * kl_weight, used, algorithm)
    entropy_loss = -algorithm.entropy_coefficient * lib.sum(scale * entropy)
    stats = {
        "n_valid_tokens": used,
        "n_nonfinite_tokens": mask & ~finite,
        "actor_loss": actor_loss,
        "kl_loss": kl_loss,
        "entropy_loss": entropy_loss,
    }
    with ops.constant():
        stats |= {
            "importance_weight": lib.where(used, lib.exp(log_ratio), 0.0),
            "ppo_approx_kl": lib.where(used, -log_ratio, 0.0),
            "behaviour_weight": lib.where(used, weight, 0.0),
            "behaviour_weight_out_of_bounds": used & ~in_bounds,
            "behaviour_kl": lib.where(used, _k3(-log_weight), 0.0),
            "entropy": entropy,
            "advantage": advantage,
        }
        if "reference_logprobs" in batch:
            reference = batch["reference_logprobs"]
            comparable = used & lib.isfinite(reference)
            stats["reference_kl"] = _k3(lib.where(comparable, target - reference, 0.0))
        for name, x in {"actor_clip_ratio": lib.zeros_like(used), **extra}.items():
            if name in stats:
                what = f"algorithm.loss returned {name!r}, which is rlx's own"
                raise UserError(f"{what}; use another name")
            stats[name] = x & used if x.dtype == used.dtype else lib.where(used, x, 0.0)
    return actor_loss + kl_loss + entropy_loss, ops.totals(stats)


def lag_stats(target_BT: Array, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return the sums for `lag_kl`, KL(behaviour ‖ target) by k3 over every sampled token.

    It includes tokens that M2PO or a filter leaves out.

    Args:
      target_BT: [B, T] float32, nats.
      batch: behaviour_logprobs and `sampled` (bool; by default loss_mask), [B, T].
    """
    ops = ops_of(target_BT)
    log_ratio = ops.frozen(target_BT) - batch["behaviour_logprobs"]
    used = batch.get("sampled", batch["loss_mask"]) & _finite_ratio(log_ratio)
    lag_kl = _k3(-ops.lib.where(used, log_ratio, 0.0))
    return ops.totals({"lag_kl": lag_kl, "n_sampled_tokens": used})


def summarise(stats: Mapping[str, float], denominator: float) -> dict[str, float]:
    """Return metrics of summed stats: counts, losses over `denominator`, and means."""
    tokens = max(stats["n_valid_tokens"], 1.0)
    pairs = max(stats.get("n_pairs", tokens), 1.0)
    divisors = {name: pairs for name in stats if name.startswith(PAIRS)}
    divisors |= dict.fromkeys(COUNTS, 1.0)
    divisors |= dict.fromkeys(LOSSES, max(denominator, 1.0))
    if "lag_kl" in stats:
        stats = dict(stats)
        divisors["lag_kl"] = max(stats.pop("n_sampled_tokens"), 1.0)
    return {name: value / divisors.get(name, tokens) for name, value in stats.items()}


def loss_weights(
    loss_mask: Array, sequence_ids: Array, group_ids_N: Array, algorithm: Algorithm,
    run_ids_N: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return per-token weights and the denominator of a minibatch: its loss is Σ weight·ℓ / den.

        token_mean                1 / trained tokens
        sequence_mean_token_mean  1 / n_seq / sequences
        sequence_mean_token_sum   1 / sequences
        constant                  1 / (sequences · constant_length) (2503.20783)
        prompt_mean               1 / n_prompt / prompts (2510.13786)

    n_seq and n_prompt are the trained tokens of the token's sequence and prompt; trajectories with
    one id in `run_ids_N` are one sequence here. Sequences and prompts without a trained token do
    not count. Losses on pairs have these weights and are divided by the number of pairs.

    Args:
      loss_mask: bool, any shape (flat or rows), true for this minibatch's trained tokens.
      sequence_ids: same shape, int32 in [0, N); N or more for padding.
      group_ids_N: [N] int, the prompt of each sequence. run_ids_N: [N] int in [0, N); None: all
        differ.

    Returns:
      weights, float32 of loss_mask's shape, 0 where not trained; denominator, float32 scalar, ≥ 1.
    """
    same_shape(loss_mask, sequence_ids)
    ops = ops_of(loss_mask)
    lib, mask, size = ops.lib, ops.float32(loss_mask), group_ids_N.shape[0]
    parts = ops.segment_sum(mask.reshape(-1), sequence_ids.reshape(-1), size)
    runs = ops.row_index(parts)[:, 0] if run_ids_N is None else run_ids_N
    prompts = ops.dense_ranks(group_ids_N)
    per_sequence, per_prompt = (ops.segment_sum(parts, ids, size) for ids in (runs, prompts))
    num_sequences, num_prompts = (lib.sum(x > 0) for x in (per_sequence, per_prompt))

    def shared(sizes: Array) -> Array:
        return mask / lib.clip(ops.take(sizes, sequence_ids, 1.0), 1.0, None)

    table = {
        "token_mean": lambda: (mask, lib.sum(mask)),
        "sequence_mean_token_mean": lambda: (shared(per_sequence[runs]), num_sequences),
        "sequence_mean_token_sum": lambda: (mask, num_sequences),
        "constant": lambda: (mask, num_sequences * algorithm.constant_length),
        "prompt_mean": lambda: (shared(per_prompt[prompts]), num_prompts),
    }
    weights, count = choose("reduction", algorithm.reduction, table)()
    count = num_prompts if algorithm.data == "pairs" else count
    return weights, lib.clip(ops.float32(count), 1.0, None)


def proximal_logprobs(target: Array, batch: Mapping[str, Array], algorithm: Algorithm) -> Array:
    """Return the clip's anchor: logprobs under the policy before the batch's first update.

        recompute  log π of the policy before the batch's first update
        behaviour  the sampled logprobs: PPO as published
        loglinear  behaviour + α·(target − behaviour),
                   α = clip((v_prox − v_behav) / (v_target − v_behav), 0, 1)

    Recomputed ones are batch["proximal_logprobs"]; before the first update they equal the target
    and may be absent. A loss without a ratio gets the target too. v_target is
    batch["target_version"], a float, n + m/M at minibatch m of M in the batch that turns version n
    into n + 1; v_prox is its floor, n. α is 0 where v_target = v_behav. The result is float32 of
    target's shape, nats, without gradient.
    """
    behaviour = batch["behaviour_logprobs"]
    frozen = ops_of(target).frozen(target)
    if not algorithm.kind.ratio:
        return frozen
    table = {
        "behaviour": lambda: behaviour,
        "recompute": lambda: batch.get("proximal_logprobs", frozen),
        "loglinear": lambda: _loglinear(frozen, batch),
    }
    return choose("proximal", algorithm.proximal, table)()


def _loglinear(frozen: Array, batch: Mapping[str, Array]) -> Array:
    """Interpolate between behaviour and target, by versions."""
    behaviour = batch["behaviour_logprobs"]
    ops = ops_of(frozen)
    lib, version = ops.lib, ops.float32(batch["target_version"])
    age = version - batch["versions"]
    alpha = (lib.floor(version) - batch["versions"]) / lib.where(age == 0, 1.0, age)
    alpha = lib.where(age == 0, 0.0, lib.clip(alpha, 0.0, 1.0))
    return behaviour + alpha * (frozen - behaviour)


def within_second_moment(log_weight: Array, used: Array, limit: float) -> Array:
    """Return the tokens, [F] bool, that AReaL's form of M2PO keeps, dropping the largest squares.

        the most tokens, smallest squares first, with mean (behaviour − proximal)² < second_moment

    Args:
      log_weight: [F] float32, behaviour − proximal or its negative, of one minibatch's tokens;
        tokens that are not finite are dropped first.
      used: [F] bool, trained tokens; others are not kept. limit: nats², > 0.
    """
    ops = ops_of(log_weight)
    lib = ops.lib
    square = lib.where(used, log_weight**2, lib.inf)
    square = lib.where(lib.isnan(square), lib.inf, square)
    ordered = ops.sort(square)
    means = lib.cumsum(ordered, 0) / lib.cumsum(lib.ones_like(ordered), 0)  # never falls
    count = lib.sum(means < limit)
    first_dropped = ops.take(ordered, count, lib.inf)
    nearer, ties = square < first_dropped, square == first_dropped
    room = count - lib.sum(nearer)  # of equal squares, keep the first tokens
    return used & (nearer | (ties & (lib.cumsum(ties, 0) <= room)))


def second_moment_bound(log_ratio: Array, advantage: Array, used: Array, limit: float) -> Array:
    """Return M2PO's clip bound τ (2510.01161, alg. 1, as its authors' code computes it).

        τ² = the greatest Δ² for which the mean of min(Δ², τ²) is at most second_moment_clip
        Δ = proximal − behaviour, of the tokens with A·Δ > 0; τ = ∞ if their mean Δ² is that low

    Args:
      log_ratio: [F] float32, Δ; advantage: [F] float32, A.
      used: [F] bool, the trained tokens of one minibatch. limit: nats², > 0.

    Returns:
      τ, float32 scalar, nats, ≥ 0.
    """
    ops = ops_of(log_ratio)
    lib = ops.lib
    moving = used & (advantage * log_ratio > 0) & lib.isfinite(log_ratio)
    ordered = ops.sort(lib.where(moving, log_ratio**2, lib.inf))
    real = lib.isfinite(ordered)
    ordered = lib.where(real, ordered, 0.0)
    count = lib.sum(moving)
    after = count - lib.cumsum(lib.ones_like(ordered), 0)  # number of larger squares
    capped = lib.cumsum(ordered, 0) + ordered * after
    within = real & (capped <= limit * count)  # the capped sum never falls
    tau = lib.sqrt(lib.where(within, ordered, 0.0).max())
    return lib.where(lib.sum(within) == count, lib.inf, tau)


def value_loss(
    values_BT: Array, batch: Mapping[str, Array], algorithm: Algorithm
) -> tuple[Array, dict[str, Array]]:
    """Return the value loss over trained tokens as a sum, and stats as sums.

        ½·max((V − R)², (clip(V, V_b ± value_clip) − R)²)

    The clip is PPO's for values: as in the authors' code, not in 1707.06347 itself.

    Args:
      values_BT: [B, T] float32, V of the state in which token t was chosen; differentiated.
      batch: all [B, T]: loss_mask bool; values (V_b, from before the batch's first update) and
        returns float32.
      algorithm: `value_clip` is ε_v; 0 is no clip.

    Returns:
      The summed loss, float32 scalar, and stats as sums: value_loss, value (mean V), value_error
      (V − R, squared), value_clip_ratio.
    """
    mask, ops = batch["loss_mask"], ops_of(values_BT)
    lib = ops.lib
    same_shape(values_BT, mask, batch["values"], batch["returns"])
    value = lib.where(mask, ops.float32(values_BT), 0.0)
    target = lib.where(mask, batch["returns"], 0.0)
    plain = (value - target) ** 2
    square, clipped = plain, lib.zeros_like(mask)
    if algorithm.value_clip:
        before = lib.where(mask, batch["values"], 0.0)
        bounded = lib.clip(value, before - algorithm.value_clip, before + algorithm.value_clip)
        square = lib.maximum(plain, (bounded - target) ** 2)
        clipped = square > plain
    loss = 0.5 * lib.sum(square)
    stats = {"value_loss": loss, "value": value, "value_error": plain}
    return loss, ops.totals(stats | {"value_clip_ratio": clipped & mask})


def _kl_loss(
    target: Array, batch: Mapping[str, Array], scale: Array, used: Array, algorithm: Algorithm
) -> Array:
    """Return β·Σ scale·KL(target ‖ reference), differentiated; 0 unless KL is in the loss."""
    lib = ops_of(target).lib
    if not algorithm.kl_in_loss:
        return lib.zeros_like(target[0, 0])
    reference = require_reference(batch)
    used = used & lib.isfinite(reference)
    penalty = kl.estimate(
        lib.where(used, target, 0.0), lib.where(used, reference, 0.0), algorithm.kl_estimator
    )
    coefficient = batch.get("kl_coefficient", algorithm.kl_coefficient)
    return coefficient * lib.sum(lib.where(used, scale, 0.0) * penalty)


def _k3(log_ratio: Array) -> Array:
    """Return k3 of two policies' log-ratio, log π − log π_ref."""
    return kl.estimate(log_ratio, ops_of(log_ratio).lib.zeros_like(log_ratio), "k3")


def _finite_ratio(log_ratio: Array) -> Array:
    return (log_ratio > -math.inf) & (log_ratio < LARGEST_LOG)
