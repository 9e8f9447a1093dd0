"""Optimizers by name, in optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlx.train.optimizer_options import OptimizerOptions, rate_at

Schedule = Callable[[Any], Any]

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
    """Return the learning rate by update, as `rate_at` has it: of a host or device integer."""
    return lambda updates: rate_at(options, total_steps, updates, jnp)


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
