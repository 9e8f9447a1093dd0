"""Sampling masks: their codes, and the distribution over the kept tokens by a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.model import kept_tokens
from rlx.model.cross_entropy import target_logprobs


def packed(masks):
    return np.packbits(masks, axis=1, bitorder="little")


def codes(bits, vocab):
    data, sizes = kept_tokens.compress(bits, vocab)
    return np.frombuffer(data, np.uint8), np.array(sizes, int)


@given(
    vocab=st.sampled_from([1, 7, 8, 60, 65, 300, 70_000]), seed=st.integers(0, 99),
    shares=st.lists(st.sampled_from([0.0, 1e-4, 0.01, 0.5, 0.99, 0.9999, 1.0]), max_size=6),
)  # fmt: skip
@settings(deadline=None)
def test_codes_are_never_longer_than_bits_and_come_back(vocab, seed, shares):
    rng = np.random.default_rng(seed)
    masks = rng.random((len(shares), vocab)) < np.array(shares)[:, None]
    noise = np.pad(packed(masks), ((0, 0), (0, 3)), constant_values=255)  # bytes after the last
    data, sizes = codes(noise, vocab)
    np.testing.assert_array_equal(kept_tokens.masks(data, sizes, vocab), masks)
    assert (sizes <= 1 + -(-vocab // 8)).all()
    assert (sizes[masks.all(1)] == 0).all()


def test_inputs_of_rows_are_in_their_places():
    """Two rows of three tokens, in another order than the codes, with one slot of padding."""
    masks = np.random.default_rng(0).random((5, 9)) < np.array([[0.2], [0.2], [0.5], [0.9], [1]])
    found = kept_tokens.batch_arrays(*codes(packed(masks), 9), np.array([[3, 4, 9], [0, 2, 1]]), 9)
    ids, places, excluded = (found[name] for name in kept_tokens.INPUTS)
    assert ids.shape == places.shape
    assert ids.shape[1] in (3, 6, 12)
    wanted = np.ones((2, 3, 9), bool)
    wanted[0, :2], wanted[1] = masks[[3, 4]], masks[[0, 2, 1]]
    for row, place in ((0, 1), (0, 2), (1, 1), (1, 2)):  # a row's first token is never scored
        listed = np.isin(np.arange(9), ids[row][places[row] == place])
        np.testing.assert_array_equal(listed ^ excluded[row, place], wanted[row, place])


@pytest.mark.parametrize(("ids", "size"), [([9], 4), ([5, 70_000], 7), ([], 1)])
def test_few_tokens_are_few_bytes_also_where_they_are_left_out(ids, size):
    masks = np.zeros((1, 151_936), bool)
    masks[0, ids] = True
    for each in (masks, ~masks):
        data, sizes = codes(packed(each), masks.shape[1])
        assert sizes.tolist() == [0 if each.all() else size]
        assert len(data) == sizes[0]


def test_codes_of_another_vocabulary_are_refused():
    few, half = np.arange(64) == 60, np.arange(64) % 2 > 0
    for mask, vocab in ((few, 32), (half, 32), (few, 151_936)):
        data, sizes = codes(packed(mask[None]), 64)
        with pytest.raises(ValueError, match=f"{vocab}"):
            kept_tokens.expand(data, sizes, vocab)


def random_sets(rng, targets, vocab):
    """Sets with their target, of a few tokens, nearly all, half, and all."""
    shares = rng.choice([0.05, 0.5, 0.95, 1.0], (len(targets), 1))
    masks = rng.random((len(targets), vocab)) < shares
    masks[np.arange(len(targets)), targets] = True
    return masks


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("chunk", [64, 1024])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_log_probabilities_and_gradients_are_those_over_the_kept_tokens(asked, chunk, softcap):
    rng, (n, d, vocab), temperature = np.random.default_rng(1), (300, 8, 50), 0.7
    x, head = rng.normal(size=(n, d)), rng.normal(size=(vocab, d))
    targets = rng.integers(0, vocab, n)
    masks = random_sets(rng, targets, vocab)
    wanted = rng.random(n) < 0.6 if asked else np.ones(n, bool)
    data, sizes = codes(packed(masks), vocab)
    ids, owners, excluded = kept_tokens.expand(data, sizes, vocab)
    ids, owners = np.append(ids, [3, 4]), np.append(owners, [n, n])  # padding
    weights = rng.normal(size=(2, n)) * wanted

    def total(x, head):
        found = target_logprobs(
            x, head, jnp.asarray(targets), temperature=temperature, chunk=chunk, softcap=softcap,
            scored=jnp.asarray(wanted) if asked else None,
            kept=(jnp.asarray(ids), jnp.asarray(owners), jnp.asarray(excluded)),
        )  # fmt: skip
        return sum(jnp.sum(a * w) for a, w in zip(found, weights, strict=True)), found

    as_float32 = [jnp.asarray(a, jnp.float32) for a in (x, head)]
    (_, found), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*as_float32)

    plain = x @ head.T
    capped = softcap * np.tanh(plain / softcap) if softcap else plain
    z = np.where(masks, capped / temperature, -np.inf)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    p, finite = np.exp(log_p), np.where(masks, log_p, 0.0)
    entropy = -(p * finite).sum(1)
    logprobs = log_p[np.arange(n), targets]
    np.testing.assert_allclose(found[0], np.where(wanted, logprobs, 0), atol=2e-5)
    np.testing.assert_allclose(found[1], np.where(wanted, entropy, 0), atol=2e-5)
    hot = np.eye(vocab)[targets]
    slope = 1 - (capped / softcap) ** 2 if softcap else 1.0
    of_logits = weights[0][:, None] * (hot - p)
    of_logits -= weights[1][:, None] * p * (finite + entropy[:, None])
    of_logits *= slope / temperature
    np.testing.assert_allclose(grads[0], of_logits @ head, atol=2e-4)
    np.testing.assert_allclose(grads[1], of_logits.T @ x, atol=1e-3)
