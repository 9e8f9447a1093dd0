"""Updates of adapters: the base stays, the state is small, the algorithms are the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.base import Group, UserError
from rlx.model import decoder, lora
from rlx.model import params as parameters
from rlx.model.lora_config import LoraConfig
from rlx.train import checkpoint, update
from rlx.train.train_options import TrainOptions

LORA = {"lora.rank": 4, "lora.alpha": 8.0}
SGD = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.0, "optimizer.learning_rate": 0.5}
KL = {"algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1}


@pytest.fixture(scope="module")
def adapted(model_config, make_config, params):
    """adapted(**overrides) → a JaxUpdate of adapters of `params`; equal overrides share one."""

    @functools.cache
    def make(overrides):
        config = make_config(**{**LORA, **dict(overrides)})
        return update.JaxUpdate(model_config, TrainOptions.of(config), source=lambda _: params)

    return lambda **overrides: make(tuple(sorted(overrides.items())))


def raw(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def rewarded(groups):
    """Each group's first trajectory has the reward, and the tokens are those of a fair policy."""
    made = []
    for group in groups:
        trajectories = [
            dataclasses.replace(
                t, reward=float(index == 0),
                behaviour_logprobs=np.where(t.loss_mask, -np.log(32), 0).astype(np.float32),
            )
            for index, t in enumerate(group.trajectories)
        ]  # fmt: skip
        made.append(Group(group.group_id, tuple(trajectories)))
    return made


def test_rewarded_sequences_become_likelier_and_the_base_stays(
    model_config, make_config, params, make_groups
):
    params = {**params, "embed": 10 * params["embed"]}  # a head with which logits can differ
    before = raw(params)
    trainer = update.JaxUpdate(
        model_config, TrainOptions.of(make_config(**LORA)), source=lambda _: params
    )
    groups, state = rewarded(make_groups()), trainer.init(params)
    first = trainer.logprobs(state, groups)
    for _ in range(15):
        state, metrics = trainer.update(state, groups)
    assert metrics["skipped_updates"] == 0
    gain = [
        (new - old)[t.loss_mask].mean()
        for new, old, t in zip(
            trainer.logprobs(state, groups),
            first,
            [t for g in groups for t in g.trajectories],
            strict=True,
        )
    ]
    won = [t.reward == 1 for g in groups for t in g.trajectories]
    assert np.mean(gain, where=won) > 0.1
    assert np.mean(gain, where=won) > np.mean(gain, where=np.invert(won)) + 0.2
    merged = lora.merge(trainer._frozen, state.params, trainer.lora)
    assert raw(params) == before
    for name, leaf in params["layers"].items():
        same = np.array_equal(leaf, merged["layers"][name])
        assert same == (name not in ("q", "k", "v", "o", "gate", "up", "down")), name


def test_the_first_gradient_is_the_models_own_projected_on_a(
    model_config, adapted, trainer, params, make_groups
):
    """With B = 0: dL/dB = scale · Aᵀ · dL/dW and dL/dA = 0."""
    groups, settings = make_groups(), LoraConfig(4, 8.0)
    whole, _ = trainer(**SGD).update(trainer(**SGD).init(params), groups)
    start = adapted(**SGD).init(params)
    before = jax.tree.map(np.array, start.params["layers"])
    after, _ = adapted(**SGD).update(start, groups)
    for name in settings.targets:
        a, b = (f"{name}_lora_{x}" for x in "ab")
        np.testing.assert_array_equal(after.params["layers"][a], before[a])
        step = np.asarray(whole.params["layers"][name] - params["layers"][name], np.float64)
        want = settings.scale * np.einsum("lir,lio->lro", before[a].astype(np.float64), step)
        bound = 1e-4 * np.abs(want).max()
        np.testing.assert_allclose(after.params["layers"][b], want, atol=bound)


def test_the_state_is_adapters_and_their_moments_and_resumes_bit_for_bit(
    model_config, adapted, params, make_groups, tmp_path
):
    one, batches = adapted(), [make_groups(seed) for seed in range(3)]
    state = one.init(params)
    for groups in batches[:2]:
        state, _ = one.update(state, groups)
    number = lora.count(model_config, one.lora)
    held = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert number * 3 <= held <= number * 3 + 8
    checkpoint.save(tmp_path, 2, state, {})
    state, _ = one.update(state, batches[2])

    back = checkpoint.restore_latest(tmp_path, one.restore).state
    assert jax.tree.map(lambda x: (x.shape, x.dtype), back) == jax.tree.map(
        lambda x: (x.shape, x.dtype), one.abstract_state
    )
    again, _ = one.update(back, batches[2])
    assert raw(again) == raw(state)


def test_a_checkpoint_has_no_byte_of_the_base(model_config, make_config, tmp_path):
    wide = dataclasses.replace(model_config, model_dim=128, mlp_dim=512, vocab_size=1024)
    base = parameters.init(wide, jax.random.key(0))

    def saved(name, **overrides):
        trainer = update.JaxUpdate(
            wide, TrainOptions.of(make_config(**overrides)), source=lambda _: base
        )
        return size_of(checkpoint.save(tmp_path / name, 0, trainer.init(base), {}))

    whole, adapters = saved("whole"), saved("adapters", **LORA)
    needed = 12 * lora.count(wide, LoraConfig(4, 8.0))  # and two moments, float32
    assert adapters < needed + 100_000 < 0.2 * whole


def size_of(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_the_base_is_the_reference_and_nothing_more_is_loaded(adapted, params, make_groups):
    """Without another source: k3 is 0 before the first update, and not after it."""
    trainer, groups = adapted(**KL), make_groups()
    state, first = trainer.update(trainer.init(params), groups)
    assert state.reference is None
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.update(state, groups)[1]["reference_kl"] > 1e-5


def test_a_reference_that_is_copied_is_a_copy_of_the_adapters(adapted, params, make_groups):
    trainer = adapted(**KL, **{"reference.mode": "copy", "reference.every_steps": 2})
    start = trainer.init(params)
    begun = raw(start.params)
    state, _ = trainer.update(start, make_groups(0))
    assert raw(state.reference) == begun
    state, _ = trainer.update(state, make_groups(1))
    assert raw(state.reference) == raw(state.params) != begun


def test_dpo_moves_adapters_away_from_their_base(adapted, params, make_groups):
    trainer = adapted(**{"algorithm.preset": "dpo"})
    groups = rewarded(make_groups(n=2))
    state, first = trainer.update(trainer.init(params), groups)
    assert first["pair_margin"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(3):
        state, last = trainer.update(state, groups)
    assert last["pair_margin"] > 0.01


def test_adapters_are_float32_beside_a_bfloat16_base(
    model_config, make_config, params, make_groups
):
    config = make_config(**{**LORA, "model.dtype": "bfloat16"})
    trainer = update.JaxUpdate(model_config, TrainOptions.of(config), source=lambda _: params)
    adapters = trainer.init(params).params
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {np.dtype(np.float32)}
    assert trainer.full_params(adapters, trainer._frozen)["embed"].dtype == jnp.bfloat16
    assert lora.merge(trainer._frozen, adapters, trainer.lora)["layers"]["q"].dtype == jnp.bfloat16
    row = jnp.ones((1, 32), jnp.int32)

    def loss(adapters):
        batch = {"tokens": row, "positions": row, "segment_ids": row}
        whole = trainer.full_params(adapters, trainer._frozen)
        return decoder.logprobs(whole, model_config, batch, compute_dtype=jnp.bfloat16)[0].sum()

    grads = jax.eval_shape(jax.grad(loss), adapters)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"algorithm.preset": "ppo"}, "trains a critic"),
        ({"algorithm.preset": "reward_model"}, "trains a reward model"),
    ],
)
def test_what_needs_a_value_head_is_refused(overrides, words, model_config, make_config, params):
    config = make_config(**{**LORA, **overrides})
    with pytest.raises(UserError, match=words):
        update.JaxUpdate(model_config, TrainOptions.of(config), source=lambda _: params)


def test_a_base_is_asked_for(model_config, make_config):
    with pytest.raises(UserError, match=r"lora\.rank without a base"):
        update.JaxUpdate(model_config, TrainOptions.of(make_config(**LORA)))
