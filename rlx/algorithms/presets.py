"""The algorithm matrix on one screen: every RL algorithm is one row of data.

A row is a frozen, hashable `Algorithm`, so it can be a static argument of a jitted function.
The functions in `advantages` and `losses` read its fields; no algorithm has code of its own.
Imports neither JAX nor torch: the servers, the planner and `rlx_torch` share it.
"""

import dataclasses
import math
from dataclasses import dataclass

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.config import ALGORITHM_OVERRIDES, unknown

LEVELS = ("group", "batch", "none")
REDUCTIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant",
    "prompt_mean",
)
CHOICES: dict[str, tuple[str, ...]] = {
    "reward_mean": LEVELS,
    "reward_std": LEVELS,
    "advantage_mean": LEVELS,
    "advantage_std": LEVELS,
    "proximal": ("recompute", "loglinear", "behaviour"),
    "weight_level": ("token", "sequence"),
    "weight_action": ("none", "mask", "truncate"),
    "weight_statistic": ("ratio", "k1", "k2", "k3"),
    "weight_aggregate": ("mean", "sum", "max"),
    "reduction": REDUCTIONS,
    "kl_placement": ("none", "reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3"),
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm as data. Fields stand in the order in which a batch meets them.

    Attributes:
      name, source: the preset and the paper it follows.
      overlong_buffer: tokens of the soft zone before `overlong_limit`; 0 turns the penalty off.
      overlong_limit: tokens; 0 stands for sampling.max_new_tokens (filled in by `resolve`).
      overlong_factor: the penalty at the limit.
      reward_bias, reward_scale, reward_clip: r = clip((r + bias)·scale, ±clip).
      reward_mean, reward_std: over which rewards each is taken: group | batch | none.
      leave_one_out: the mean of a reward's peers leaves that reward out.
      kl_placement: none | reward (a per-token penalty before GAE) | loss (a differentiated term).
      kl_estimator: k1 | k2 | k3. kl_coefficient: β ≥ 0.
      gamma, lam: discount and GAE mixing, in [0, 1].
      advantage_mean, advantage_std: as for rewards, over trained tokens.
      proximal: where the clip's anchor comes from: recompute (the policy before the batch's first
        update) | loglinear (interpolated) | behaviour (the sampled logprobs: plain PPO).
      decoupled: weigh the loss by exp(proximal − behaviour), without gradient.
      weight_level, weight_action, weight_statistic, weight_aggregate, weight_upper, weight_lower:
        which weights are out of bounds and what happens then; `losses.control_weights`.
      clip_low, clip_high: the ratio is clipped to [1 − low, 1 + high].
      dual_clip: bound c > 1 of the loss where the advantage is negative; 0 is off.
      entropy_coefficient: bonus for entropy, ≥ 0.
      reduction: how token losses become one number. constant_length: tokens, for `constant`; 0
        stands for sampling.max_new_tokens (filled in by `resolve`).
    """

    name: str
    source: str
    overlong_buffer: int = 0
    overlong_limit: int = 0
    overlong_factor: float = 1.0
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float = 20.0
    reward_mean: str = "none"
    reward_std: str = "none"
    leave_one_out: bool = False
    kl_placement: str = "none"
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    advantage_mean: str = "none"
    advantage_std: str = "none"
    proximal: str = "recompute"
    decoupled: bool = True
    weight_level: str = "token"
    weight_action: str = "mask"
    weight_statistic: str = "ratio"
    weight_aggregate: str = "mean"
    weight_upper: float = 5.0
    weight_lower: float = -math.inf
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    entropy_coefficient: float = 0.0
    reduction: str = "token_mean"
    constant_length: int = 0

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for `reference_logprobs`."""
        return self.kl_placement != "none"

    def needs_proximal_pass(self, minibatches: int) -> bool:
        """Whether a forward pass before the first update is due.

        With one minibatch the proximal policy is the target before its update, so the loss takes
        it from there; only a KL inside the reward still asks for it earlier.
        """
        return self.proximal == "recompute" and (minibatches > 1 or self.kl_placement == "reward")


# What every row shares, though no paper's row names it: training is asynchronous, so losses are
# decoupled (AReaL, 2505.24298) with weights above 5 masked. The papers' KL terms are off (GRPO's is
# kl_placement="loss", kl_coefficient=0.04, k3): they need a reference model in memory.
PRESETS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            "grpo",
            "https://arxiv.org/abs/2402.03300",
            reward_mean="group",
            reward_std="group",
            reduction="sequence_mean_token_mean",
        ),
    )
}


def resolve(config: ConfigDict, max_new_tokens: int) -> Algorithm:
    """The preset's row with the overrides of `config.algorithm`, checked.

    Args:
      config: `preset` and any of ALGORITHM_OVERRIDES; None keeps the preset's value.
      max_new_tokens: sampling.max_new_tokens; stands in for zero `overlong_limit` and
        `constant_length`.

    Raises:
      UserError: for an unknown name, or values that cannot work together.
    """
    if config.preset not in PRESETS:
        raise unknown("algorithm.preset", str(config.preset), PRESETS)
    given = {k: config[k] for k in ALGORITHM_OVERRIDES if config.get(k) is not None}
    algorithm = dataclasses.replace(PRESETS[config.preset], **given)
    if not algorithm.decoupled and "proximal" not in given:
        algorithm = dataclasses.replace(algorithm, proximal="behaviour")
    for field, choices in CHOICES.items():
        if getattr(algorithm, field) not in choices:
            raise unknown(f"algorithm.{field}", getattr(algorithm, field), choices)
    _check_weights(algorithm, given)
    algorithm = dataclasses.replace(
        algorithm,
        overlong_limit=algorithm.overlong_limit or max_new_tokens,
        constant_length=algorithm.constant_length or max_new_tokens,
    )
    _check_ranges(algorithm)
    return algorithm


def _check_weights(algorithm: Algorithm, given: dict) -> None:
    """The default bound is one of a single token's ratio; other statistics have other scales."""
    if algorithm.weight_action == "none":
        return
    if algorithm.weight_action == "truncate" and algorithm.weight_statistic != "ratio":
        raise UserError(
            f"algorithm.weight_statistic={algorithm.weight_statistic} cannot be truncated, only a "
            "ratio can; use weight_action=mask or weight_statistic=ratio"
        )
    plain = algorithm.weight_level == "token" and algorithm.weight_statistic == "ratio"
    if not plain and "weight_upper" not in given:
        raise UserError(
            f"algorithm.weight_upper has a default only for weight_level=token and "
            f"weight_statistic=ratio, got {algorithm.weight_level} and "
            f"{algorithm.weight_statistic}; set algorithm.weight_upper"
        )
    if algorithm.weight_lower >= algorithm.weight_upper:
        raise UserError(
            f"algorithm.weight_lower={algorithm.weight_lower} is not below weight_upper="
            f"{algorithm.weight_upper}; every token would be out of bounds"
        )


def _check_ranges(algorithm: Algorithm) -> None:
    for field, low, high in (
        ("gamma", 0.0, 1.0),
        ("lam", 0.0, 1.0),
        ("clip_low", 0.0, 1.0),
        ("clip_high", 0.0, math.inf),
        ("reward_clip", 0.0, math.inf),
        ("overlong_buffer", 0, algorithm.overlong_limit),
        ("overlong_limit", 0, math.inf),
        ("overlong_factor", 0.0, math.inf),
        ("constant_length", 1, math.inf),
        ("kl_coefficient", 0.0, math.inf),
        ("entropy_coefficient", 0.0, math.inf),
    ):
        value = getattr(algorithm, field)
        if not low <= value <= high:
            raise UserError(f"algorithm.{field}={value} must be in [{low}, {high}]")
    if algorithm.dual_clip and algorithm.dual_clip <= 1:
        raise UserError(
            f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 to turn it off"
        )
    if algorithm.weight_action == "truncate" and algorithm.weight_upper <= 0:
        raise UserError(f"algorithm.weight_upper={algorithm.weight_upper} must be above 0")
    if algorithm.leave_one_out and algorithm.reward_mean == "none":
        raise UserError(
            "algorithm.leave_one_out=True needs a mean to leave one out of; "
            "set algorithm.reward_mean to group or batch"
        )
