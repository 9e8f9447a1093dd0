"""The table of algorithms: every algorithm is one row of data.

The functions in `advantages` and `losses` read a row's fields. `resolve` makes a run's row from a
preset and the config's overrides. No JAX or torch here.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlx.algorithms.algorithm import CHOICES, FIELDS, LOSS_KINDS, Algorithm, check_choices, choose
from rlx.base import UserError, refuse
from rlx.option import check_value

_ARXIV = "https://arxiv.org/abs/"
_GROUP_SCORE = {"reward_mean": "group", "reward_std": "group"}
_BATCH_SCORE = {"advantage_mean": "batch", "advantage_std": "batch"}
_SEQUENCE_MEAN = {"reduction": "sequence_mean_token_mean"}


def _row(name: str, paper: str, **fields) -> Algorithm:
    return Algorithm(name, f"{_ARXIV}{paper}", **fields)


# Training is asynchronous, so that by default losses are decoupled (AReaL, 2505.24298), and weights
# above 5 are masked. GRPO and RLOO have no KL term, as in practice: it needs a reference model in
# memory (GRPO's is kl_placement="loss", kl_estimator="k3", kl_coefficient=0.04). GRPO's reduction
# is its paper's; on data tens of versions old it collapsed, and token_mean did not
# (experiments/2026-11-staleness). The last rows are SFT, pairs and distillation.
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
            "rae", "2506.24119", running_mean=0.95,
            loss="reinforce", reduction="sequence_mean_token_sum",
        ),
        _row(
            "gspo", "2507.18071", **_GROUP_SCORE, **_SEQUENCE_MEAN,
            ratio_level="sequence", clip_low=3e-4, clip_high=4e-4,
        ),
        _row("sapo", "2511.20347", **_GROUP_SCORE, **_SEQUENCE_MEAN, loss="sapo", decoupled=False),
        _row("lite_ppo", "2508.08221", reward_mean="group", reward_std="batch"),
        _row(
            "m2po", "2510.01161", **_GROUP_SCORE, decoupled=False,
            second_moment_clip=0.04, clip_low=0.3, clip_high=0.5,
        ),
        _row(
            "m2po_areal", "2510.01161", **_GROUP_SCORE,
            second_moment=0.04, clip_low=1.0, clip_high=math.inf, weight_action="none",
        ),
        _row("maxrl", "2602.02710", reward_mean="group", reward_std="mean"),
        # ScaleRL's bound of 5 on the ratio (2510.13786); none below, as published.
        _row("cispo", "2506.13585", **_GROUP_SCORE, loss="cispo", decoupled=False,
             clip_low=1.0, clip_high=4.0),
        _row("gmpo", "2507.20673", **_GROUP_SCORE, **_SEQUENCE_MEAN, loss="gmpo",
             clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1),
        _row("dppo", "2602.04879", **_GROUP_SCORE, loss="dppo", clip_low=0.15, clip_high=0.15,
             weight_action="truncate", weight_upper=20.0),
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


Find = Callable[[str, str, Mapping[str, Any]], Any]  # (key, name, table), `cli.user_code.find`


def resolve(
    config: Mapping[str, Any],  # `preset` and any field of `Algorithm`; None: the preset's value
    max_new_tokens: int,  # of sampling; replaces 0 in `overlong_limit` and `constant_length`
    n_samples: int = 8,  # of sampling; comparisons of a prompt's samples need two
    find: Find | None = None,  # loads a user's own loss or advantage; None: only rlx's are known
) -> Algorithm:
    """Return the preset's row with the overrides of `config.algorithm`.

    UserError for an unknown name, or values that cannot work together.
    """
    preset = choose("preset", str(config["preset"]), PRESETS)
    overrides = {name: config[name] for name in FIELDS if config.get(name) is not None}
    algorithm = _loaded(dataclasses.replace(preset, **overrides), find)
    if not algorithm.decoupled and "proximal" not in overrides:
        algorithm = dataclasses.replace(algorithm, proximal="behaviour")
    check_choices(algorithm)
    limit, buffer = algorithm.overlong_limit or max_new_tokens, algorithm.overlong_buffer
    algorithm = dataclasses.replace(
        algorithm,
        overlong_limit=limit,
        overlong_buffer=float(max(1, round(buffer * limit))) if 0 < buffer < 1 else buffer,
        constant_length=algorithm.constant_length or max_new_tokens,
    )
    for name, field in FIELDS.items():
        if name not in CHOICES:
            check_value(f"algorithm.{name}", getattr(algorithm, name), field.metadata["values"])
    rules = (*_weight_rules(algorithm, overrides), *_rules(algorithm, overrides, n_samples))
    refuse((broken, f"algorithm.{words}") for broken, words in rules)
    _check_acts(algorithm, overrides)
    return algorithm


def _loaded(algorithm: Algorithm, find: Find | None) -> Algorithm:
    """Return the algorithm with a user's own functions for names that are not rlx's."""
    for field in ("loss", "advantage"):
        key, name = f"algorithm.{field}", getattr(algorithm, field)
        if find is not None and name not in CHOICES[field]:
            function = find(key, name, dict.fromkeys(CHOICES[field]))
            if not callable(function):
                raise UserError(f"{key}={name} is no function, got {function!r}")
            algorithm = dataclasses.replace(algorithm, **{f"{field}_function": function})
    return algorithm


OWN = "FILE.py:name"  # in ACTS: any function of a user
_ROLLOUTS = (*(name for name, kind in LOSS_KINDS.items() if kind.data == "rollouts"), OWN)
_RATIOS = (*(name for name, kind in LOSS_KINDS.items() if kind.ratio), OWN)
_KL_NUMBERS = ("kl_estimator", "kl_coefficient", "kl_target", "kl_horizon")
_BOUNDS = ("weight_level", "weight_statistic", "weight_aggregate", "weight_upper", "weight_lower")
# Fields, and the other fields that make them act, with one of these values or, for (), any value
# except 0. A name that ends in _ is a prefix. Errors name the first reason that applies.
ACTS: tuple[tuple[tuple[str, ...], dict[str, tuple]], ...] = (
    (("overlong_", "running_mean", "reward_", "leave_one_out", "peers", "bootstrap_truncated",
      "gamma", "lam", "advantage", "advantage_", "proximal", "decoupled", "weight_", "sequence_",
      "veto", "off_policy_limit", "ratio_level", "clip_",
      "dual_clip", "divergence", "sapo_", "value_clip", "entropy_coefficient"),
     {"loss": _ROLLOUTS}),
    (("loss_kwargs",), {"loss": (OWN,)}),
    (("overlong_limit", "overlong_factor"), {"overlong_buffer": ()}),
    (("peers",), dict.fromkeys(("reward_mean", "reward_std", "advantage_mean", "advantage_std"),
                               ("group",))),
    (("kl_anchor",), {"kl_placement": ("reward", "loss"), "loss": ("dpo", "ipo")}),
    (_KL_NUMBERS, {"kl_placement": ("reward", "loss")}),
    (("kl_horizon",), {"kl_target": ()}),
    (("bootstrap_truncated", "value_clip"), {"critic": (True,)}),
    (("proximal",), {"loss": _RATIOS, "kl_placement": ("reward",)}),
    (("weight_", "sequence_", "veto"), {"decoupled": (True,)}),
    (_BOUNDS, {"weight_action": ("mask", "truncate")}),
    (("weight_aggregate",), {"weight_level": ("sequence",)}),
    (("ratio_level",), {"loss": _RATIOS, "decoupled": (True,)}),
    (("clip_",), {"loss": ("clip", "cispo", "gmpo", "dppo", OWN)}),
    (("dual_clip",), {"loss": ("clip", OWN)}),
    (("divergence",), {"loss": ("dppo", OWN)}),
    (("sapo_",), {"loss": ("sapo", OWN)}),
    (("pair_beta",), {"loss": ("dpo", "ipo")}),
    (("constant_length",), {"reduction": ("constant",)}),
)  # fmt: skip


def idle(algorithm: Algorithm) -> dict[str, str]:
    """Return the fields that change nothing in an algorithm → a setting that makes them act."""
    remedies: dict[str, str] = {}
    for fields, needs in ACTS:
        values = [
            (OWN if getattr(algorithm, f"{name}_function", None) else getattr(algorithm, name), w)
            for name, w in needs.items()
        ]
        if any(value in settings if settings else value for value, settings in values):
            continue
        words = (f"{name}={'|'.join(map(str, settings))}" if settings else f"{name} above 0"
                 for name, settings in needs.items())  # fmt: skip
        remedy, begins = " or ".join(words), tuple(f for f in fields if f.endswith("_"))
        for name in FIELDS:
            if name in fields or name.startswith(begins):
                remedies.setdefault(name, remedy)
    return remedies


def _check_acts(algorithm: Algorithm, overrides: dict) -> None:
    """Raise UserError for an override that changes nothing, unless it is 0, False or none."""
    if overrides.get("kl_placement") == "none":  # a disabled KL term may keep its numbers
        overrides = {k: v for k, v in overrides.items() if k not in _KL_NUMBERS}
    remedies = idle(algorithm)
    for name, value in overrides.items():
        if value not in (0, "", "none") and name in remedies:
            problem = f"algorithm.{name}={value} has no effect ({algorithm.name})"
            remedy = f"it needs algorithm.{remedies[name]}: set that, or leave {name} unset"
            raise UserError(f"{problem}; {remedy}")


Rules = tuple[tuple[bool, str], ...]  # (is broken, words after `algorithm.`)


def _weight_rules(a: Algorithm, overrides: Mapping[str, Any]) -> Rules:
    # The default bound is for a token's ratio; other statistics have other scales.
    if a.weight_action == "none":
        return ()
    upper, lower, statistic = a.weight_upper, a.weight_lower, a.weight_statistic
    plain = a.weight_level == "token" and statistic == "ratio"
    on_policy = 1 if statistic == "ratio" else 0
    least = {"ratio": 0, "k1": -math.inf}.get(statistic, on_policy)
    masks, truncates = a.weight_action == "mask", a.weight_action == "truncate"
    remedy = f"set it between {least} and {on_policy}, or"
    return (
        (truncates and statistic != "ratio",
         f"weight_statistic={statistic} cannot be truncated, only a ratio can; use "
         "weight_action=mask or weight_statistic=ratio"),
        (not plain and "weight_upper" not in overrides,
         "weight_upper has a default only for weight_level=token and weight_statistic=ratio, got "
         f"{a.weight_level} and {statistic}; set algorithm.weight_upper"),
        (lower >= upper,
         f"weight_lower={lower} is not below weight_upper={upper}; every token would be out of "
         "bounds"),
        (masks and upper <= on_policy,
         f"weight_upper={upper} masks every token that is on policy, whose {statistic} is "
         f"{on_policy}; set it above {on_policy}"),
        (lower != -math.inf and not least < lower < (on_policy if masks else math.inf),
         f"weight_lower={lower} bounds no {statistic}, or masks all that is on policy; "
         f"{remedy if least < on_policy else 'as no bound can,'} leave it unset"),
        (truncates and upper <= 0, f"weight_upper={upper} must be above 0"),
    )  # fmt: skip


def _rules(a: Algorithm, overrides: Mapping[str, Any], n_samples: int) -> Rules:
    """Return the rules between other fields."""
    kl = a.kl_in_reward or a.kl_in_loss
    no_kl = not a.kl_coefficient and ("kl_coefficient" not in overrides or a.kl_target > 0)
    off = {"kl_placement": "none", "critic": False, "second_moment": 0.0,
           "second_moment_clip": 0.0, "drop_equal_rewards": False}  # fmt: skip
    single = n_samples < 2 and a.data == "rollouts"
    return (
        (kl and no_kl,
         f"kl_placement={a.kl_placement} with kl_coefficient=0 is no KL term; set "
         "algorithm.kl_coefficient, or kl_placement=none"),
        (a.overlong_buffer > a.overlong_limit,
         f"overlong_buffer={a.overlong_buffer} must be in [0, {a.overlong_limit}]"),
        (0 < a.dual_clip <= 1, f"dual_clip={a.dual_clip} must be above 1, or 0 to turn it off"),
        (a.leave_one_out and a.reward_mean == "none",
         "leave_one_out=True needs a mean to leave one out of; set algorithm.reward_mean to group "
         "or batch"),
        (a.second_moment > 0 and (a.proximal != "recompute" or not a.decoupled),
         f"second_moment={a.second_moment:g} compares the behaviour with a recomputed proximal "
         f"policy, got proximal={a.proximal}, decoupled={a.decoupled}; set proximal=recompute and "
         "decoupled=True"),
        (a.second_moment_clip > 0 and a.data == "rollouts" and (
            (a.loss_function is None and a.loss != "clip") or a.decoupled
            or (a.proximal, a.ratio_level) != ("behaviour", "token")),
         f"second_moment_clip={a.second_moment_clip:g} clips target / behaviour of tokens, got "
         f"loss={a.loss}, proximal={a.proximal}, decoupled={a.decoupled}, ratio_level="
         f"{a.ratio_level}; set loss=clip, proximal=behaviour, decoupled=False, ratio_level=token"),
        *((a.data != "rollouts" and getattr(a, field) != value,
           f"{field}={getattr(a, field)} is for rollouts; loss={a.loss} trains on {a.data}: set it "
           f"to {value}") for field, value in off.items()),
        (a.kl_anchor == "teacher" and not a.needs_anchor,
         "kl_anchor=teacher without a KL term; set kl_placement to reward or loss"),
        (a.reward_std == "mean" and a.reward_mean == "none",
         "reward_std=mean divides by a mean and reward_mean=none; set it to group or batch"),
        (single and a.drop_equal_rewards,
         "drop_equal_rewards=True with sampling.n_samples=1 rejects every group: one reward is "
         "always equal; raise n_samples or set drop_equal_rewards=False"),
        (single and a.reward_mean == "group",
         f"reward_mean=group ({a.name}) with sampling.n_samples=1 compares each reward with "
         "itself, so nothing is learned; raise n_samples or set reward_mean=batch"),
    )  # fmt: skip
