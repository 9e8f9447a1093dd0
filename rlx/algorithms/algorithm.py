"""`Algorithm`: one algorithm as data, each field declared once with type, choices, range and help.

Config keys, checks and docs/algorithms.md derive from these declarations. No JAX or torch here.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlx.base import UserError, unknown
from rlx.option import check_value, option, options_of

T = TypeVar("T")

LEVELS = ("group", "batch", "none")
REDUCTIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant",
    "prompt_mean",
)


@dataclass(frozen=True, slots=True)
class LossKind:
    """Properties of a loss that the code around it needs."""

    data: str = "rollouts"  # rollouts | demonstrations | pairs (chosen and rejected answer)
    ratio: bool = False  # it depends on the ratio target / proximal, so it needs a proximal policy
    scores: bool = False  # it reads the value head's score of each answer, not log-probabilities
    reference: bool = False  # it compares with the reference policy itself, without a KL term


# For equations see `surrogates.SURROGATES` and `supervised.PAIR_LOSSES`. OWN_LOSS is the kind of a
# user's own loss (FILE.py:name).
LOSS_KINDS = {
    "clip": LossKind(ratio=True),
    "sapo": LossKind(ratio=True),
    "reinforce": LossKind(),
    "cispo": LossKind(ratio=True),
    "gmpo": LossKind(ratio=True),
    "dppo": LossKind(),
    "nll": LossKind("demonstrations"),
    "bradley_terry": LossKind("pairs", scores=True),
    "dpo": LossKind("pairs", reference=True),
    "ipo": LossKind("pairs", reference=True),
}
OWN_LOSS = LossKind(ratio=True)


def choose(field: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`; UserError for an unknown name."""
    if name not in table:
        raise unknown(f"algorithm.{field}", name, table)
    return table[name]


def require_reference(batch: Mapping[str, T]) -> T:
    """Return `batch["reference_logprobs"]`; UserError where there are none."""
    if "reference_logprobs" not in batch:
        raise UserError(
            "a KL term needs reference_logprobs and the batch has none; give a reference model or "
            "a teacher, or set algorithm.kl_placement=none"
        )
    return batch["reference_logprobs"]


def _choice(default: str, choices: tuple[str, ...], doc: str) -> Any:
    return option(default, doc, choices)


def _number(default: float, low: float, high: float, doc: str) -> Any:
    return option(default, doc, f"[{low:g}, {high:g}]")


_KS = ("k1", "k2", "k3")
_ANY = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm as data, with fields in the order in which they act on a batch.

    Hashable, for `jax.jit`. Fields with a help text are config keys.
    """

    name: str
    source: str
    loss_function: Callable | None = None
    advantage_function: Callable | None = None
    drop_equal_rewards: bool = option(
        False, "reject groups of equal rewards and sample others (DAPO's dynamic sampling)"
    )
    overlong_filter: bool = option(
        False, "exclude trajectories cut off by length from the loss; their rewards still count"
    )
    overlong_buffer: float = _number(
        0.0, 0, math.inf, "tokens of penalty zone before the limit; below 1: share of it; 0: off"
    )
    overlong_limit: int = _number(0, 0, math.inf, "tokens; 0: sampling.max_new_tokens")
    overlong_factor: float = _number(1.0, 0.0, math.inf, "penalty at the limit")
    running_mean: float = _number(
        0.0, 0.0, 1.0, "decay of each agent's running mean reward, subtracted first (RAE); 0: off"
    )
    reward_bias: float = _number(0.0, *_ANY, "added to each reward")
    reward_scale: float = _number(1.0, *_ANY, "multiplies each reward, after the bias")
    reward_clip: float = _number(
        math.inf, 0.0, math.inf, "largest absolute reward after scaling; ∞: off"
    )
    reward_mean: str = _choice("none", LEVELS, "rewards whose mean is subtracted")
    reward_std: str = _choice(
        "none", (*LEVELS, "mean"), "rewards whose deviation, or mean (MaxRL), divides"
    )
    leave_one_out: bool = option(False, "subtract from each reward the mean of the others")
    peers: str = _choice(
        "prompt", ("prompt", "agent", "turn"), "a group: all of a prompt | one agent's | one turn's"
    )
    kl_anchor: str = _choice(
        "reference", ("reference", "teacher"),
        "policy that KL pulls to: config.reference | a served teacher (config.teacher)",
    )  # fmt: skip
    kl_placement: str = _choice(
        "none", ("none", "reward", "loss"), "none | penalty per token before GAE | loss term"
    )
    kl_estimator: str = _choice("k3", _KS, "estimator of KL from one token")
    kl_coefficient: float = _number(0.0, 0.0, math.inf, "β; the initial one if it adapts")
    kl_target: float = _number(0.0, 0.0, math.inf, "KL that β adapts to, nats a token; 0: fixed β")
    kl_horizon: int = _number(10_000, 1, math.inf, "trajectories in which β may change by a fifth")
    critic: bool = option(False, "train a network for values (config.critic); else they are 0")
    bootstrap_truncated: bool = option(
        True, "value the missing rest of trajectories cut off by length with the critic"
    )
    advantage: str = _choice(
        "gae", ("gae",), "estimator of each token's advantage; or your own, FILE.py:name"
    )
    gamma: float = _number(1.0, 0.0, 1.0, "discount")
    lam: float = _number(1.0, 0.0, 1.0, "λ of GAE, which mixes returns of different lengths")
    advantage_mean: str = _choice("none", LEVELS, "trained tokens whose mean is subtracted")
    advantage_std: str = _choice("none", LEVELS, "trained tokens whose deviation divides")
    proximal: str = _choice(
        "recompute", ("recompute", "loglinear", "behaviour"),
        "the clip's anchor: the policy before the batch's first update, computed | interpolated | "
        "the sampled logprobs (plain PPO)",
    )  # fmt: skip
    decoupled: bool = option(True, "weigh the loss by sg(exp(proximal − behaviour))")
    weight_level: str = _choice("token", ("token", "sequence"), "whose statistic has bounds")
    weight_action: str = _choice(
        "mask", ("none", "mask", "truncate"), "what happens to weights out of bounds"
    )
    weight_statistic: str = _choice("ratio", ("ratio", *_KS), "statistic of proximal / behaviour")
    weight_aggregate: str = _choice(
        "mean", ("mean", "sum", "max"), "how tokens' statistics make the sequence's"
    )
    weight_upper: float = _number(5.0, *_ANY, "upper bound of the statistic")
    weight_lower: float = _number(-math.inf, *_ANY, "lower bound of the statistic")
    sequence_upper: float = _number(
        math.inf, 1.0, math.inf,
        "drop sequences whose geometric mean of proximal / behaviour is above this",
    )  # fmt: skip
    sequence_lower: float = _number(0.0, 0.0, 1.0, "drop sequences where it is below this")
    veto: float = _number(
        0.0, 0.0, 1.0, "drop sequences with a proximal / behaviour of a token below this; 0: off"
    )
    off_policy_limit: float = _number(
        0.0, 0.0, math.inf,
        "where A is negative, drop sequences farther from behaviour, nats a token (OPSM); 0: off",
    )  # fmt: skip
    second_moment_clip: float = _number(
        0.0, 0.0, math.inf,
        "M2PO: the clip widens until the mean of capped (proximal − behaviour)² reaches this, "
        "nats²; 0: off",
    )  # fmt: skip
    second_moment: float = _number(
        0.0, 0.0, math.inf,
        "AReaL's M2PO: limit on the mean of (behaviour − proximal)² of all tokens, nats²; 0: off",
    )  # fmt: skip
    loss: str = _choice(
        "clip", tuple(LOSS_KINDS),
        "loss of a token, a demonstration or a pair; or your own, FILE.py:name",
    )  # fmt: skip
    loss_kwargs: str = option("", "keyword arguments of your own loss, a JSON object")
    ratio_level: str = _choice(
        "token",
        ("token", "sequence", "sequence_token"),
        "ratios of tokens | the geometric mean of the sequence's | that, with the token's gradient",
    )
    clip_low: float = _number(0.2, 0.0, 1.0, "ratios are clipped below 1 − clip_low; or DPPO's δ")
    clip_high: float = _number(
        0.2, 0.0, math.inf, "ratios are clipped above 1 + clip_high; or DPPO's δ where A > 0"
    )
    divergence: str = _choice("tv", ("tv", "kl"), "divergence that bounds DPPO's trust region")
    dual_clip: float = _number(
        0.0, 0.0, math.inf, "c > 1: at most −c·A where the advantage is negative; 0: off"
    )
    sapo_positive: float = _number(1.0, 1e-3, math.inf, "τ of SAPO's gate where A > 0")
    sapo_negative: float = _number(1.05, 1e-3, math.inf, "τ of SAPO's gate elsewhere")
    value_clip: float = _number(
        0.5, 0.0, math.inf, "largest change of a value that its loss follows; 0: off"
    )
    pair_beta: float = _number(0.1, 1e-6, math.inf, "β of DPO and IPO")
    entropy_coefficient: float = _number(0.0, 0.0, math.inf, "weight of the entropy bonus")
    reduction: str = _choice("token_mean", REDUCTIONS, "how token losses become one number")
    constant_length: int = _number(
        0, 1, math.inf, "tokens, for reduction=constant; 0: sampling.max_new_tokens"
    )

    @property
    def kind(self) -> LossKind:
        return OWN_LOSS if self.loss_function else choose("loss", self.loss, LOSS_KINDS)

    @property
    def data(self) -> str:
        """Training data: rollouts | demonstrations | pairs."""
        return self.kind.data

    @property
    def kl_in_reward(self) -> bool:
        """Whether KL is a penalty in the reward."""
        places = {"none": False, "reward": True, "loss": False}
        return choose("kl_placement", self.kl_placement, places)

    @property
    def kl_in_loss(self) -> bool:
        """Whether KL is a term of the loss."""
        places = {"none": False, "reward": False, "loss": True}
        return choose("kl_placement", self.kl_placement, places)

    @property
    def needs_anchor(self) -> bool:
        """Whether the logprobs of another policy are needed, as `reference_logprobs`."""
        return self.kl_in_reward or self.kl_in_loss or self.kind.reference

    @property
    def needs_reference(self) -> bool:
        """Whether the trainer must keep that policy as a reference; a teacher is served."""
        kept = choose("kl_anchor", self.kl_anchor, {"reference": True, "teacher": False})
        return self.needs_anchor and kept

    def needs_proximal_pass(self, minibatches: int) -> bool:
        """Return whether a forward pass must precede the first of `minibatches` updates."""
        if self.second_moment_clip:
            return True
        if self.data != "rollouts" or self.proximal != "recompute":
            return False
        # With one minibatch the proximal policy is the target before its update: the loss has it.
        early = self.kl_in_reward or self.second_moment > 0
        return early or (minibatches > 1 and self.kind.ratio)


FIELDS = options_of(Algorithm)
CHOICES: dict[str, tuple[str, ...]] = {
    n: f.metadata["values"] for n, f in FIELDS.items() if isinstance(f.metadata["values"], tuple)
}


def check_choices(algorithm: Algorithm) -> None:
    """Raise UserError for a value that is not among its field's choices."""
    for name, choices in CHOICES.items():
        if getattr(algorithm, f"{name}_function", None) is None:
            choose(name, getattr(algorithm, name), dict.fromkeys(choices))
    text = algorithm.loss_kwargs
    try:
        good = isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        good = False
    if not good:
        raise UserError(
            f"algorithm.loss_kwargs={text!r} is no JSON object; write '{{\"name\": 1.5}}'"
        )


def check_ranges(algorithm: Algorithm) -> None:
    """Raise UserError for a number outside its field's range, or NaN."""
    for name, field in FIELDS.items():
        if name not in CHOICES:
            check_value(f"algorithm.{name}", getattr(algorithm, name), field.metadata["values"])
