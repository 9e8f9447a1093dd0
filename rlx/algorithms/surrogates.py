"""The loss ℓ of a rollout's token, and its weight w, for JAX's arrays and torch's tensors.

    u = exp(log_ratio), π the target policy, μ the behaviour policy, A the advantage

Array functions come from `ops`. Each loss returns ℓ and its statistics, both [B, T];
`actor_clip_ratio` is true where the gradient was removed or bounded.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlx.algorithms.algorithm import Algorithm, choose
from rlx.algorithms.array_ops import Ops
from rlx.algorithms.signatures import LossInputs

T = TypeVar("T")
LossAndStats = tuple[Any, Mapping[str, Any]]


def clipped_surrogate(inputs: LossInputs, algorithm: Algorithm) -> LossAndStats:
    """Return PPO's clipped ratio (1707.06347, eq. 7) with a dual clip (1912.09729).

        max(−u·A, −clip(u, 1 − clip_low, 1 + clip_high)·A), and where A < 0 at most −dual_clip·A

    With second_moment_clip (M2PO) the bounds are exp(±τ) of `losses.second_moment_bound` where
    these are wider.
    """
    lib, advantage = inputs.ops.lib, inputs.advantage
    ratio = lib.exp(inputs.log_ratio)
    low: Any = 1.0 - algorithm.clip_low
    high: Any = 1.0 + algorithm.clip_high
    if inputs.clip_bound is not None:
        low = lib.clip(lib.exp(-inputs.clip_bound), None, low)
        high = lib.clip(lib.exp(inputs.clip_bound), high, None)
    bounded = lib.clip(ratio, low, high)
    plain, bounded_loss = -ratio * advantage, -bounded * advantage
    loss, clipped = lib.maximum(plain, bounded_loss), bounded_loss > plain
    if algorithm.dual_clip:
        ceiling = -algorithm.dual_clip * advantage
        beyond = (advantage < 0) & (ceiling < loss)
        loss, clipped = lib.where(beyond, ceiling, loss), clipped | beyond
    return loss, {"actor_clip_ratio": clipped}


def soft_surrogate(inputs: LossInputs, algorithm: Algorithm) -> LossAndStats:
    """Return SAPO's gate in place of the clip (2511.20347, eq. 5 and 6).

        −A·(4/τ)·σ(τ(u − 1)), τ = sapo_positive where A > 0, else sapo_negative

    At u = 1 its slope is that of −u·A.
    """
    lib = inputs.ops.lib
    tau = lib.where(inputs.advantage > 0, algorithm.sapo_positive, algorithm.sapo_negative)
    gate = inputs.ops.sigmoid(tau * lib.expm1(inputs.log_ratio))
    return -inputs.advantage * (4.0 / tau) * gate, {}


def plain_surrogate(inputs: LossInputs, algorithm: Algorithm) -> LossAndStats:
    """Return REINFORCE's loss, without a ratio; w is sg(exp(target − behaviour)).

        −A·log π

    Nothing is clipped.
    """
    return -inputs.advantage * inputs.target, {}


def bounded_weight_surrogate(inputs: LossInputs, algorithm: Algorithm) -> LossAndStats:
    """Return CISPO's: REINFORCE weighed by a bounded ratio (2506.13585, eq. 4).

        −sg(clip(u, 1 − clip_low, 1 + clip_high))·A·log π

    No token loses its gradient.
    """
    lib = inputs.ops.lib
    ratio = lib.exp(inputs.log_ratio)
    bounded = lib.clip(ratio, 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    loss = -inputs.ops.frozen(bounded) * inputs.advantage * inputs.target
    return loss, {"actor_clip_ratio": bounded != ratio}


def geometric_surrogate(inputs: LossInputs, algorithm: Algorithm) -> LossAndStats:
    """Return GMPO's: the geometric mean of a sequence's clipped ratios (2507.20673, eq. 4).

        −A·exp(mean x), x = min(log u, log(1 + clip_high)) or, A ≤ 0, max(log u, log(1 − clip_low))

    The mean is over the trained tokens of the sequence, each clipped by the sign of its own A.
    """
    lib, log_ratio = inputs.ops.lib, inputs.log_ratio
    low = math.log1p(-algorithm.clip_low) if algorithm.clip_low < 1 else -math.inf
    high = math.log1p(algorithm.clip_high)
    up, down = lib.clip(log_ratio, None, high), lib.clip(log_ratio, low, None)
    bounded = lib.where(inputs.advantage > 0, up, down)
    mean = inputs.ops.aggregate(bounded, inputs.mask, inputs.segment_ids, "mean")
    return -inputs.advantage * lib.exp(mean), {"actor_clip_ratio": bounded != log_ratio}


def divergence_surrogate(inputs: LossInputs, algorithm: Algorithm) -> LossAndStats:
    """Return DPPO's: REINFORCE inside a trust region around the behaviour policy (2602.04879).

        −A·log π; 0 where A > 0, π > μ and D > clip_high, or A < 0, π < μ and D > clip_low

    D is `divergence`. The paper's truncated ratio π / μ is w, at most weight_upper.
    """
    lib, advantage = inputs.ops.lib, inputs.advantage
    far = divergence(inputs.target, inputs.behaviour, algorithm, lib)
    rises, falls = inputs.target > inputs.behaviour, inputs.target < inputs.behaviour
    left = (advantage > 0) & rises & (far > algorithm.clip_high)
    left = left | ((advantage < 0) & falls & (far > algorithm.clip_low))
    return lib.where(left, 0.0, -advantage * inputs.target), {"actor_clip_ratio": left}


def divergence(target: T, behaviour: T, algorithm: Algorithm, lib: Any) -> T:
    """Return the divergence of target and behaviour policy, of a token drawn or not drawn.

        tv  abs(π − μ)
        kl  μ·log(μ / π) + (1 − μ)·log((1 − μ) / (1 − π))

    Log-probabilities are clipped to −1e-6, so that 1 − π is not 0.
    """
    new, old = (lib.clip(x, None, -1e-6) for x in (target, behaviour))
    table = {
        "tv": lambda: lib.abs(lib.exp(new) - lib.exp(old)),
        "kl": lambda: (
            lib.exp(old) * (old - new)
            - lib.expm1(old) * (lib.log(-lib.expm1(old)) - lib.log(-lib.expm1(new)))
        ),
    }
    return choose("divergence", algorithm.divergence, table)()


def kept_sequences(inputs: LossInputs, algorithm: Algorithm) -> Any:
    """Return the tokens whose sequences stay in the loss.

        exp(mean log ρ) ≤ sequence_upper, and ≥ sequence_lower     ρ = proximal / behaviour
        min ρ ≥ veto
        A ≥ 0, or mean(behaviour − target) ≤ off_policy_limit      (OPSM, 2512.02556)

    Mean and min are over the trained tokens of the sequence. The result is [B, T] bool, without
    gradient.
    """
    ops, kept = inputs.ops, inputs.mask
    ahead = ops.frozen(inputs.behaviour - inputs.proximal)

    def over(x: Any, how: str) -> Any:
        return ops.aggregate(x, inputs.mask, inputs.segment_ids, how)

    if algorithm.sequence_upper < math.inf:
        kept = kept & (over(ahead, "mean") >= -math.log(algorithm.sequence_upper))
    if algorithm.sequence_lower:
        kept = kept & (over(ahead, "mean") <= -math.log(algorithm.sequence_lower))
    if algorithm.veto:
        kept = kept & (over(ahead, "max") <= -math.log(algorithm.veto))
    if algorithm.off_policy_limit:
        far = over(ops.frozen(inputs.behaviour - inputs.target), "mean")
        kept = kept & ((inputs.advantage >= 0) | (far <= algorithm.off_policy_limit))
    return kept


# By `algorithm.loss`.
SURROGATES: dict[str, Callable[[LossInputs, Algorithm], LossAndStats]] = {
    "clip": clipped_surrogate,
    "sapo": soft_surrogate,
    "reinforce": plain_surrogate,
    "cispo": bounded_weight_surrogate,
    "gmpo": geometric_surrogate,
    "dppo": divergence_surrogate,
}


def control_weights(
    log_weight_BT: T, used_BT: T, segment_ids_BT: T, algorithm: Algorithm, ops: Ops
) -> tuple[T, T]:
    """Return the behaviour weight w = exp(proximal − behaviour) of each token, kept within bounds.

    The bounds [weight_lower, weight_upper] are those of a statistic: log w for ratio and k1,
    (log w)²/2 for k2, w − 1 − log w for k3. It is a token's, or its mean, sum or max over the
    sequence; for ratio it is exponentiated, which makes the mean geometric.

        none      w
        mask      w, or 0 unless weight_lower ≤ statistic ≤ weight_upper: the token leaves the loss
        truncate  clip(ratio, weight_lower, weight_upper) (TIS)

    With weight_level=sequence all tokens get the clipped ratio of the sequence; with
    weight_aggregate=max each keeps its own, scaled until the largest is within the bounds.

    Args:
      log_weight_BT: [B, T] float32, finite. used_BT: [B, T] bool, which tokens count.
      segment_ids_BT: [B, T] int32, the sequences within each row.

    Returns:
      w, [B, T] float32, without gradient (1 when not decoupled); in bounds, [B, T] bool.
    """
    lib, log_weight = ops.lib, ops.frozen(log_weight_BT)
    if not algorithm.decoupled:
        return lib.ones_like(log_weight), lib.ones_like(used_BT)
    weight = lib.exp(log_weight)
    if algorithm.weight_action == "none":
        return weight, lib.ones_like(used_BT)
    segments, how = segment_ids_BT, algorithm.weight_aggregate
    # Of log w, what is aggregated, and what of that is held against the bounds.
    statistics = {
        "ratio": (lambda x: x, lib.exp),
        "k1": (lambda x: x, lambda x: x),
        "k2": (lambda x: 0.5 * x**2, lambda x: x),
        "k3": (lambda x: lib.expm1(x) - x, lambda x: x),
    }
    measure, finish = choose("weight_statistic", algorithm.weight_statistic, statistics)
    levels = {"token": lambda x: x, "sequence": lambda x: ops.aggregate(x, used_BT, segments, how)}
    leveled = choose("weight_level", algorithm.weight_level, levels)(measure(log_weight))
    statistic = finish(leveled)
    bounded = lib.clip(statistic, algorithm.weight_lower, algorithm.weight_upper)
    in_bounds = bounded == statistic
    per_token = algorithm.weight_level == "sequence" and how == "max"
    actions = {
        "mask": lambda: lib.where(in_bounds, weight, 0.0),
        "truncate": lambda: lib.exp(log_weight - leveled) * bounded if per_token else bounded,
    }
    return choose("weight_action", algorithm.weight_action, actions)(), in_bounds
