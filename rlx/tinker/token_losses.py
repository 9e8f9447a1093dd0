"""Losses of Tinker's API, one number for each target, written once for JAX and torch.

p is the model's log-probability of the target, q (`logprobs`) that of the policy which sampled it,
A its `advantages`; all are [...] float32. `forward_backward` sums over targets, without a mean.
Formulas: https://tinker-docs.thinkingmachines.ai/losses
"""

from collections.abc import Callable, Mapping

from rlx.algorithms.array_ops import Array, ops_of

# Inputs that may be missing; others that a loss reads must be given for every target.
DEFAULTS = {"weights": 1.0, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED, _CLIPS = ("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold")
Inputs = Mapping[str, Array]


def cross_entropy(p: Array, given: Inputs) -> Array:
    """Return −weights · p."""
    return -given["weights"] * p


def importance_sampling(p: Array, given: Inputs) -> Array:
    """Return −r · A with r = exp(p − q)."""
    return -_ratio(p, given) * given["advantages"]


def ppo(p: Array, given: Inputs) -> Array:
    """Return −min(r · A, clip(r, low, high) · A) (arXiv 1707.06347, eq. 7)."""
    advantages = given["advantages"]
    return -ops_of(p).lib.minimum(_ratio(p, given) * advantages, _clipped(p, given) * advantages)


def cispo(p: Array, given: Inputs) -> Array:
    """Return −clip(r, low, high) · A · p, the ratio without gradient (arXiv 2506.13585, eq. 4)."""
    return -ops_of(p).frozen(_clipped(p, given)) * given["advantages"] * p


def _ratio(p: Array, given: Inputs) -> Array:
    return ops_of(p).lib.exp(p - given["logprobs"])


def _clipped(p: Array, given: Inputs) -> Array:
    return ops_of(p).lib.clip(_ratio(p, given), *(given[name] for name in _CLIPS))


LOSSES: dict[str, tuple[Callable[[Array, Inputs], Array], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, ("weights",)),  # name → function, the inputs that it reads
    "importance_sampling": (importance_sampling, _SAMPLED),
    "ppo": (ppo, (*_SAMPLED, *_CLIPS)),
    "cispo": (cispo, (*_SAMPLED, *_CLIPS)),
}
