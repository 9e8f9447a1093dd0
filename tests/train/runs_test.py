"""A run counts once in its group and in the loss, in however many rows its completions are."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rlx.algorithms.presets import PRESETS, resolve
from rlx.base import Group, Trajectory
from rlx.train import objective, packing

WORTH = [[1.0, 0.25, 0.5], [0.0], [2.0, 0.5], [0.75, 0.75, 0.75, 0.0]]  # turns of four runs


def turn(number, rng):
    """Tokens of a turn: two asked, some said; the first token said is the turn's own number."""
    said = int(rng.integers(1, 5))
    return [7, 7, number, *[8] * (said - 1)], [False, False, *[True] * said]


def row(turns, rewards, name):
    """One trajectory of these turns."""
    tokens = np.array([t for own, _ in turns for t in own], np.int32)
    mask = np.array([m for _, own in turns for m in own])
    ids = np.repeat(np.arange(len(turns)), [len(own) for own, _ in turns]).astype(np.int32)
    behaviour = np.where(mask, -1.0, 0.0).astype(np.float32)
    return Trajectory(
        tokens, mask, behaviour, np.where(mask, 0, -1).astype(np.int32), rewards[0], "stop", name,
        turn_ids=ids, turn_rewards=tuple(rewards) if len(set(rewards)) > 1 else (),
    )  # fmt: skip


def groups(form, worth=WORTH):
    """Two groups of two runs: a row for each run (`tree`) or for each turn (`individual`)."""
    rng, found = np.random.default_rng(0), []
    for run, rewards in enumerate(worth):
        turns = [turn(100 * run + k, rng) for k in range(len(rewards))]
        name = f"{run // 2}.{run}"
        found.append({
            "tree": lambda: [row(turns, rewards, name)],  # noqa: B023
            "individual": lambda: [row([turns[k]], [r], f"{name}.{k}")  # noqa: B023
                                   for k, r in enumerate(rewards)],  # noqa: B023
        }[form]())  # fmt: skip
    return [Group(g, tuple(found[2 * g] + found[2 * g + 1])) for g in range(2)]


def prepared(batch, algorithm, library=jnp.asarray):
    """Advantage and loss weight of each trained token, and which begin a completion."""
    flat = packing.flatten(batch)
    arrays = {name: library(values) for name, values in flat.arrays().items()}
    arrays["proximal_logprobs"] = arrays["behaviour_logprobs"]
    parts = packing.minibatch_ids(flat, 1)
    minibatch_of = library(flat.minibatch_of(parts))
    step, beta = library(np.int32(0)), library(np.float32(0))
    out, ((denominator, _),), _ = objective.prepare(arrays, minibatch_of, step, beta, 1, algorithm)
    trained = flat.tokens["loss_mask"]
    weights = np.asarray(out["loss_weights"])[trained] / float(denominator)
    first = np.isin(flat.tokens["tokens"][trained], [7, 8], invert=True)
    return np.asarray(out["advantages"])[trained], weights, first


def preset(name, **fields):
    return replace(resolve({"preset": name}, 100), **fields)


ROLLOUTS = [n for n, a in PRESETS.items() if a.data == "rollouts" and a.kl_anchor == "reference"
            and not a.kl_in_reward and not a.overlong_buffer]  # fmt: skip


@pytest.mark.parametrize("name", ROLLOUTS)
def test_the_rows_of_a_run_change_nothing(name):
    algorithm = preset(name)
    one, other = (prepared(groups(form), algorithm) for form in ("tree", "individual"))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    three = prepared(groups("tree"), algorithm, torch.tensor)
    for a, b in zip(one, three, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_group_statistics_are_those_of_runs(leave_one_out):
    std = "none" if leave_one_out else "group"
    algorithm = preset("grpo", leave_one_out=leave_one_out, reward_std=std)
    advantages, weights, first = prepared(groups("individual"), algorithm)
    want = []
    for pair in (WORTH[:2], WORTH[2:]):
        means = [np.mean(run) for run in pair]
        centre = np.mean(means)
        spread = np.sqrt(sum(np.mean((np.array(run) - centre) ** 2) for run in pair) / (2 - 1))
        for index, run in enumerate(pair):
            if leave_one_out:
                want += [r - means[1 - index] for r in run]
            else:
                want += [(r - centre) / (spread + 1e-5) for r in run]
    np.testing.assert_allclose(advantages[first], want, rtol=1e-5)
    assert weights.sum() == pytest.approx(1.0)  # sequence_mean_token_mean, over runs
    sizes = np.diff(np.flatnonzero(first), append=len(first))
    owner = np.repeat([0, 0, 0, 1, 2, 2, 3, 3, 3, 3], sizes)
    np.testing.assert_allclose(np.bincount(owner, weights), 0.25, rtol=1e-5)
