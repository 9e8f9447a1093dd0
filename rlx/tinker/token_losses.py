"""Losses of Tinker's API, written once for JAX's arrays and torch's tensors.

`forward_backward` sums them over targets, without a mean. Formulas:
https://tinker-docs.thinkingmachines.ai/losses
"""

from collections.abc import Mapping

from rlx.algorithms.array_ops import Array, ops_of

# Inputs that may be missing; others that a loss reads must be given for every target.
DEFAULTS = {"weights": 1.0, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED, _CLIPS = ("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold")
LOSSES: dict[str, tuple[str, ...]] = {  # name → the inputs that it reads
    "cross_entropy": ("weights",),
    "importance_sampling": _SAMPLED,
    "ppo": (*_SAMPLED, *_CLIPS),
    "cispo": (*_SAMPLED, *_CLIPS),
}


def loss_of(name: str, p: Array, given: Mapping[str, Array]) -> Array:
    """Return the loss of each target, with r = exp(p − logprobs) and c = clip(r, low, high).

        cross_entropy        −weights·p
        importance_sampling  −r·advantages
        ppo                  −min(r·advantages, c·advantages)    (arXiv 1707.06347, eq. 7)
        cispo                −c·advantages·p, c without gradient (arXiv 2506.13585, eq. 4)

    Args:
      p: [...] float32, the model's log-probabilities of the targets.
      given: inputs of the loss, of the same shape; the policy that sampled gave `logprobs`.
    """
    if name == "cross_entropy":
        return -given["weights"] * p
    ops, advantages = ops_of(p), given["advantages"]
    ratio = ops.lib.exp(p - given["logprobs"])
    if name == "importance_sampling":
        return -ratio * advantages
    clipped = ops.lib.clip(ratio, *(given[end] for end in _CLIPS))
    if name == "ppo":
        return -ops.lib.minimum(ratio * advantages, clipped * advantages)
    return -ops.frozen(clipped) * advantages * p
