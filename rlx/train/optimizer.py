"""Optimizers and learning-rate schedules by name."""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.config import unknown

Schedule = Callable[[Any], Any]

SCHEDULES: dict[str, Callable[[float, int], Schedule]] = {
    "constant": lambda peak, steps: optax.constant_schedule(peak),
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
}

OPTIMIZERS: dict[str, Callable[[ConfigDict, Schedule], optax.GradientTransformation]] = {
    "adamw": lambda c, rate: optax.adamw(
        rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=decayed
    ),
    "lion": lambda c, rate: optax.lion(
        rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=decayed
    ),
    "sgd": lambda c, rate: optax.sgd(rate),
}


def make_schedule(config: ConfigDict, total_steps: int) -> Schedule:
    """Learning rate by update: linear warm-up from 0, then the named schedule to `total_steps`.

    Args:
      config: `config.optimizer`.
      total_steps: optimizer updates of the whole run.

    Returns:
      A function of the update's index (from 0), host or device integer. The first update already
      moves: with w warm-up steps it has rate / w.
    """
    if config.schedule not in SCHEDULES:
        raise unknown("optimizer.schedule", config.schedule, SCHEDULES)
    warmup = config.warmup_steps
    main = SCHEDULES[config.schedule](config.learning_rate, max(total_steps - warmup, 1))
    if not warmup:
        return main
    ramp = optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, warmup - 1)
    return optax.join_schedules([ramp, main], [warmup])


def decayed(params: Any) -> Any:
    """Which parameters weight decay pulls on: matrices, not norms and biases (bool pytree)."""

    def is_matrix(path, _):
        name = path[-1].key
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(config: ConfigDict, total_steps: int) -> optax.GradientTransformation:
    """The optimizer of `config.optimizer`; clipping is the update's, which knows the norm already.

    Args:
      config: name, learning_rate, schedule, warmup_steps, b1, b2, eps, weight_decay, clip_norm.
      total_steps: optimizer updates of the whole run, for the schedule.

    Raises:
      UserError: unknown name or schedule, or a value out of range.
    """
    if config.name not in OPTIMIZERS:
        raise unknown("optimizer.name", config.name, OPTIMIZERS)
    for key in ("learning_rate", "warmup_steps", "weight_decay", "clip_norm", "eps"):
        if not 0 <= config[key] < math.inf:
            raise UserError(f"optimizer.{key}={config[key]} must be finite and 0 or more")
    for key in ("b1", "b2"):
        if not 0 <= config[key] < 1:
            raise UserError(f"optimizer.{key}={config[key]} must be in [0, 1)")
    return OPTIMIZERS[config.name](config, make_schedule(config, total_steps))
