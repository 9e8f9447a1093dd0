"""A user's own loss stands where one of the table stands, in JAX and in torch."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rlx import config as config_lib
from rlx.algorithms import advantages, losses, presets, surrogates
from rlx.base import UserError

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
GRPO = presets.PRESETS["grpo"]


def own(function, **fields):
    """A run's algorithm, as the loader would have it for `--config.algorithm.loss=mine.py:x`."""
    config = config_lib.default().algorithm
    config.loss = "mine.py:x"
    for name, value in fields.items():
        config[name] = value
    return presets.resolve(config, 20, find=lambda key, name, table: function)


def batch_of(cases, seed=3):
    rows, _ = cases.packed(cases.random(seed, empty=False), "proximal_logprobs")
    rows["loss_weights"] = rows["loss_mask"].astype(np.float32)
    return rows


def trained(rows, algorithm):
    def loss(target):
        return losses.policy_loss(target, rows["entropy"], rows, algorithm)

    (value, stats), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(rows["target"]))
    return value, stats, slope


def trained_in_torch(rows, algorithm):
    tensors = {name: torch.from_numpy(np.asarray(x)) for name, x in rows.items()}
    target = tensors["target"].requires_grad_()
    value, stats = losses.policy_loss(target, tensors["entropy"], tensors, algorithm)
    value.backward()
    return value.detach(), stats, target.grad


def test_a_copy_of_a_built_in_loss_is_that_loss_bitwise(cases):
    rows = batch_of(cases)
    want = trained(rows, GRPO)
    got = trained(
        rows, own(lambda inputs, algorithm: surrogates.clipped_surrogate(inputs, algorithm))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_pages_cispo_is_the_built_in_one_bitwise(cases):
    """docs/extend.md: a file of at most 20 lines, and no line of rlx."""
    code = re.search(r"^```python\n# cispo.py\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    assert len(code.splitlines()) < 20
    exec(code, names := {})
    for fields in ({}, {"decoupled": False}):
        theirs = own(names["cispo"], loss_kwargs='{"largest": 1.5}', **fields)
        ours = dataclasses.replace(
            theirs, loss="cispo", loss_function=None, clip_low=1.0, clip_high=0.5
        )
        rows = batch_of(cases)
        got, want = trained(rows, theirs), trained(rows, ours)
        assert float(got[1].pop("ratio_square")) > 0
        assert 0 < float(got[1]["actor_clip_ratio"]) < rows["loss_mask"].sum()
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("run", [trained, trained_in_torch])
def test_every_input_reaches_a_loss_and_its_statistics_become_the_steps(run, cases):
    rows = batch_of(cases)

    def loss(inputs, algorithm, *, scale):
        total = inputs.target + inputs.proximal + inputs.behaviour + inputs.log_ratio
        total = total + inputs.advantage + inputs.entropy + inputs.segment_ids
        return scale * total, {"positive": inputs.advantage > 0, "total": total}

    value, stats, slope = run(rows, own(loss, loss_kwargs='{"scale": 0.5}', decoupled=False))
    mask = rows["loss_mask"]
    target, behaviour = rows["target"], rows["behaviour_logprobs"]
    want = 2 * target + behaviour + rows["advantages"] + rows["entropy"] + rows["segment_ids"]
    np.testing.assert_allclose(stats["total"], want[mask].sum(), rtol=1e-5)
    np.testing.assert_allclose(value, 0.5 * want[mask].sum(), rtol=1e-5)
    np.testing.assert_allclose(stats["positive"], (rows["advantages"][mask] > 0).sum())
    np.testing.assert_allclose(slope, np.where(mask, 1.0, 0.0))
    metrics = losses.summarise({k: float(v) for k, v in stats.items()}, 1.0)
    assert metrics["positive"] == float(stats["positive"]) / mask.sum()


@pytest.mark.parametrize(("run", "lib"), [(trained, jnp), (trained_in_torch, torch)])
def test_tokens_whose_loss_is_not_finite_are_left_out_and_counted(run, lib, cases):
    rows = batch_of(cases)
    row, column = np.argwhere(rows["loss_mask"])[4]
    rows["advantages"][row, column] = 777.0

    def loss(inputs, algorithm):
        return lib.where(inputs.advantage == 777.0, lib.nan, 2.0 * inputs.target), {}

    value, stats, slope = run(rows, own(loss, weight_action="none", decoupled=False))
    kept = rows["loss_mask"].copy()
    kept[row, column] = False
    assert float(stats["n_nonfinite_tokens"]) == 1
    assert float(stats["n_valid_tokens"]) == kept.sum()
    np.testing.assert_allclose(value, 2 * rows["target"][kept].sum(), rtol=1e-5)
    np.testing.assert_allclose(stats["advantage"], rows["advantages"][kept].sum(), rtol=1e-4)
    np.testing.assert_array_equal(slope, np.where(kept, 2.0, 0.0))


WRONG = {
    "one value": (lambda i, a: i.target, r"returned one value; return \(loss, \{name: statistic\}"),
    "three": (lambda i, a: (i.target, {}, 1), "returned 3 values"),
    "a sum": (lambda i, a: (i.target.sum(), {}), r"'loss' of float32 \[\]; wanted one number"),
    "integers": (lambda i, a: (i.segment_ids, {}), r"'loss' of int32 \[8, 64\]; wanted"),
    "a number": (lambda i, a: (1.0, {}), r"'loss' of float \[\]"),
    "statistic": (lambda i, a: (i.target, {"x": i.target[0]}), r"'x' of float32 \[64\]"),
    "taken": (lambda i, a: (i.target, {"entropy": i.target}), "'entropy', which is rlx's own"),
    "truth": (lambda i, a: (i.mask, {}), r"'loss' of bool \[8, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("run", [trained, trained_in_torch])
def test_what_is_no_loss_is_told_with_the_users_file(run, what, cases):
    function, words = WRONG[what]
    with pytest.raises(UserError, match=f"^algorithm.loss.*{words}") as raised:
        run(batch_of(cases), own(function))
    assert "\n" not in str(raised.value)
    if what != "taken":
        assert f"({__file__}, line {function.__code__.co_firstlineno})" in str(raised.value)


@pytest.mark.parametrize("run", [trained, trained_in_torch])
def test_a_name_whose_function_was_not_loaded_trains_nothing(run, cases):
    with pytest.raises(UserError, match=r"unknown algorithm.loss 'mine.py:x'"):
        run(batch_of(cases), dataclasses.replace(GRPO, loss="mine.py:x"))


def test_an_algorithm_with_the_same_function_is_the_same_static_argument():
    function = lambda inputs, algorithm: (inputs.target, {})  # noqa: E731
    assert own(function) == own(function)
    assert hash(own(function)) == hash(own(function))
    assert own(function).kind.ratio
    assert own(function).needs_proximal_pass(2)


def test_any_field_may_be_read_by_a_loss_of_ones_own():
    algorithm = own(lambda i, a: (i.target, {}), clip_high=0.3, sapo_positive=2.0, dual_clip=3.0)
    assert algorithm.clip_high == 0.3
    with pytest.raises(UserError, match=r"pair_beta=0.3 has no effect"):
        own(lambda i, a: (i.target, {}), pair_beta=0.3)


@pytest.mark.parametrize("text", ["[1]", "{", "largest=2"])
def test_arguments_that_are_no_json_object_are_an_error(text):
    with pytest.raises(UserError, match="is no JSON object; write"):
        own(lambda i, a: (i.target, {}), loss_kwargs=text)


def test_what_is_no_function_is_an_error():
    with pytest.raises(UserError, match=r"algorithm\.loss=mine\.py:x is no function, got 3"):
        own(3)


def own_advantage(function):
    config = config_lib.default().algorithm
    config.advantage = "mine.py:x"
    return presets.resolve(config, 20, find=lambda key, name, table: function)


def test_a_copy_of_the_built_in_advantage_is_that_advantage_bitwise(cases):
    flat = jax.tree.map(jnp.asarray, cases.flat(cases.random(3), "values"))
    want = advantages.advantages(flat, GRPO)
    got = advantages.advantages(flat, own_advantage(lambda i, a: advantages.gae_advantage(i, a)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("lib", [jnp, torch])
def test_tokens_whose_advantage_is_not_finite_leave_the_loss_and_are_counted(lib, cases):
    batch = cases.random(3, empty=False)
    flat, make = cases.flat(batch), jnp.asarray if lib is jnp else torch.from_numpy
    spot = int(np.flatnonzero(flat["loss_mask"])[2])
    bad = np.where(np.arange(cases.flat_size) == spot, np.nan, 2.0).astype(np.float32)
    algorithm = own_advantage(lambda inputs, algorithm: make(bad))
    compute = advantages.advantages
    out = compute({name: make(np.asarray(x)) for name, x in flat.items()}, algorithm)
    want = np.where(flat["loss_mask"], bad, 0.0)
    np.testing.assert_array_equal(np.asarray(out["advantages"]), want)
    rows = batch_of(cases)
    row, column = np.argwhere(rows["loss_mask"])[4]
    rows["advantages"][row, column] = np.nan
    _, stats, slope = (trained if lib is jnp else trained_in_torch)(rows, algorithm)
    assert float(stats["n_nonfinite_tokens"]) == 1
    assert np.isfinite(np.asarray(slope)).all()


def test_an_advantage_whose_function_was_not_loaded_computes_nothing(cases):
    with pytest.raises(UserError, match=r"unknown algorithm.advantage 'mine.py:x'"):
        advantages.advantages(
            jax.tree.map(jnp.asarray, cases.flat(cases.random(3))),
            dataclasses.replace(GRPO, advantage="mine.py:x"),
        )
