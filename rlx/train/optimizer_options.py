"""The settings of an optimizer and its learning rate by update: for JAX and torch, with neither."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlx.option import check_value, option, options_of

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

    name: str = option("adamw", "rule of an update", tuple(OPTIMIZERS))
    learning_rate: float = option(1e-6, "the peak, after warm-up", "[0, inf)")
    schedule: str = option("constant", "of the rate after warm-up", tuple(SCHEDULES))
    warmup_steps: int = option(0, "optimizer updates of linear warm-up from 0", "[0, inf)")
    b1: float = option(0.9, "share of the first moment kept at each update", "[0, 1)")
    b2: float = option(0.999, "share of the second moment kept", "[0, 1)")
    eps: float = option(1e-8, "added to the root of the second moment", "[0, inf)")
    weight_decay: float = option(0.0, "decoupled, of matrices; times the learning rate", "[0, inf)")
    clip_norm: float = option(1.0, "largest norm of the whole gradient; 0: no limit", "[0, inf)")

    def __post_init__(self):
        for name, field in options_of(OptimizerOptions).items():
            check_value(f"optimizer.{name}", getattr(self, name), field.metadata["values"])


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
