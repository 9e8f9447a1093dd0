"""Losses and gradients of adapters against plain PyTorch in float64, on PEFT's own model."""

import numpy as np
import pytest

from rlx.base import UserError
from rlx.model import peft as rlx_peft
from rlx.model.directory import resolve
from rlx.model.lora_config import LoraConfig
from rlx.tinker.jax_lora import JaxLora, LoraState
from rlx.tinker.target_rows import TargetDatum, pack
from rlx.tinker.token_losses import LOSSES

MODEL = resolve("rlx:arithmetic")


@pytest.fixture(scope="module")
def trainer():
    return JaxLora(MODEL, "float32", 64)


def adapters(trainer, rank=3):
    """Adapters whose B is not zero."""
    import jax

    state = trainer.fresh(LoraConfig(rank, 32.0), 1)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(
        lambda x: x + 0.05 * rng.standard_normal(x.shape, np.float32), state.adapters
    )
    return LoraState.of(state.lora, moved)


def some_data(vocab, loss, wide=False):
    rng = np.random.default_rng(3)
    data = []
    for size in (5, 17, 9, 30, 1):
        shape = (size, 2) if wide and size != 9 else (size,)
        inputs = {name: rng.standard_normal(shape).astype(np.float32) for name in LOSSES[loss][1]}
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
    state.save(tmp_path, trainer.config, str(MODEL), moments=False)
    options = (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4} if loss in ("ppo", "cispo") else {}
    )
    data = some_data(trainer.config.vocab_size, loss, wide)
    rows = pack(data, loss, options, trainer.config, 32)
    assert len(rows.batches) > 1
    logprobs, losses = map(rows.of_data, zip(*trainer.run(state, loss, rows, True), strict=True))
    wanted, total, grads = by_torch(tmp_path / "adapter", data, loss)
    for one, other in zip(logprobs, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
    most = float(sum(np.abs(x).sum() for x in losses))
    assert sum(x.sum() for x in losses) == pytest.approx(total, abs=1e-5 * most)
    found = rlx_peft.to_peft(state.grads, trainer.config, state.lora).arrays()
    assert set(found) == set(grads)
    scale = max(np.abs(g).max() for g in grads.values())
    for name, grad in found.items():
        np.testing.assert_allclose(grad, grads[name], atol=1e-5 * scale, rtol=1e-5, err_msg=name)


@pytest.mark.torch
def test_steps_are_those_of_torch_s_adamw(trainer, tmp_path):
    import torch

    state = adapters(trainer)
    names = rlx_peft.to_peft(state.adapters, trainer.config, state.lora).arrays()
    ours = {
        name: torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for name, x in names.items()
    }
    given = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.1}
    adam = torch.optim.AdamW(ours.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows = pack(data, "cross_entropy", {}, trainer.config, 64)
    for clip in (0.0, 0.5, 1e9):
        trainer.run(state, "cross_entropy", rows, True)
        grads = rlx_peft.to_peft(state.grads, trainer.config, state.lora).arrays()
        for name, parameter in ours.items():
            parameter.grad = torch.tensor(grads[name], dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_(ours.values(), clip or 1e30)
        adam.step()
        assert state.step(
            {"learning_rate": 0.01, "grad_clip_norm": clip, **given}
        ) == pytest.approx(norm.item(), rel=1e-5)
        found = rlx_peft.to_peft(state.adapters, trainer.config, state.lora).arrays()
        for name, parameter in ours.items():
            np.testing.assert_allclose(found[name], parameter.detach(), atol=2e-6, err_msg=name)


def test_a_base_in_bfloat16_gives_about_the_same(trainer):
    state, half = adapters(trainer), JaxLora(MODEL, "bfloat16", 64)
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows = pack(data, "cross_entropy", {}, trainer.config, 64)
    found = []
    for each in (trainer, half):
        parts = zip(*each.run(state, "cross_entropy", rows, True), strict=True)
        found.append(np.concatenate(rows.of_data(next(iter(parts)))))
    np.testing.assert_allclose(found[0], found[1], atol=0.5)
    assert not np.array_equal(*found)


def test_two_requests_before_a_step_add_and_a_step_forgets(trainer):
    data = some_data(trainer.config.vocab_size, "cross_entropy")
    one, other = adapters(trainer), adapters(trainer)
    for part in (data[:2], data[2:]):
        rows = pack(part, "cross_entropy", {}, trainer.config, 64)
        trainer.run(one, "cross_entropy", rows, True)
        trainer.run(one, "cross_entropy", rows, False)  # adds nothing
    trainer.run(other, "cross_entropy", pack(data, "cross_entropy", {}, trainer.config, 64), True)
    assert one.step({}) == pytest.approx(other.step({}), rel=1e-5)
    assert one.step({}) == 0.0


def test_a_gradient_that_is_not_finite_changes_nothing(trainer):
    data = some_data(trainer.config.vocab_size, "importance_sampling")
    data[0].inputs["logprobs"][:] = -200.0
    state = adapters(trainer)
    before = state.adapters
    rows = pack(data, "importance_sampling", {}, trainer.config, 64)
    trainer.run(state, "importance_sampling", rows, True)
    with pytest.raises(UserError, match="not finite"):
        state.step({})
    assert state.adapters is before
    assert state.step({}) == 0.0


def test_a_saved_state_comes_back_exactly(trainer, tmp_path):
    import jax

    data = some_data(trainer.config.vocab_size, "cross_entropy")
    rows, state = pack(data, "cross_entropy", {}, trainer.config, 64), adapters(trainer)
    for _ in range(2):
        trainer.run(state, "cross_entropy", rows, True)
        state.step({"learning_rate": 0.01})
    state.save(tmp_path, trainer.config, "base", moments=True)
    again = LoraState.load(tmp_path, trainer.config, 2)
    for each in (state, again):
        trainer.run(each, "cross_entropy", rows, True)
        each.step({"learning_rate": 0.01})
    jax.tree.map(np.testing.assert_array_equal, state.adapters, again.adapters)
    jax.tree.map(np.testing.assert_array_equal, state.moments, again.moments)
