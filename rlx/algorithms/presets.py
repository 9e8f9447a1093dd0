"""The algorithm matrix on one screen: every algorithm is one row of data.

A row is a frozen, hashable `Algorithm`, so it can be a static argument of a jitted function.
The functions in `advantages` and `losses` read its fields; no algorithm has code of its own.
Imports neither JAX nor torch: the servers, the planner and `rlx_torch` share it.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

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
# What a trajectory is trained on: of its own sampling, from a dataset, or one of a ranked pair.
DATA = {"nll": "demonstrations", "bradley_terry": "pairs", "dpo": "pairs", "ipo": "pairs"}
CHOICES: dict[str, tuple[str, ...]] = {
    "loss": ("clip", "sapo", "reinforce", *DATA),
    "ratio_level": ("token", "sequence"),
    "peers": ("prompt", "agent", "turn"),
    "kl_anchor": ("reference", "teacher"),
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

T = TypeVar("T")


def choose(field: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`: code that lacks a choice must not fall through to another.

    Raises:
      UserError: `name` is not in the table.
    """
    if name not in table:
        raise unknown(f"algorithm.{field}", name, table)
    return table[name]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm as data. Fields stand in the order in which a batch meets them.

    Attributes:
      name, source: the preset and the paper it follows.
      drop_equal_rewards: reject groups whose rewards are all equal and sample others in their place
        (DAPO's dynamic sampling).
      overlong_filter: trajectories cut off by length keep their reward in the group's statistics,
        but none of their tokens is trained on.
      overlong_buffer: tokens of the soft zone before `overlong_limit`, or below 1 a share of it; 0
        turns the penalty off.
      overlong_limit: tokens; 0 stands for sampling.max_new_tokens (filled in by `resolve`).
      overlong_factor: the penalty at the limit.
      reward_bias, reward_scale, reward_clip: r = clip((r + bias)·scale, ±clip).
      reward_mean, reward_std: over which rewards each is taken: group | batch | none.
      leave_one_out: the mean of a reward's peers leaves that reward out.
      peers: who shares a group's statistics: all trajectories of the prompt | those of the same
        agent | those (for advantages, the tokens) of the same turn.
      kl_anchor: the policy KL terms pull to: the reference (config.reference) | a teacher that a
        fleet serves (config.teacher).
      kl_placement: none | reward (a per-token penalty before GAE) | loss (a differentiated term).
      kl_estimator: k1 | k2 | k3. kl_coefficient: β ≥ 0, the first one where it is adaptive.
      kl_target: nats a token that β is steered to; 0: β is fixed. kl_horizon: trajectories in which
        it may grow or shrink by a fifth; `kl.adapt`.
      critic: values come from a network of their own (config.critic), else they are 0.
      bootstrap_truncated: where a trajectory was cut off by length, V of its end takes the place of
        what was never sampled.
      gamma, lam: discount and GAE mixing, in [0, 1].
      advantage_mean, advantage_std: as for rewards, over trained tokens.
      proximal: where the clip's anchor comes from: recompute (the policy before the batch's first
        update) | loglinear (interpolated) | behaviour (the sampled logprobs: plain PPO).
      decoupled: weigh the loss by exp(proximal − behaviour), without gradient.
      weight_level, weight_action, weight_statistic, weight_aggregate, weight_upper, weight_lower:
        which weights are out of bounds and what happens then; `losses.control_weights`.
      second_moment: M2PO's limit on the mean of (behaviour − proximal)² over the minibatch, nats²;
        the tokens farthest off are dropped until it holds; 0 is off.
      loss: clip | sapo | reinforce, on rollouts; nll, on demonstrations; bradley_terry | dpo | ipo,
        on pairs.
      ratio_level: ratios of each token | one for the sequence, the geometric mean of its tokens'.
      clip_low, clip_high: the ratio is clipped to [1 − low, 1 + high].
      dual_clip: bound c > 1 of the loss where the advantage is negative; 0 is off.
      sapo_positive, sapo_negative: τ of SAPO's gate where A > 0, and elsewhere.
      value_clip: ε_v; values move by at most this much before their loss stops to follow; 0 is off.
      pair_beta: β of DPO and IPO.
      entropy_coefficient: bonus for entropy, ≥ 0.
      reduction: how token losses become one number. constant_length: tokens, for `constant`; 0
        stands for sampling.max_new_tokens (filled in by `resolve`).
    """

    name: str
    source: str
    drop_equal_rewards: bool = False
    overlong_filter: bool = False
    overlong_buffer: float = 0.0
    overlong_limit: int = 0
    overlong_factor: float = 1.0
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float = 20.0
    reward_mean: str = "none"
    reward_std: str = "none"
    leave_one_out: bool = False
    peers: str = "prompt"
    kl_anchor: str = "reference"
    kl_placement: str = "none"
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    kl_target: float = 0.0
    kl_horizon: int = 10_000
    critic: bool = False
    bootstrap_truncated: bool = True
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
    second_moment: float = 0.0
    loss: str = "clip"
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    value_clip: float = 0.5
    pair_beta: float = 0.1
    entropy_coefficient: float = 0.0
    reduction: str = "token_mean"
    constant_length: int = 0

    @property
    def data(self) -> str:
        """What it is trained on: rollouts | demonstrations | pairs."""
        return DATA.get(self.loss, "rollouts")

    @property
    def needs_anchor(self) -> bool:
        """Whether the logprobs of another policy are asked for, as `reference_logprobs`."""
        return self.kl_placement != "none" or self.loss in ("dpo", "ipo")

    @property
    def needs_reference(self) -> bool:
        """Whether that policy is the reference, which the trainer keeps; a teacher has a fleet."""
        kept = choose("kl_anchor", self.kl_anchor, {"reference": True, "teacher": False})
        return self.needs_anchor and kept

    def needs_proximal_pass(self, minibatches: int) -> bool:
        """Whether a forward pass before the first update is due.

        With one minibatch the proximal policy is the target before its update, so the loss takes
        it from there; a KL inside the reward and M2PO ask for it earlier. REINFORCE has no anchor:
        its weight is that of the target itself.
        """
        if self.data != "rollouts" or self.proximal != "recompute":
            return False
        early = self.kl_placement == "reward" or self.second_moment > 0
        return early or (minibatches > 1 and self.loss != "reinforce")


_ARXIV = "https://arxiv.org/abs/"
_GROUP_SCORE = {"reward_mean": "group", "reward_std": "group"}
_BATCH_SCORE = {"advantage_mean": "batch", "advantage_std": "batch"}
_SEQUENCE_MEAN = {"reduction": "sequence_mean_token_mean"}


def _row(name: str, paper: str, **fields) -> Algorithm:
    return Algorithm(name, f"{_ARXIV}{paper}", **fields)


# What every row shares, though no paper's row names it: training is asynchronous, so losses are
# decoupled (AReaL, 2505.24298) with weights above 5 masked. GRPO's and RLOO's KL terms are off, as
# they are in use; they need a reference model in memory (GRPO's is kl_placement="loss",
# kl_estimator="k3", kl_coefficient=0.04). GRPO's reduction is its paper's too: on data tens of
# versions old it collapsed where token_mean held (experiments/2026-11-staleness). The last rows are
# the other trainers.
PRESETS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        _row("ppo", "1707.06347", critic=True, lam=0.95),
        _row("grpo", "2402.03300", **_GROUP_SCORE, **_SEQUENCE_MEAN),
        _row("dr_grpo", "2503.20783", reward_mean="group", reduction="constant"),
        _row(
            "dapo", "2503.14476", **_GROUP_SCORE,
            drop_equal_rewards=True, overlong_buffer=0.2, clip_high=0.28,
        ),
        _row(
            "rloo", "2402.14740", reward_mean="group", leave_one_out=True,
            loss="reinforce", reduction="sequence_mean_token_sum",
        ),
        _row(
            "reinforce_pp", "2501.03262", **_BATCH_SCORE,
            kl_placement="reward", kl_estimator="k1", kl_coefficient=1e-3,
        ),
        _row(
            "reinforce_pp_baseline", "2501.03262", reward_mean="group", **_BATCH_SCORE,
            kl_placement="loss", kl_estimator="k2", kl_coefficient=1e-3,
        ),
        _row(
            "gspo", "2507.18071", **_GROUP_SCORE, **_SEQUENCE_MEAN,
            ratio_level="sequence", clip_low=3e-4, clip_high=4e-4,
        ),
        _row("sapo", "2511.20347", **_GROUP_SCORE, **_SEQUENCE_MEAN, loss="sapo", decoupled=False),
        _row("lite_ppo", "2508.08221", reward_mean="group", reward_std="batch"),
        _row(
            "m2po", "2510.01161", **_GROUP_SCORE,
            second_moment=0.04, clip_low=1.0, clip_high=math.inf, weight_action="none",
        ),
        _row("sft", "2203.02155", loss="nll"),
        _row("reward_model", "2203.02155", loss="bradley_terry"),
        _row("dpo", "2305.18290", loss="dpo", reduction="sequence_mean_token_sum"),
        _row("ipo", "2310.12036", loss="ipo", reduction="sequence_mean_token_mean"),
        _row(
            "distill", "2306.13649", reward_scale=0.0, kl_anchor="teacher",
            kl_placement="reward", kl_estimator="k1", kl_coefficient=1.0, gamma=0.0,
        ),
        _row(
            "distill_mixed", "2306.13649", **_GROUP_SCORE, **_SEQUENCE_MEAN, kl_anchor="teacher",
            kl_placement="loss", kl_estimator="k2", kl_coefficient=5e-3,
        ),
    )
}  # fmt: skip


def resolve(config: ConfigDict, max_new_tokens: int, n_samples: int = 8) -> Algorithm:
    """The preset's row with the overrides of `config.algorithm`, checked.

    Args:
      config: `preset` and any of ALGORITHM_OVERRIDES; None keeps the preset's value.
      max_new_tokens: sampling.max_new_tokens; stands in for zero `overlong_limit` and
        `constant_length`.
      n_samples: sampling.n_samples; what compares the samples of a prompt needs two.

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
    _check_kl(algorithm, given)
    limit, buffer = algorithm.overlong_limit or max_new_tokens, algorithm.overlong_buffer
    algorithm = dataclasses.replace(
        algorithm,
        overlong_limit=limit,
        overlong_buffer=float(max(1, round(buffer * limit))) if 0 < buffer < 1 else buffer,
        constant_length=algorithm.constant_length or max_new_tokens,
    )
    _check_ranges(algorithm)
    _check_parts(algorithm)
    _check_acts(algorithm, given)
    _check_samples(algorithm, n_samples)
    return algorithm


_KL_NUMBERS = ("kl_estimator", "kl_coefficient", "kl_target", "kl_horizon")
_BOUNDS = ("weight_level", "weight_statistic", "weight_aggregate", "weight_upper", "weight_lower")
# Fields (one that ends in _ stands for all that begin so), and what makes them act: another field
# with one of these values, or any that is not 0. The first reason for doing nothing is told.
ACTS: tuple[tuple[tuple[str, ...], dict[str, tuple]], ...] = (
    (("overlong_", "reward_", "leave_one_out", "peers", "bootstrap_truncated", "gamma", "lam",
      "advantage_", "proximal", "decoupled", "weight_", "ratio_level", "clip_", "dual_clip",
      "sapo_", "value_clip", "entropy_coefficient"), {"loss": ("clip", "sapo", "reinforce")}),
    (("overlong_limit", "overlong_factor"), {"overlong_buffer": ()}),
    (("peers",), dict.fromkeys(("reward_mean", "reward_std", "advantage_mean", "advantage_std"),
                               ("group",))),
    (("kl_anchor",), {"kl_placement": ("reward", "loss"), "loss": ("dpo", "ipo")}),
    (_KL_NUMBERS, {"kl_placement": ("reward", "loss")}),
    (("kl_horizon",), {"kl_target": ()}),
    (("bootstrap_truncated", "value_clip"), {"critic": (True,)}),
    (("proximal",), {"loss": ("clip", "sapo"), "kl_placement": ("reward",)}),
    (("weight_",), {"decoupled": (True,)}),
    (_BOUNDS, {"weight_action": ("mask", "truncate")}),
    (("weight_aggregate",), {"weight_level": ("sequence",)}),
    (("ratio_level",), {"loss": ("clip", "sapo"), "decoupled": (True,)}),
    (("clip_", "dual_clip"), {"loss": ("clip",)}),
    (("sapo_",), {"loss": ("sapo",)}),
    (("pair_beta",), {"loss": ("dpo", "ipo")}),
    (("constant_length",), {"reduction": ("constant",)}),
)  # fmt: skip


def _check_acts(algorithm: Algorithm, given: dict) -> None:
    """Raise for an override that changes nothing; 0, False and none ask for nothing and pass."""
    if given.get("kl_placement") == "none":  # a KL term switched off whole may keep its numbers
        given = {k: v for k, v in given.items() if k not in _KL_NUMBERS}
    for fields, needs in ACTS:
        values = {name: getattr(algorithm, name) for name in needs}
        if any(
            values[name] in wanted if wanted else values[name] for name, wanted in needs.items()
        ):
            continue
        begins = tuple(field for field in fields if field.endswith("_"))
        asked = [k for k, v in given.items() if v not in (0, "none")]
        idle = next((k for k in asked if k in fields or k.startswith(begins)), None)
        if idle:
            wants = (f"{name}={'|'.join(map(str, wanted))}" if wanted else f"{name} above 0"
                     for name, wanted in needs.items())  # fmt: skip
            raise UserError(
                f"algorithm.{idle}={given[idle]} acts on nothing ({algorithm.name}); it needs "
                f"algorithm.{' or '.join(wants)}: set that, or leave {idle} unset"
            )


def _check_samples(algorithm: Algorithm, n_samples: int) -> None:
    """A prompt's only sample has nothing to be compared with: its reward less the mean is 0."""
    if n_samples > 1 or algorithm.data != "rollouts":
        return
    if algorithm.drop_equal_rewards:
        raise UserError(
            "algorithm.drop_equal_rewards=True with sampling.n_samples=1 rejects every group: one "
            "reward is always equal; raise n_samples or set drop_equal_rewards=False"
        )
    if algorithm.reward_mean == "group":
        raise UserError(
            f"algorithm.reward_mean=group ({algorithm.name}) with sampling.n_samples=1 compares "
            "each reward with itself, so nothing is learned; raise n_samples or set "
            "reward_mean=batch"
        )


def _check_kl(algorithm: Algorithm, given: dict) -> None:
    """A coefficient and a place for it: half of a KL term would silently be none."""
    placed, coefficient = algorithm.kl_placement != "none", algorithm.kl_coefficient
    if placed and not coefficient and ("kl_coefficient" not in given or algorithm.kl_target):
        raise UserError(
            f"algorithm.kl_placement={algorithm.kl_placement} with kl_coefficient=0 is no KL term; "
            "set algorithm.kl_coefficient, or kl_placement=none"
        )


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
    # What data of the policy itself have must be within the bounds, or nothing is trained on.
    fresh = 1 if algorithm.weight_statistic == "ratio" else 0
    least = {"ratio": 0, "k1": -math.inf}.get(algorithm.weight_statistic, fresh)
    masks = algorithm.weight_action == "mask"
    if masks and algorithm.weight_upper <= fresh:
        raise UserError(
            f"algorithm.weight_upper={algorithm.weight_upper} masks every token that is on policy, "
            f"whose {algorithm.weight_statistic} is {fresh}; set it above {fresh}"
        )
    lower = algorithm.weight_lower
    if lower != -math.inf and not least < lower < (fresh if masks else math.inf):
        remedy = f"set it between {least} and {fresh}, or" if least < fresh else "as no bound can,"
        raise UserError(
            f"algorithm.weight_lower={lower} bounds no {algorithm.weight_statistic}, or masks all "
            f"that is on policy; {remedy} leave it unset"
        )


def _check_ranges(algorithm: Algorithm) -> None:
    for field, low, high in (
        ("gamma", 0.0, 1.0),
        ("lam", 0.0, 1.0),
        ("clip_low", 0.0, 1.0),
        ("clip_high", 0.0, math.inf),
        ("reward_bias", -math.inf, math.inf),
        ("reward_scale", -math.inf, math.inf),
        ("reward_clip", 0.0, math.inf),
        ("overlong_buffer", 0, algorithm.overlong_limit),
        ("overlong_limit", 0, math.inf),
        ("overlong_factor", 0.0, math.inf),
        ("constant_length", 1, math.inf),
        ("kl_coefficient", 0.0, math.inf),
        ("kl_target", 0.0, math.inf),
        ("kl_horizon", 1, math.inf),
        ("weight_upper", -math.inf, math.inf),
        ("weight_lower", -math.inf, math.inf),
        ("second_moment", 0.0, math.inf),
        ("dual_clip", 0.0, math.inf),
        ("sapo_positive", 1e-3, math.inf),
        ("sapo_negative", 1e-3, math.inf),
        ("value_clip", 0.0, math.inf),
        ("pair_beta", 1e-6, math.inf),
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


def _check_parts(algorithm: Algorithm) -> None:
    """Parts of different papers that cannot be put together."""
    a = algorithm
    if a.second_moment and (a.proximal != "recompute" or not a.decoupled):
        raise UserError(
            f"algorithm.second_moment={a.second_moment:g} compares the behaviour with a recomputed "
            f"proximal policy, got proximal={a.proximal}, decoupled={a.decoupled}; set "
            "proximal=recompute and decoupled=True"
        )
    if a.data != "rollouts":
        for field, off in (("kl_placement", "none"), ("critic", False), ("second_moment", 0.0),
                           ("drop_equal_rewards", False)):  # fmt: skip
            if getattr(a, field) != off:
                raise UserError(
                    f"algorithm.{field}={getattr(a, field)} is for rollouts; loss={a.loss} trains "
                    f"on {a.data}: set it to {off}"
                )
    if a.kl_anchor == "teacher" and not a.needs_anchor:
        raise UserError(
            "algorithm.kl_anchor=teacher without a KL term; set kl_placement to reward or loss"
        )
