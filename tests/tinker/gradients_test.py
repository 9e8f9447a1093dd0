"""Losses and gradients of adapters against plain PyTorch in float64, on PEFT's own model."""

import numpy as np
import pytest

from rlx.base import UserError
from rlx.model.directory import resolve
from rlx.model.lora_config import LoraConfig
from rlx.tinker.lora_trainer import ADAPTER, trainer_class
from rlx.tinker.target_rows import LOSSES, TargetDatum, pack

MODEL = resolve("rlx:arithmetic")


@pytest.fixture(scope="module", params=["jax", pytest.param("torch", marks=pytest.mark.torch)])
def trainer(request):
    return trainer_class(request.param)(MODEL, "float32", 64)


def adapters(trainer, rank=3, seed=3):
    """Adapters whose B is not zero; with seed 1 float32 itself errs by 1e-5 in either library."""
    state, rng = trainer.fresh(LoraConfig(rank, 32.0), seed), np.random.default_rng(0)
    arrays = {
        k: x + 0.05 * rng.standard_normal(x.shape, np.float32)
        for k, x in sorted(trainer.get(state.adapters, state.lora).items())
    }
    state.adapters = trainer.put(arrays, state.lora)
    return state


def same(trainer, one, other):
    """Asserts that two states have equal numbers."""
    for name in ("adapters", "mu", "nu", "grads"):
        both = [trainer.get(getattr(state, name), state.lora) for state in (one, other)]
        for key, values in both[0].items():
            np.testing.assert_array_equal(values, both[1][key], err_msg=f"{name} {key}")
    assert one.updates == other.updates


def some_data(vocab, loss, wide=False):
    rng = np.random.default_rng(3)
    data = []
    for size in (5, 17, 9, 30, 1):
        shape = (size, 2) if wide and size != 9 else (size,)
        inputs = {name: rng.standard_normal(shape).astype(np.float32) for name in LOSSES[loss]}
        if "logprobs" in inputs:
            inputs["logprobs"] = -np.abs(inputs["logprobs"]) - 2
            inputs.pop("clip_low_threshold", None), inputs.pop("clip_high_threshold", None)
        tokens, targets = rng.integers(0, vocab, size), rng.integers(0, vocab, shape)
        data.append(TargetDatum(tokens.astype(np.int32), targets.astype(np.int32), inputs))
    return data


def by_torch(directory, data, loss, low=0.7, high=1.4):
    """Log-probabilities, summed loss and gradients by PEFT's names, in float64."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    model = PeftModel.from_pretrained(base, directory, is_trainable=True).double()
    total, found = 0.0, []
    for datum in data:
        logits = model(torch.tensor(datum.tokens)[None]).logits[0]
        targets = torch.tensor(datum.targets.reshape(len(datum.tokens), -1)).long()
        p = torch.log_softmax(logits, -1).gather(-1, targets)
        found.append(p.detach().numpy().reshape(datum.targets.shape))
        given = {
            k: torch.tensor(v, dtype=torch.float64).reshape(p.shape)
            for k, v in datum.inputs.items()
        }
        if loss == "cross_entropy":
            each = -p * given["weights"]
        else:
            ratio, advantages = torch.exp(p - given["logprobs"]), given["advantages"]
            clipped = torch.clamp(ratio, low, high)
            each = {
                "importance_sampling": lambda r=ratio, a=advantages: -(r * a),
                "ppo": lambda r=ratio, a=advantages, c=clipped: -torch.min(r * a, c * a),
                "cispo": lambda a=advantages, c=clipped, p=p: -(c.detach() * a * p),
            }[loss]()
        total = total + each.sum()
    total.backward()
    named = model.named_parameters()
    grads = {n.replace(".default", ""): p.grad.numpy() for n, p in named if p.grad is not None}
    return found, total.item(), grads


@pytest.mark.torch
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_plain_torch(trainer, tmp_path, loss, wide):
    if wide and loss != "cross_entropy":
        pytest.skip("several targets a token are for distillation")
    state = adapters(trainer)
    trainer.save(state, tmp_path, str(MODEL), moments=False)
    options = (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4} if loss in ("ppo", "cispo") else {}
    )
    data = some_data(trainer.config.vocab_size, loss, wide)
    rows = pack(data, loss, options, trainer.config, 32)
    assert len(rows.batches) > 1
    logprobs, losses = trainer.run(state, loss, rows, True)
    wanted, total, grads = by_torch(tmp_path / ADAPTER, data, loss)
    for one, other in zip(logprobs, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
    most = float(sum(np.abs(x).sum() for x in losses))
    assert sum(x.sum() for x in losses) == pytest.approx(total, abs=1e-5 * most)
    found = trainer.get(state.grads, state.lora)
    assert set(found) == set(grads)
    scale = max(np.abs(g).max() for g in grads.values())
    for name, grad in found.items():
        np.testing.assert_allclose(grad, grads[name], atol=1e-5 * scale, rtol=1e-5, err_msg=name)


@pytest.mark.torch
def test_steps_are_those_of_torch_s_adamw(trainer, tmp_path):
    import torch

    state = adapters(trainer)
    names = trainer.get(state.adapters, state.lora)
    ours = {
        name: torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for name, x in names.items()
    }
    given = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.1}
    adam = torch.optim.AdamW(ours.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows = pack(data, "cross_entropy", {}, trainer.config, 64)
    for clip in (0.0, 0.5, 1e9):
        trainer.run(state, "cross_entropy", rows, True)
        grads = trainer.get(state.grads, state.lora)
        for name, parameter in ours.items():
            parameter.grad = torch.tensor(grads[name], dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_(ours.values(), clip or 1e30)
        adam.step()
        options = {"learning_rate": 0.01, "grad_clip_norm": clip, **given}
        assert trainer.step(state, options) == pytest.approx(norm.item(), rel=1e-5)
        found = trainer.get(state.adapters, state.lora)
        for name, parameter in ours.items():
            np.testing.assert_allclose(found[name], parameter.detach(), atol=2e-6, err_msg=name)


def test_a_base_in_bfloat16_gives_about_the_same(trainer):
    state, half = adapters(trainer), type(trainer)(MODEL, "bfloat16", 64)
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows = pack(data, "cross_entropy", {}, trainer.config, 64)
    both = [each.run(state, "cross_entropy", rows, True)[0] for each in (trainer, half)]
    found = [np.concatenate(each) for each in both]
    np.testing.assert_allclose(found[0], found[1], atol=0.5)
    assert not np.array_equal(*found)


def test_clients_with_other_ranks_and_matrices_do_not_disturb_one_another(trainer):
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows = pack(data, "cross_entropy", {}, trainer.config, 64)

    def trained(state):
        trainer.run(state, "cross_entropy", rows, True)
        trainer.step(state, {})
        return state

    def make():
        return adapters(trainer), trainer.fresh(LoraConfig(5, 32.0, ("q", "v")), 2)

    by_itself = [trained(trained(state)) for state in make()]
    in_turns = [trained(state) for state in [trained(state) for state in make()]]
    for one, other in zip(by_itself, in_turns, strict=True):
        same(trainer, one, other)
    assert len(in_turns[1].adapters) < len(in_turns[0].adapters)


def test_two_requests_before_a_step_add_and_a_step_forgets(trainer):
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    one, other = adapters(trainer), adapters(trainer)
    for part in (data[:2], data[2:]):
        rows = pack(part, "cross_entropy", {}, trainer.config, 64)
        trainer.run(one, "cross_entropy", rows, True)
        trainer.run(one, "cross_entropy", rows, False)  # adds nothing
    trainer.run(other, "cross_entropy", pack(data, "cross_entropy", {}, trainer.config, 64), True)
    assert trainer.step(one, {}) == pytest.approx(trainer.step(other, {}), rel=1e-5)
    assert trainer.step(one, {}) == 0.0


def test_a_gradient_that_is_not_finite_changes_nothing(trainer):
    data = some_data(trainer.config.vocab_size, "importance_sampling")
    data[0].inputs["logprobs"][:] = -200.0
    state = adapters(trainer)
    before = state.adapters
    rows = pack(data, "importance_sampling", {}, trainer.config, 64)
    trainer.run(state, "importance_sampling", rows, True)
    with pytest.raises(UserError, match="not finite"):
        trainer.step(state, {})
    assert state.adapters is before
    assert (trainer.step(state, {}), state.updates) == (0.0, 1)


@pytest.mark.parametrize("options", [{"learning_rate": float("nan")}, {"eps": 0.0}])
def test_an_update_that_is_not_finite_changes_nothing(trainer, options):
    """With eps=0 it is 0 / 0, where the gradient of the first step is 0."""
    state = trainer.fresh(LoraConfig(2, 32.0), 1)
    before = state.adapters
    rows = pack(some_data(trainer.config.vocab_size, "cross_entropy"), "cross_entropy", {},
                trainer.config, 64)  # fmt: skip
    trainer.run(state, "cross_entropy", rows, True)
    with pytest.raises(UserError, match="update is not finite"):
        trainer.step(state, options)
    assert (state.adapters is before, state.updates) == (True, 0)


def test_a_saved_state_comes_back_exactly(trainer, tmp_path):
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows, state = pack(data, "cross_entropy", {}, trainer.config, 64), adapters(trainer)
    for _ in range(2):
        trainer.run(state, "cross_entropy", rows, True)
        trainer.step(state, {"learning_rate": 0.01})
    trainer.save(state, tmp_path, "base", moments=True)
    again = trainer.load(tmp_path, 2)
    same(trainer, state, again)
    for each in (state, again):
        trainer.run(each, "cross_entropy", rows, True)
        trainer.step(each, {"learning_rate": 0.01})
    same(trainer, state, again)


def test_a_checkpoint_of_another_model_is_refused(trainer, tmp_path):
    state = adapters(trainer)
    arrays = trainer.get(state.adapters, state.lora)
    name = min(arrays)
    for wrong, why in [
        ({k: x for k, x in arrays.items() if k != name}, "1 adapter tensors are missing"),
        (arrays | {"other": arrays[name]}, "1 adapter tensors have no place"),
        (arrays | {name: arrays[name][:, 1:]}, "has shape"),
    ]:
        with pytest.raises(UserError, match=why):
            trainer.put(wrong, state.lora)


@pytest.mark.torch
def test_both_trainers_begin_with_the_same_adapters_and_read_each_other_s(tmp_path):
    both = [trainer_class(name)(MODEL, "float32", 64) for name in ("jax", "torch")]
    states = [adapters(each) for each in both]
    for each, state in zip(both, states, strict=True):
        each.save(state, tmp_path / type(each).__name__, "base", moments=True)
    swapped = [
        each.load(tmp_path / type(other).__name__)
        for each, other in zip(both, both[::-1], strict=True)
    ]
    for each, one, other in zip(both, states, swapped, strict=True):
        same(each, one, other)
