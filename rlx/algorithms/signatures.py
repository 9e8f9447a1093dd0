"""Inputs and results of losses on rollouts and of advantages, rlx's own and a user's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlx.algorithms.algorithm import Algorithm
from rlx.algorithms.array_ops import Ops
from rlx.base import UserError, place

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LossInputs(Generic[T]):
    """Inputs of a loss on rollouts: [B, T] arrays, float32 unless noted.

    Where `mask` is false all of them are 0, and the loss is ignored.
    """

    target: T  # log π of the policy that is optimised, nats; differentiated.
    proximal: T  # log π of the clip's anchor, nats.
    behaviour: T  # log π of the policy that sampled the token, nats.
    log_ratio: T  # target − proximal, nats, at `ratio_level`; differentiated.
    advantage: T  # A.
    entropy: T  # of the target policy, nats; differentiated.
    mask: T  # bool; true for trained tokens.
    segment_ids: T  # int32; sequences of each row, from 1; 0: padding.
    ops: Ops
    clip_bound: T | None = None  # nats, ≥ 0; M2PO's bound τ, with second_moment_clip.


@dataclass(frozen=True, slots=True)
class AdvantageInputs(Generic[T]):
    """Inputs of an advantage: N trajectories of a train batch, end to end as F tokens.

    Both axes may be padded. Advantages of tokens that are not trained on are ignored.
    """

    rewards: T  # [N] float32, after overlong penalty, scale and clip.
    group_ids: T  # [N] int; equal for trajectories that are compared (`peers`).
    valid: T  # [N] bool, false at padding.
    truncated: T  # [N] bool, cut off by length.
    sequence_ids: T  # [F] int32, the trajectory of each token; N at padding.
    mask: T  # [F] bool; true for trained tokens.
    kl_rewards: T  # [F] float32, the penalty of KL in the reward; else 0.
    values: T  # [F] float32, the critic's; else 0.
    bootstrap: T  # [N] float32, V after the end of a truncated trajectory; else 0.
    run_ids: T | None = None  # [N] int; equal for the parts of one run; None: each is a run.


def own_advantage(inputs: AdvantageInputs[T], algorithm: Algorithm) -> T:
    """Return a user's advantage of each token, [F] float32; UserError for anything else."""
    function = algorithm.advantage_function
    assert function is not None
    out, what = function(inputs, algorithm), f"algorithm.advantage={algorithm.advantage}"
    check_array(what, "advantage", out, inputs.kl_rewards, function)
    return out


def own_loss(inputs: LossInputs[T], algorithm: Algorithm) -> tuple[T, Mapping[str, T]]:
    """Return a user's loss of each token and its statistics, [B, T] each.

        loss(inputs, algorithm, **loss_kwargs) -> (loss, {name: statistic})

    UserError if the user's function returns anything else.
    """
    function = algorithm.loss_function
    assert function is not None
    out = function(inputs, algorithm, **json.loads(algorithm.loss_kwargs or "{}"))
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], Mapping):
        got = f"{len(out)} values" if isinstance(out, tuple) else "one value"
        raise UserError(
            f"algorithm.loss={algorithm.loss} returned {got}; return (loss, {{name: statistic}}), "
            f"arrays of one number a token {place(function)}"
        )
    for name, x in {**out[1], "loss": out[0]}.items():
        check_array(f"algorithm.loss={algorithm.loss}", name, x, inputs.target, function)
    return out


def check_array(what: str, name: str, x: Any, like: Any, function: Callable) -> None:
    """Raise UserError unless x has the shape of `like` and its dtype; a statistic may be bool."""
    wanted, got = ((str(getattr(a, "dtype", type(a).__name__)).removeprefix("torch."),
                    list(getattr(a, "shape", ()))) for a in (like, x))  # fmt: skip
    if got != wanted and (got != ("bool", wanted[1]) or name in ("loss", "advantage")):
        raise UserError(
            f"{what} returned {name!r} of {got[0]} {got[1]}; wanted one number a token, "
            f"{wanted[0]} {wanted[1]} {place(function)}"
        )
