"""The forward pass and its gradients against transformers, and packed against unpacked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from rlx.model import cross_entropy, decoder, hf
from rlx.model import params as parameters
from tests.fixtures import rounding
from tests.fixtures.model import logits_of_rows


def test_logits_are_those_of_transformers(oracle):
    model, path = oracle
    config, params = hf.load(path)
    # Longer than the original context of the scaled models: scaling has to be right, too.
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 200)).astype(np.int32)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)).logits.numpy()
    got = jax.jit(logits_of_rows, static_argnums=1)(params, config, tokens)
    assert np.abs(got - wanted).max() <= 1e-4


# In series: sums of 32 (inputs), 48 (MLP) and 64 (keys) in three layers, forth and back, the head's
# of 32, of 97 (tokens of the vocabulary) and of a weight's 128 tokens.
ROUNDINGS = 2 * 3 * (4 * 32 + 48 + 2 * 64) + 2 * (32 + 97) + 128


def segments_of(batch):
    """(row, span) of every segment."""
    segment_ids = np.asarray(batch["segment_ids"])
    for row in range(segment_ids.shape[0]):
        for index in range(1, segment_ids[row].max() + 1):
            where = np.flatnonzero(segment_ids[row] == index)
            yield row, slice(where[0], where[-1] + 1)


def torch_logprobs(model, batch, temperature):
    """Oracle, one segment at a time: [(row, span, logprobs, entropies)], index 0 left out."""
    tokens = torch.tensor(np.asarray(batch["tokens"])).long()
    for row, span in segments_of(batch):
        segment = tokens[row, span]
        logits = model(segment[None]).logits[0, :-1] / temperature
        log_p = torch.log_softmax(logits, -1)
        yield row, span, log_p.gather(-1, segment[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [7, 32, 1000])
def test_packed_logprobs_and_entropies(few, rows, chunk):
    model, path = few
    config, params = hf.load(path)
    run = jax.jit(lambda p: decoder.logprobs(p, config, rows, temperature=0.7, chunk=chunk))
    logprobs, entropies = run(params)
    mask = np.zeros(rows["tokens"].shape, bool)
    for row, span, logprob, entropy in torch_logprobs(model, rows, 0.7):
        inner = slice(span.start + 1, span.stop)
        mask[row, inner] = True
        np.testing.assert_allclose(logprobs[row, inner], logprob.detach(), atol=1e-4)
        np.testing.assert_allclose(entropies[row, inner], entropy.detach(), atol=1e-4)
    assert not np.asarray(logprobs)[~mask].any()
    assert not np.asarray(entropies)[~mask].any()


@pytest.mark.parametrize(
    ("chunk", "remat"), [(1000, "none"), (25, "dots"), (25, "up"), (25, "attention"), (25, "full")]
)
def test_gradients_are_those_of_autograd(few, rows, chunk, remat):
    check_gradients(*few, rows, chunk, remat)


def test_gradients_of_a_gpus_chunks_are_those_of_autograd(few, rows, monkeypatch):
    monkeypatch.setattr(cross_entropy, "on_cpu", lambda: False)
    monkeypatch.setattr(cross_entropy, "CHUNK", 20)
    check_gradients(*few, rows, 0, "none")


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_gradients_of_layers_without_a_loop_are_those_of_autograd(few, rows, remat):
    check_gradients(*few, rows, 25, remat, unrolled=True)


def test_gradients_of_each_family_are_those_of_autograd(family, rows):
    """With windows shorter than the packed segments, and chunks of capped logits."""
    check_gradients(*family, rows, 25, "attention")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_tokens_that_nobody_asks_about_change_nothing(few, rows, share, monkeypatch):
    """Whatever number of chunks they fill: numbers and gradients of the others stay."""
    monkeypatch.setattr(cross_entropy, "SMALLEST_CHUNK", 16)
    config, params = hf.load(few[1])
    draw = np.random.default_rng(3)
    asked = draw.random(rows["tokens"].shape) < share
    weights = draw.normal(size=(2, *asked.shape)).astype(np.float32) * asked

    def loss(params, asked):
        both = decoder.logprobs(params, config, rows, temperature=0.7, scored=asked)
        return jnp.sum(jnp.stack(both) * weights), both

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, wanted), wanted_gradient = run(params, None)
    (_, got), gradient = run(params, asked)
    kept = [np.where(asked, x, 0.0) for x in wanted]
    rounding.assert_sums_agree(list(got), kept, ROUNDINGS)
    rounding.assert_sums_agree(gradient, wanted_gradient, ROUNDINGS)


def check_gradients(model, path, rows, chunk, remat, **how):
    config, params = hf.load(path)
    weights = np.random.default_rng(2).normal(size=(2, *rows["tokens"].shape)).astype(np.float32)

    def loss(params):
        both = decoder.logprobs(
            params, config, rows, temperature=0.7, chunk=chunk, remat=remat, **how
        )
        return jnp.sum(jnp.stack(both) * weights)

    got = hf.to_hf(jax.jit(jax.grad(loss))(params), config)
    model.zero_grad()
    total = 0.0
    for row, span, logprob, entropy in torch_logprobs(model, rows, 0.7):
        inner = slice(span.start + 1, span.stop)
        for part, weight in zip((logprob, entropy), weights, strict=True):
            total = total + (part * torch.tensor(weight[row, inner])).sum()
    total.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in revert_weight_conversion(model, grads).items():
        wanted = gradient.numpy()
        error = np.abs(got[name] - wanted).max() / np.abs(wanted).max()
        assert error <= 1e-4, f"gradient of {name} off by {error:.1e} of its largest entry"


@pytest.mark.parametrize(
    "kinds", [{}, {"windows": (11,), "attention_softcap": 2.0, "logit_softcap": 3.0}]
)
def test_query_blocks_change_nothing(tiny_model_dir, monkeypatch, kinds):
    config, params = hf.load(tiny_model_dir)
    if kinds:
        windows = (*kinds["windows"], 0) * config.num_layers
        config = dataclasses.replace(config, **kinds | {"windows": windows[: config.num_layers]})
    shape = (2, 50)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.vocab_size)
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 2, 3]], [23, 17, 10], axis=1))
    batch = {
        "tokens": tokens,
        "positions": jnp.broadcast_to(jnp.arange(50), shape),
        "segment_ids": segments,
    }

    def run(params):
        return jnp.sum(decoder.logprobs(params, config, batch)[0])

    whole = jax.jit(jax.value_and_grad(run))(params)
    monkeypatch.setattr("rlx.model.attention.QUERY_BLOCK", 8)
    jax.clear_caches()
    blocks = jax.jit(jax.value_and_grad(run))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, blocks)


def test_bfloat16_compute_keeps_float32_gradients(oracle, rows):
    """It loses what its roundings lose, and no more: see `rounding.OF_A_LAYER`."""
    config, params = hf.load(oracle[1])

    def loss(params, dtype):
        numbers = decoder.logprobs(params, config, rows, compute_dtype=dtype, chunk=25)[0]
        return jnp.sum(numbers), numbers

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    exact = run(params, jnp.float32)
    rough = run(params, jnp.bfloat16)
    coarse = run(rounding.rounded(params), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(rough)} == {jnp.dtype("float32")}
    for found, matrices, wanted in zip(rough, coarse, exact, strict=True):
        inherent = rounding.apart(matrices, wanted)
        assert rounding.apart(found, wanted) <= rounding.OF_A_LAYER * inherent


def test_init_has_the_shapes_of_the_table(few):
    config = hf.load_config(few[1])
    params = parameters.init(config, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda s: s.shape, parameters.shapes(config)
    )
    assert sum(p.size for p in jax.tree.leaves(params)) == parameters.count(config)
    assert params["embed"].std() == pytest.approx(config.initializer_range, rel=0.1)
