"""Training on tokens from a truncated distribution: both trainers against a float64 oracle."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from rlx.base import Group
from rlx.model import hf, kept_tokens
from rlx.train.update import JaxUpdate
from rlx_torch.update import TorchUpdate
from tests.fixtures.model import logits_of_rows
from tests.rlx_torch.update_test import groups, options, weights

pytestmark = pytest.mark.torch

VOCAB, TEMPERATURE = 128, 0.8


def masks_of(trajectory, seed, share=0.3):
    """Sets of about `share` of the vocabulary with the token; all for a token in eight."""
    rng, count = np.random.default_rng(seed), len(trajectory.tokens)
    masks = rng.random((count, VOCAB)) < share
    masks[np.arange(count), trajectory.tokens] = True
    masks[rng.random(count) < 0.125] = True
    masks[~trajectory.loss_mask] = True
    return masks


def masked(trajectory, masks):
    data, sizes = kept_tokens.compress(np.packbits(masks, axis=1, bitorder="little"), VOCAB)
    data, sizes = np.frombuffer(data, np.uint8), np.array(sizes, np.int32)
    rng = np.random.default_rng(len(data))  # behaviour: nearly uniform over the kept tokens
    behaviour = rng.normal(-np.log(masks.sum(1)), 0.3) * trajectory.loss_mask
    return replace(
        trajectory, kept=data, kept_sizes=sizes, behaviour_logprobs=behaviour.astype(np.float32)
    )


def batches(seed=3, every=True):
    """Groups, with masks for all trajectories or every second one, and the masks."""
    made, found = [], {}
    for group in groups(seed=seed):
        trajectories = []
        for i, t in enumerate(group.trajectories):
            if every or i % 2:
                found[t.trajectory_id] = masks_of(t, len(found))
                t = masked(t, found[t.trajectory_id])
            trajectories.append(t)
        made.append(Group(group.group_id, tuple(trajectories)))
    return made, found


def oracle(params, model, t, masks):
    """Log-probabilities and entropies of a trajectory, float64 from the decoder's logits."""
    z = np.asarray(logits_of_rows(params, model, t.tokens[None]), np.float64)[0, :-1] / TEMPERATURE
    z = z if masks is None else np.where(masks[1:], z, -np.inf)
    log_p = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
    log_p -= z.max(1, keepdims=True)
    picked = np.take_along_axis(log_p, t.tokens[1:, None], 1)[:, 0]
    entropy = -(np.exp(log_p) * np.where(np.isfinite(log_p), log_p, 0.0)).sum(1)
    return (np.append(0.0, part) * t.loss_mask for part in (picked, entropy))


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return hf.load(tiny_model_dir)


@pytest.fixture
def make(model, tiny_model_dir):
    """make(preset, **overrides) → the two trainers and their states."""
    config, params = model

    def both(preset="grpo", **overrides):
        given = options(preset, **overrides)
        ours = JaxUpdate(config, given, source=lambda _: params)
        theirs = TorchUpdate(config, given, tiny_model_dir)
        return (ours, ours.init(params)), (theirs, theirs.init())

    return both


@pytest.mark.parametrize("every", [True, False])
def test_log_probabilities_are_over_the_kept_tokens(make, model, every):
    batch, masks = batches(every=every)
    trajectories = [t for g in batch for t in g.trajectories]
    for trainer, state in make(**{"model.logprob_chunk": 16}):
        for t, found in zip(trajectories, trainer.logprobs(state, batch), strict=True):
            wanted, _ = oracle(model[1], model[0], t, masks.get(t.trajectory_id))
            np.testing.assert_allclose(found * t.loss_mask, wanted, atol=2e-5)


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_the_first_loss_is_the_papers_with_ratios_over_the_kept_tokens(make, model, preset):
    """The policy equals the proximal one, so a token's loss is −A times its behaviour weight."""
    batch, masks = batches()
    loss, count, weights, entropies = 0.0, 0, 0.0, 0.0
    for group in batch:
        rewards = np.array([t.reward for t in group.trajectories])
        spread = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-5)
        for t, advantage in zip(group.trajectories, spread, strict=True):
            target, entropy = oracle(model[1], model[0], t, masks[t.trajectory_id])
            log_weight = (target - t.behaviour_logprobs)[t.loss_mask]
            if preset == "gspo":
                log_weight[:] = log_weight.mean()
            own = np.exp(log_weight) * (np.exp(log_weight) <= 5)
            weights, entropies = weights + own.sum(), entropies + entropy.sum()
            loss, count = loss - advantage * own.mean(), count + 1
    tokens = sum(t.num_trained for g in batch for t in g.trajectories)
    for trainer, state in make(preset):
        metrics = dict(trainer.update(state, batch)[1])
        assert metrics["entropy"] == pytest.approx(entropies / tokens, rel=1e-5)
        assert metrics["behaviour_weight"] == pytest.approx(weights / tokens, rel=1e-4)
        assert metrics["actor_loss"] == pytest.approx(loss / count, abs=2e-5)


def test_earlier_batches_do_not_change_the_inputs_of_the_model(make, monkeypatch):
    """A run that resumes has seen other batches, and its updates are bitwise the same."""
    (trainer, state), _ = make()
    put, shapes = trainer._put_rows, []

    def shapes_of(share):
        shapes.clear()
        made = [
            Group(g.group_id, tuple(masked(t, masks_of(t, 0, share)) for t in g.trajectories))
            for g in groups()
        ]
        trainer.logprobs(state, made)
        return shapes.copy()

    monkeypatch.setattr(
        trainer, "_put_rows", lambda part: shapes.append(part["kept_ids"].shape) or put(part)
    )
    few, many = shapes_of(0.02), shapes_of(0.3)
    assert few != many
    assert shapes_of(0.02) == few


EVERYTHING = {
    "algorithm.entropy_coefficient": 0.05, "algorithm.kl_placement": "loss",
    "algorithm.kl_coefficient": 0.1, "train.minibatches": 2, "model.logprob_chunk": 16,
}  # fmt: skip


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_both_trainers_learn_the_same(make, preset):
    (ours, our_state), (theirs, their_state) = make(preset, **EVERYTHING)
    for seed in range(2):
        batch, _ = batches(seed, every=seed == 0)
        our_state, metrics = ours.update(our_state, batch)
        their_state, others = theirs.update(their_state, batch)
        for name in ("actor_loss", "entropy", "reference_kl", "grad_norm"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name
    own, other = weights(ours, our_state), weights(theirs, their_state)
    for name, array in own.items():
        np.testing.assert_allclose(other[name], array, atol=2e-5, err_msg=name)


def test_sets_of_all_tokens_change_nothing(make):
    plain = groups()
    whole = [
        Group(g.group_id, tuple(masked(t, masks_of(t, 0, 1.1)) for t in g.trajectories))
        for g in plain
    ]
    for trainer, state in make(**EVERYTHING):
        bits = [trainer.logprobs(state, batch) for batch in (plain, whole)]
        for a, b in zip(*bits, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_without_masks_the_trainers_get_no_further_inputs(make):
    (ours, state), (theirs, _) = make()
    for trainer in (ours, theirs):
        (part,) = trainer._begin(state if trainer is ours else theirs.init(), groups(), 1)[2]
        assert not set(kept_tokens.INPUTS) & {name for batch in part for name in batch}
    assert jax.tree.leaves(state)
