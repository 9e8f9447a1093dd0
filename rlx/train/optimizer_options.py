"""The settings of an optimizer and its learning rate by update: for JAX and torch, with neither."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlx.base import UserError, unknown

OPTIMIZERS = {"adamw": 2, "lion": 1, "sgd": 0}  # float32 numbers that each keeps for a parameter's
# Share of the peak by the part of the run that is done, 0 to 1.
SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "constant": lambda done, lib: 1.0,
    "linear": lambda done, lib: 1.0 - done,
    "cosine": lambda done, lib: 0.5 * (1.0 + lib.cos(math.pi * done)),
}


@dataclass(frozen=True)
class OptimizerOptions:
    """The keys of `config.optimizer`; UserError for an unknown name or a value out of range."""

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


def rate_at(options: OptimizerOptions, total_steps: int, updates: Any, lib: Any) -> Any:
    """Return the learning rate of an update: linear warm-up from 0, then the named schedule.

    The first update already moves: with w warm-up steps it has learning_rate / w.

    Args:
      total_steps: optimizer updates of the whole run, at which the schedule ends.
      updates: index of the update, from 0; a number or an array. lib: numpy, or jax.numpy.
    """
    warmup = options.warmup_steps
    done = lib.clip((updates - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    after = options.learning_rate * SCHEDULES[options.schedule](done, lib)
    if not warmup:
        return after
    ramp = options.learning_rate * (updates + 1) / warmup
    return lib.where(updates < warmup, ramp, after)
