"""Schedules at their corners, decay only on matrices, and errors that name the key."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from rlx import config as config_lib
from rlx.base import UserError
from rlx.train import learner
from rlx.train.train_options import OptimizerOptions, rate_at


def options(**overrides):
    config = {**config_lib.default().optimizer, "learning_rate": 1.0, **overrides}
    return OptimizerOptions(**config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 104: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 54: 0.5, 104: 0.0, 200: 0.0}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 54: 0.5, 104: 0.0, 200: 0.0}),
    ],
)
def test_schedules(name, expected):
    rate = partial(rate_at, options(schedule=name, warmup_steps=4), 104, lib=jnp)
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(value, abs=1e-6), step


@pytest.mark.parametrize(("name", "size"), [("adamw", 1.0), ("lion", 1.0), ("sgd", 7.0)])
def test_the_first_step_is_the_papers(name, size):
    """m̂/√v̂ and Lion's sign are sign(g) at the first step, plus decay on matrices only."""
    own = options(name=name, weight_decay=0.1, learning_rate=0.5, eps=0.0)
    tx = learner.make_optimizer(own, 10)
    params = {
        "embed": jnp.full((2, 2), 3.0),
        "final_norm": jnp.full(2, 3.0),
        "layers": {"q_bias": jnp.full((2, 2), 3.0), "input_norm": jnp.full((2, 2), 3.0)},
    }
    grads = {
        "embed": jnp.full((2, 2), -7.0),
        "final_norm": jnp.full(2, 7.0),
        "layers": {"q_bias": jnp.full((2, 2), 7.0), "input_norm": jnp.full((2, 2), 7.0)},
    }
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["embed"], 0.5 * size - 0.5 * 0.1 * 3.0, rtol=1e-5)
    for leaf in (updates["final_norm"], *updates["layers"].values()):
        np.testing.assert_allclose(leaf, -0.5 * size, rtol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "adamm", "did you mean 'adamw'"),
        ("learning_rate", float("nan"), "learning_rate=nan must be finite and 0 or more"),
        ("b2", 1.0, r"b2=1 must be in \[0, 1\)"),
    ],
)
def test_errors_name_the_key(key, value, message):
    with pytest.raises(UserError, match=message):
        options(**{key: value})
