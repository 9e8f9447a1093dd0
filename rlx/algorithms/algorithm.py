"""`Algorithm`: one algorithm as data, each field declared once with type, choices, range and help.

Config keys, checks and docs/algorithms.md derive from these declarations. No JAX or torch here.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rlx.base import UserError, unknown
from rlx.option import option, options_of

T = TypeVar("T")

LEVELS = ("group", "batch", "none")
REDUCTIONS = (
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant", "prompt_mean",
)  # fmt: skip


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
        remedy = "give a reference model or a teacher, or set algorithm.kl_placement=none"
        raise UserError(f"a KL term needs reference_logprobs and the batch has none; {remedy}")
    return batch["reference_logprobs"]


_KS = ("k1", "k2", "k3")


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
    overlong_buffer: float = option(
        0.0, "tokens of penalty zone before the limit; below 1: share of it; 0: off", "[0, inf]"
    )
    overlong_limit: int = option(0, "tokens; 0: sampling.max_new_tokens", "[0, inf]")
    overlong_factor: float = option(1.0, "penalty at the limit", "[0, inf]")
    running_mean: float = option(
        0.0, "decay of each agent's running mean reward, subtracted first (RAE); 0: off", "[0, 1]"
    )
    reward_bias: float = option(0.0, "added to each reward", "[-inf, inf]")
    reward_scale: float = option(1.0, "multiplies each reward, after the bias", "[-inf, inf]")
    reward_clip: float = option(
        math.inf, "largest absolute reward after scaling; ∞: off", "[0, inf]"
    )
    reward_mean: str = option("none", "rewards whose mean is subtracted", LEVELS)
    reward_std: str = option(
        "none", "rewards whose deviation, or mean (MaxRL), divides", (*LEVELS, "mean")
    )
    leave_one_out: bool = option(False, "subtract from each reward the mean of the others")
    peers: str = option(
        "prompt", "a group: all of a prompt | one agent's | one turn's", ("prompt", "agent", "turn")
    )
    kl_anchor: str = option(
        "reference",
        "policy that KL pulls to: config.reference | a served teacher (config.teacher)",
        ("reference", "teacher"),
    )
    kl_placement: str = option(
        "none", "none | penalty per token before GAE | loss term", ("none", "reward", "loss")
    )
    kl_estimator: str = option("k3", "estimator of KL from one token", _KS)
    kl_coefficient: float = option(0.0, "β; the initial one if it adapts", "[0, inf]")
    kl_target: float = option(0.0, "KL that β adapts to, nats a token; 0: fixed β", "[0, inf]")
    kl_horizon: int = option(10_000, "trajectories in which β may change by a fifth", "[1, inf]")
    critic: bool = option(False, "train a network for values (config.critic); else they are 0")
    bootstrap_truncated: bool = option(
        True, "value the missing rest of trajectories cut off by length with the critic"
    )
    advantage: str = option(
        "gae", "estimator of each token's advantage; or your own, FILE.py:name", ("gae",)
    )
    gamma: float = option(1.0, "discount", "[0, 1]")
    lam: float = option(1.0, "λ of GAE, which mixes returns of different lengths", "[0, 1]")
    advantage_mean: str = option("none", "trained tokens whose mean is subtracted", LEVELS)
    advantage_std: str = option("none", "trained tokens whose deviation divides", LEVELS)
    proximal: str = option(
        "recompute",
        "the clip's anchor: the policy before the batch's first update, computed | interpolated | "
        "the sampled logprobs (plain PPO)",
        ("recompute", "loglinear", "behaviour"),
    )
    decoupled: bool = option(True, "weigh the loss by sg(exp(proximal − behaviour))")
    weight_level: str = option("token", "whose statistic has bounds", ("token", "sequence"))
    weight_action: str = option(
        "mask", "what happens to weights out of bounds", ("none", "mask", "truncate")
    )
    weight_statistic: str = option("ratio", "statistic of proximal / behaviour", ("ratio", *_KS))
    weight_aggregate: str = option(
        "mean", "how tokens' statistics make the sequence's", ("mean", "sum", "max")
    )
    weight_upper: float = option(5.0, "upper bound of the statistic", "[-inf, inf]")
    weight_lower: float = option(-math.inf, "lower bound of the statistic", "[-inf, inf]")
    sequence_upper: float = option(
        math.inf,
        "drop sequences whose geometric mean of proximal / behaviour is above this",
        "[1, inf]",
    )
    sequence_lower: float = option(0.0, "drop sequences where it is below this", "[0, 1]")
    veto: float = option(
        0.0, "drop sequences with a proximal / behaviour of a token below this; 0: off", "[0, 1]"
    )
    off_policy_limit: float = option(
        0.0,
        "where A is negative, drop sequences farther from behaviour, nats a token (OPSM); 0: off",
        "[0, inf]",
    )
    second_moment_clip: float = option(
        0.0,
        "M2PO: the clip widens until the mean of capped (proximal − behaviour)² reaches this, "
        "nats²; 0: off",
        "[0, inf]",
    )
    second_moment: float = option(
        0.0,
        "AReaL's M2PO: limit on the mean of (behaviour − proximal)² of all tokens, nats²; 0: off",
        "[0, inf]",
    )
    loss: str = option(
        "clip",
        "loss of a token, a demonstration or a pair; or your own, FILE.py:name",
        tuple(LOSS_KINDS),
    )
    loss_kwargs: str = option("", "keyword arguments of your own loss, a JSON object")
    ratio_level: str = option(
        "token",
        "ratios of tokens | the geometric mean of the sequence's | that, with the token's gradient",
        ("token", "sequence", "sequence_token"),
    )
    clip_low: float = option(0.2, "ratios are clipped below 1 − clip_low; or DPPO's δ", "[0, 1]")
    clip_high: float = option(
        0.2, "ratios are clipped above 1 + clip_high; or DPPO's δ where A > 0", "[0, inf]"
    )
    divergence: str = option("tv", "divergence that bounds DPPO's trust region", ("tv", "kl"))
    dual_clip: float = option(
        0.0, "c > 1: at most −c·A where the advantage is negative; 0: off", "[0, inf]"
    )
    sapo_positive: float = option(1.0, "τ of SAPO's gate where A > 0", "[0.001, inf]")
    sapo_negative: float = option(1.05, "τ of SAPO's gate elsewhere", "[0.001, inf]")
    value_clip: float = option(
        0.5, "largest change of a value that its loss follows; 0: off", "[0, inf]"
    )
    pair_beta: float = option(0.1, "β of DPO and IPO", "[1e-06, inf]")
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus", "[0, inf]")
    reduction: str = option("token_mean", "how token losses become one number", REDUCTIONS)
    constant_length: int = option(
        0, "tokens, for reduction=constant; 0: sampling.max_new_tokens", "[1, inf]"
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
        local = choose("kl_anchor", self.kl_anchor, {"reference": True, "teacher": False})
        return self.needs_anchor and local

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
        problem = f"algorithm.loss_kwargs={text!r} is no JSON object"
        raise UserError(f"{problem}; write '{{\"name\": 1.5}}'")
