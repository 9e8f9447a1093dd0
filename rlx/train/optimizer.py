"""Optimizers and learning-rate schedules by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from rlx.base import UserError, unknown

Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class OptimizerOptions:
    """The keys of `config.optimizer`.

    Raises:
      UserError: when made with an unknown name or schedule, or a value out of range.
    """

    name: str = "adamw"
    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self):
        if self.name not in OPTIMIZERS:
            raise unknown("optimizer.name", self.name, OPTIMIZERS)
        if self.schedule not in SCHEDULES:
            raise unknown("optimizer.schedule", self.schedule, SCHEDULES)
        for key in ("learning_rate", "warmup_steps", "weight_decay", "clip_norm", "eps"):
            if not 0 <= getattr(self, key) < math.inf:
                raise UserError(
                    f"optimizer.{key}={getattr(self, key)} must be finite and 0 or more"
                )
        for key in ("b1", "b2"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(f"optimizer.{key}={getattr(self, key)} must be in [0, 1)")


SCHEDULES: dict[str, Callable[[float, int], Schedule]] = {
    "constant": lambda peak, steps: optax.constant_schedule(peak),
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
}

OPTIMIZERS: dict[str, Callable[[OptimizerOptions, Schedule], optax.GradientTransformation]] = {
    "adamw": lambda c, rate: optax.adamw(
        rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=decayed
    ),
    "lion": lambda c, rate: optax.lion(
        rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=decayed
    ),
    "sgd": lambda c, rate: optax.sgd(rate),
}


def make_schedule(options: OptimizerOptions, total_steps: int) -> Schedule:
    """Return the learning rate by update: linear warm-up from 0, then the named schedule.

    Args:
      total_steps: optimizer updates of the whole run, at which the schedule ends.

    Returns:
      A function of the update's index (from 0), host or device integer. The first update already
      moves: with w warm-up steps it has rate / w.
    """
    rate, warmup = options.learning_rate, options.warmup_steps
    main = SCHEDULES[options.schedule](rate, max(total_steps - warmup, 1))
    if not warmup:
        return main
    ramp = optax.linear_schedule(rate / warmup, rate, warmup - 1)
    return optax.join_schedules([ramp, main], [warmup])


def decayed(params: Any) -> Any:
    """Return a bool pytree: weight decay pulls on matrices, not on norms and biases."""

    def is_matrix(path, _):
        name = path[-1].key
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(options: OptimizerOptions, total_steps: int) -> optax.GradientTransformation:
    """Return the optimizer; clipping is the update's, which knows the norm already.

    Args:
      total_steps: optimizer updates of the whole run, for the schedule.
    """
    return OPTIMIZERS[options.name](options, make_schedule(options, total_steps))
