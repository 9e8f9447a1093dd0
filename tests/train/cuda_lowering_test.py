"""The train step as it is lowered for CUDA; no GPU is needed to look at it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.train import packing


@pytest.mark.parametrize(("remat", "forward"), [("full", 2), ("attention", 1), ("none", 1)])
def test_the_step_on_hopper_is_of_packed_attention(
    hopper, trainer, params, make_groups, remat, forward
):
    """Forward, once more in the backward pass of a full remat, and backward; no T × T mask."""
    keys = {"model.compute_dtype": "bfloat16", "model.remat": remat}
    update = trainer(**keys, **{"train.row_buckets": (48,)})
    flat = packing.flatten(make_groups())
    plan, batches = update._pack(flat, np.arange(flat.num_sequences))
    [batch] = batches
    rows = sum(n for n, _ in plan.shapes)
    assert batch["segment_sizes"].shape == (rows, 16 if batch["segment_ids"].max() > 4 else 4)
    assert np.sum(batch["segment_sizes"]) == flat.num_tokens

    def loss(params, batch):
        return jnp.sum(update.logprob_step(params, None, batch))

    text = jax.jit(jax.grad(loss)).trace(params, batch).lower(lowering_platforms=("cuda",))
    text = text.as_text()
    calls = re.findall(r"custom_call @(__cudnn\S+?)\(", text)
    assert sorted(calls) == ["__cudnn$fmhaSoftmax"] * forward + ["__cudnn$fmhaSoftmaxBackward"]
    assert "48x48" not in text


@pytest.mark.parametrize(("remat", "loops"), [("none", 0), ("dots", 0), ("attention", 2)])
def test_a_step_on_hopper_that_keeps_much_has_no_loop_over_layers(
    hopper, trainer, params, make_groups, monkeypatch, remat, loops
):
    """A loop would copy what it keeps: forward and backward."""
    monkeypatch.setattr("rlx.train.update.on_cpu", lambda: False)
    keys = {"model.compute_dtype": "bfloat16", "model.remat": remat}
    update = trainer(**keys, **{"train.row_buckets": (56,)})  # a trainer of this test only
    flat = packing.flatten(make_groups())
    [batch] = update._pack(flat, np.arange(flat.num_sequences))[1]

    def loss(params, batch):
        return jnp.sum(update._states(params, update.model, batch, update.unrolled)[0])

    text = jax.jit(jax.grad(loss)).trace(params, batch).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("stablehlo.while") == loops


def test_trees_on_hopper_are_two_calls_of_packed_attention(hopper, trainer, params, make_groups):
    """One for chains, one for the first tokens of their trees; each once, without masks."""
    keys = {"model.compute_dtype": "bfloat16", "model.remat": "attention"}
    update = trainer(**keys, **{"train.row_buckets": (80,), "train.share_prefixes": "on"})
    flat = packing.flatten(make_groups())
    plan, [batch] = update._pack(flat, np.arange(flat.num_sequences))
    assert plan.shared.sum() > 0
    assert np.sum(batch["segment_sizes"]) == flat.num_tokens - plan.shared.sum()

    def loss(params, batch):
        return jnp.sum(update.logprob_step(params, None, batch))

    text = jax.jit(jax.grad(loss)).trace(params, batch).lower(lowering_platforms=("cuda",))
    text = text.as_text()
    calls = re.findall(r"custom_call @(__cudnn\S+?)\(", text)
    assert sorted(calls) == ["__cudnn$fmhaSoftmax"] * 2 + ["__cudnn$fmhaSoftmaxBackward"] * 2
    assert sorted(re.findall(r"PADDING\w*", text)) == ["PADDING"] * 2 + ["PADDING_CAUSAL"] * 2
    assert "80x80" not in text
