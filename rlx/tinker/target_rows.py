"""Data of a request, checked and packed into rows for the decoder, and their losses.

The losses are written once for JAX's arrays and torch's tensors. `forward_backward` sums them over
targets, without a mean. Formulas: https://tinker-docs.thinkingmachines.ai/losses

Shapes: N tokens of a datum, K targets a token, B rows of a microbatch, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.algorithms.array_ops import Array, ops_of
from rlx.base import UserError, unknown
from rlx.model.model_config import ModelConfig
from rlx.train import packing

NO_TARGET = -1  # in `targets`, where there is none
# Inputs that may be missing; others that a loss reads must be given for every target.
DEFAULTS = {"weights": 1.0, "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED, _CLIPS = ("logprobs", "advantages"), ("clip_low_threshold", "clip_high_threshold")
LOSSES: dict[str, tuple[str, ...]] = {  # name → the inputs that it reads
    "cross_entropy": ("weights",),
    "importance_sampling": _SAMPLED,
    "ppo": (*_SAMPLED, *_CLIPS),
    "cispo": (*_SAMPLED, *_CLIPS),
}


@dataclass(frozen=True, eq=False)
class TargetDatum:
    """A sequence that the model reads, what should follow each token, and inputs of the loss."""

    tokens: np.ndarray  # [N] int32
    targets: np.ndarray  # [N] or [N, K] int32; the client has shifted them
    inputs: Mapping[str, np.ndarray]  # float32, each of the targets' shape

    def mistake(self, loss: str, model: ModelConfig) -> str:
        """Return why this cannot be computed, or ""."""
        size, names, ids = len(self.tokens), LOSSES[loss], self.targets
        if not 0 < size <= model.max_position:
            return f"{size} tokens, and the model takes 1 to {model.max_position}"
        if ids.ndim not in (1, 2) or len(ids) != size or not ids.size:
            return f"target_tokens of shape {ids.shape} for {size} tokens"
        every = np.append(self.tokens, ids)
        if every.min() < 0 or every.max() >= model.vocab_size:
            return f"a token out of the vocabulary of {model.vocab_size}"
        if wrong := (set(self.inputs) ^ set(names)) - (set(DEFAULTS) & set(names)):
            return f"unknown or missing {min(wrong)}; {loss} reads {', '.join(names)}"
        for name, values in self.inputs.items():
            if values.shape != ids.shape or not np.isfinite(values).all():
                return f"{name} of shape {values.shape} for {ids.shape}, or not finite numbers"
        return ""


@dataclass(frozen=True, eq=False)
class TargetRows:
    """Microbatches of some data, and the place of each datum in them."""

    # [B, T] int32 tokens, positions, segment_ids (0 is padding); [B, T, K] int32 targets, float32
    # inputs of the loss
    batches: list[dict[str, np.ndarray]]
    places: list[tuple[Any, tuple[int, ...]]]  # of each datum: index in all tokens, shape

    def of_data(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return [B, T, K] arrays of the microbatches as arrays of the data's own shapes."""
        flat = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
        return [flat[at].reshape(shape) for at, shape in self.places]


def pack(
    data: Sequence[TargetDatum], loss: str, options: Mapping[str, Any], model: ModelConfig,
    budget: int,
) -> TargetRows:  # fmt: skip
    """Pack data into microbatches of `budget` tokens, or of the longest; UserError if unfit."""
    if loss not in LOSSES:
        raise unknown("loss_fn", loss, LOSSES)
    for name, value in options.items():
        if name not in LOSSES[loss] or name not in DEFAULTS or not isinstance(value, float):
            raise UserError(f"loss_fn_config of {loss} has no {name}={value!r}; leave it out")
    for index, datum in enumerate(data):
        if wrong := datum.mistake(loss, model):
            raise UserError(f"datum {index} has {wrong}; correct it and send it again")
    if not data:
        raise UserError("the request has no data; give at least one datum")
    sizes = np.array([len(d.tokens) for d in data])
    budget = max(budget, int(sizes.max()))
    plan = packing.plan(sizes, budget, [64 << n for n in range(20) if 64 << n <= budget])
    width = packing.power_of_two(max(d.targets.size // len(d.tokens) for d in data), 1)
    lengths = np.concatenate([[length] * count for count, length in plan.shapes])
    total, fills = int(lengths.sum()), {**DEFAULTS, **options}
    flat = {k: np.zeros(total, np.int32) for k in ("tokens", "positions", "segment_ids")}
    flat["targets"] = np.full((total, width), NO_TARGET, np.int32)
    for name in LOSSES[loss]:
        flat[name] = np.full((total, width), fills.get(name, 0.0), np.float32)
    free, used, places = np.cumsum(lengths) - lengths, np.zeros(len(lengths), int), []
    for datum, size, row in zip(data, sizes, plan.rows, strict=True):
        at: Any = slice(free[row], free[row] + size)
        free[row], used[row] = free[row] + size, used[row] + 1
        flat["tokens"][at], flat["positions"][at] = datum.tokens, np.arange(size)
        flat["segment_ids"][at] = used[row]
        at = at, slice(datum.targets.size // size)
        for name, values in (("targets", datum.targets), *datum.inputs.items()):
            flat[name][at] = values.reshape(size, -1)
        places.append((at, datum.targets.shape))
    batches, end = [], 0
    for shape in plan.shapes:
        span = slice(end, end := end + shape[0] * shape[1])
        batches.append({k: x[span].reshape(*shape, *x.shape[1:]) for k, x in flat.items()})
    return TargetRows(batches, places)


def loss_of(name: str, p: Array, inputs: Mapping[str, Array]) -> Array:
    """Return the loss of each target, with r = exp(p − logprobs) and c = clip(r, low, high).

        cross_entropy        −weights·p
        importance_sampling  −r·advantages
        ppo                  −min(r·advantages, c·advantages)    (arXiv 1707.06347, eq. 7)
        cispo                −c·advantages·p, c without gradient (arXiv 2506.13585, eq. 4)

    Args:
      p: [...] float32, the model's log-probabilities of the targets.
      inputs: those of the loss, of the same shape; the policy that sampled gave `logprobs`.
    """
    if name == "cross_entropy":
        return -inputs["weights"] * p
    ops, advantages = ops_of(p), inputs["advantages"]
    ratio = ops.lib.exp(p - inputs["logprobs"])
    if name == "importance_sampling":
        return -ratio * advantages
    clipped = ops.lib.clip(ratio, *(inputs[end] for end in _CLIPS))
    if name == "ppo":
        return -ops.lib.minimum(ratio * advantages, clipped * advantages)
    return -ops.frozen(clipped) * advantages * p
