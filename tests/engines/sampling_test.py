"""Drawing tokens: against float64 oracles that sort and search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.engines.jax import sampling

VOCABS = (100, 128, 1000, 2048)  # 100 and 1000 do not divide into blocks


def restriction(rows, top_p=1.0, top_k=0, banned=()):
    ids = np.full((rows, 3), -1, np.int32)
    ids[:, : len(banned)] = banned
    return sampling.Restriction(
        jnp.full(rows, top_p, jnp.float32), jnp.full(rows, top_k, jnp.int32), jnp.asarray(ids)
    )


draw = jax.jit(sampling.draw)


def logits_of(vocab, seed=0):
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 2


def drawn(logits, temperature=1.0, count=4096, **limits):
    """Token counts and logprobs when one distribution is drawn from at evenly spread uniforms."""
    uniforms = ((np.arange(count) + 0.5) / count).astype(np.float32)
    tokens, logprobs = draw(
        np.tile(logits, (count, 1)), uniforms, np.full(count, temperature, np.float32),
        restriction(count, **limits),
    )  # fmt: skip
    return np.bincount(np.asarray(tokens), minlength=logits.size), tokens, np.asarray(logprobs)


def log_softmax(logits, temperature=1.0):
    z = logits.astype(np.float64) / temperature
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_follow_the_distribution(vocab, temperature):
    logits = logits_of(vocab)
    counts, tokens, logprobs = drawn(logits, temperature)
    wanted = log_softmax(logits, temperature)
    # Evenly spread uniforms through the inverse distribution: each count is within one of N·p.
    np.testing.assert_allclose(counts, 4096 * np.exp(wanted), atol=1.1)
    np.testing.assert_allclose(logprobs, wanted[tokens], atol=2e-6)


def test_greedy_takes_the_first_largest_and_is_untempered():
    logits = logits_of(1000)
    logits[[700, 300]] = 20.0
    counts, _, logprobs = drawn(logits, 0.0, count=8)
    assert counts[300] == 8
    np.testing.assert_allclose(logprobs, log_softmax(logits)[300], atol=1e-6)


def nucleus(logits, top_p):
    """The smallest set of most probable tokens whose mass reaches top_p."""
    order = np.argsort(-logits)
    mass = np.cumsum(np.exp(log_softmax(logits))[order])
    return set(order[: np.searchsorted(mass, top_p) + 1].tolist())


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_and_top_p_keep_what_sorting_keeps(vocab):
    logits = logits_of(vocab)
    order = np.argsort(-logits)
    counts, tokens, logprobs = drawn(logits, top_k=5)
    assert set(np.flatnonzero(counts)) == set(order[:5].tolist())
    np.testing.assert_allclose(logprobs, log_softmax(logits)[tokens], atol=2e-6)  # whole vocabulary
    counts, *_ = drawn(logits, top_p=0.3)
    assert set(np.flatnonzero(counts)) == nucleus(logits, 0.3)
    kept = order[:20]  # top-p of what top-k left
    counts, *_ = drawn(logits, top_k=20, top_p=0.5)
    assert set(np.flatnonzero(counts)) == {int(kept[i]) for i in nucleus(logits[kept], 0.5)}


def test_ties_with_the_last_of_top_k_stay():
    logits = np.zeros(128, np.float32)
    logits[[3, 9, 77]] = 5.0
    counts, *_ = drawn(logits, top_k=2)
    assert set(np.flatnonzero(counts)) == {3, 9, 77}


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_drawn(limits, temperature):
    logits = logits_of(1000)
    best = np.argsort(-logits)[:2]
    counts, tokens, logprobs = drawn(logits, temperature, banned=best, **limits)
    assert counts[best].sum() == 0
    assert counts.sum() == 4096
    np.testing.assert_allclose(logprobs, log_softmax(logits)[tokens], atol=2e-6)


def test_rounding_never_draws_an_impossible_token():
    """The largest uniform below 1 lands past the last token when sums round down."""
    logits = np.full(1000, -np.inf, np.float32)
    logits[[10, 500]] = 0.0
    uniforms = np.array([0.0, 1 - 2**-24, 0.5, 0.49], np.float32)
    tokens, _ = draw(np.tile(logits, (4, 1)), uniforms, np.ones(4, np.float32), restriction(4))
    assert np.asarray(tokens).tolist() == [10, 500, 500, 10]


def test_non_finite_logits_give_a_token_of_the_vocabulary():
    logits = np.full((2, 100), np.nan, np.float32)
    tokens, logprobs = draw(logits, np.full(2, 0.5, np.float32), np.ones(2, np.float32),
                            restriction(2))  # fmt: skip
    assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 100)).all()
    assert np.isnan(np.asarray(logprobs)).all()


def test_a_row_does_not_depend_on_the_others():
    """Bit for bit: in any number of rows, beside any restriction."""
    logits = np.stack([logits_of(2048, seed) for seed in range(64)])
    uniforms = np.random.default_rng(1).random(64).astype(np.float32)
    temperature = np.ones(64, np.float32)
    reference = [np.asarray(x) for x in draw(logits, uniforms, temperature, restriction(64))]
    for rows in (2, 8, 16, 32):
        few = draw(logits[:rows], uniforms[:rows], temperature[:rows], restriction(rows))
        for got, wanted in zip(few, reference, strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted[:rows])
    plain = restriction(64)
    for mixed in (
        plain._replace(top_p=plain.top_p.at[0].set(0.5)),
        plain._replace(top_k=plain.top_k.at[0].set(2)),
        plain._replace(banned=plain.banned.at[0, 0].set(7)),
    ):
        for got, wanted in zip(draw(logits, uniforms, temperature, mixed), reference, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[1:], wanted[1:])
