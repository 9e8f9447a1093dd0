"""Sampler of one token per row of logits, from one uniform number per row. Pure.

A draw inverts the cumulative distribution in two levels: the block, then the token within it. This
needs no sort, and rows do not affect each other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlx.model.ops import on_cpu

_LOWEST = jnp.iinfo(jnp.int32).min


class Restriction(NamedTuple):
    """Restrictions of the draws."""

    top_p: jax.Array  # [S] float32 in (0, 1]; keeps the fewest most probable tokens of this mass
    top_k: jax.Array  # [S] int32; keeps the k most probable tokens and ties of the last; 0: all
    banned: jax.Array  # [S, M] int32, excluded token ids; −1 for none
    # [S] bool, rows whose log-probabilities are over the allowed tokens, which are then returned
    masked: jax.Array | None = None
    allowed: jax.Array | None = None  # [S, ⌈V / 8⌉] uint8, bits, lowest first; None: every token


def row_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, keeping it: [..., n] float32 → [..., 1]."""
    if not on_cpu():  # fused with what makes x
        return jnp.sum(x, axis=-1, keepdims=True)
    # XLA's CPU reductions add in an order that depends on the number of rows. Its products of two
    # matrices with several rows each do not, so multiply by ones.
    rows, ones = x.reshape(-1, x.shape[-1]), jnp.ones((16, x.shape[-1]), x.dtype)
    sums = jnp.einsum("rn,fn->rf", rows, ones, precision=jax.lax.Precision.HIGHEST)
    return sums[:, :1].reshape(*x.shape[:-1], 1)


def draw(
    logits: jax.Array,  # [S, V] float32
    uniforms: jax.Array,  # [S] float32 in [0, 1)
    # [S] float32 ≥ 0; 0 takes the most probable token (the first of ties), with its log-probability
    # at temperature 1
    temperature: jax.Array,
    restriction: Restriction,  # costs time only if some row uses it
) -> tuple[jax.Array, ...]:
    """Sample a token per row; return it and its behaviour log-probability.

        logprob = log softmax(logits / temperature)[token]   over all tokens;
            in masked rows over the allowed ones

    Returns:
      tokens [S] int32, logprobs [S] float32 (nats, ≤ 0); with `restriction.masked` the allowed
      tokens as bits, lowest first: [S, ⌈V / 8⌉] uint8.
    """
    greedy = temperature <= 0
    tempered = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    z = _blocked(tempered)
    full = free = _Table.of(z)
    if restriction.allowed is not None:
        bits = jnp.unpackbits(restriction.allowed, 1, logits.shape[1], "little")
        z = _blocked(jnp.where(bits, tempered, -jnp.inf))
        free = _Table.of(z)
    ranked = jnp.any((restriction.top_p < 1) | (restriction.top_k > 0))
    banned = jnp.any(restriction.banned >= 0)
    allowed = jax.lax.switch(
        jnp.where(ranked, 2, jnp.where(banned, 1, 0)),
        (
            lambda: free,
            lambda: _Table.of(_without(z, restriction.banned)),
            lambda: _Table.of(_ranked(_without(z, restriction.banned), restriction)),
        ),
    )
    running = jnp.cumsum(allowed.masses, axis=-1)
    goal = uniforms * row_sum(allowed.masses)[:, 0]
    hits = jnp.where(
        greedy[:, None], allowed.peaks == allowed.top[:, None], running > goal[:, None]
    )
    block = _first(hits, allowed.masses > 0)
    goal -= _pick(running, block) - _pick(allowed.masses, block)
    row = jnp.take_along_axis(allowed.z, block[:, None, None], axis=1)[:, 0]
    chances = jnp.exp(row - allowed.top[:, None])
    reached = jnp.cumsum(chances, axis=-1) > goal[:, None]
    hits = jnp.where(greedy[:, None], row == allowed.top[:, None], reached)
    place = _first(hits, chances > 0)
    picked = _pick(row, place)
    logprobs = picked - full.top - jnp.log(row_sum(full.masses)[:, 0])
    tokens = jnp.minimum(block * z.shape[-1] + place, logits.shape[1] - 1)
    if restriction.masked is None:
        return tokens, logprobs
    over_allowed = picked - allowed.top - jnp.log(row_sum(allowed.masses)[:, 0])
    kept = allowed.z.reshape(len(logits), -1)[:, : logits.shape[1]] > -jnp.inf
    logprobs = jnp.where(restriction.masked, over_allowed, logprobs)
    return tokens, logprobs, jnp.packbits(kept, axis=-1, bitorder="little")


class _Table(NamedTuple):
    """Tempered logits z [S, blocks, width], with each block's peak and mass relative to the top."""

    z: jax.Array
    peaks: jax.Array
    top: jax.Array
    masses: jax.Array

    @classmethod
    def of(cls, z: jax.Array) -> "_Table":
        peaks = jnp.max(z, axis=-1)
        top = jnp.max(peaks, axis=-1)
        return cls(z, peaks, top, row_sum(jnp.exp(z - top[:, None, None]))[..., 0])


def _blocked(z: jax.Array) -> jax.Array:
    """Reshape [S, V] to [S, blocks, width], nearly square, padded with −inf."""
    rows, vocab = z.shape
    square = 1 << ((vocab - 1).bit_length() + 1) // 2
    width = square
    while width > 16 and vocab % width:
        width //= 2
    if vocab % width:
        width = square
        z = jnp.pad(z, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf)
    return z.reshape(rows, -1, width)


def _first(hits: jax.Array, possible: jax.Array) -> jax.Array:
    """Return the index of each row's first `hits & possible`, [S] int32.

    If rounding left none, return the last `possible`, and with non-finite logits 0.
    """
    size = hits.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    first = jnp.min(jnp.where(hits & possible, index, size), axis=-1)
    last = jnp.max(jnp.where(possible, index, 0), axis=-1)
    return jnp.where(first < size, first, last)


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def _without(z: jax.Array, banned: jax.Array) -> jax.Array:
    """Return z with −inf at the banned ids."""
    ids = jnp.arange(z.shape[1] * z.shape[2], dtype=jnp.int32).reshape(z.shape[1:])
    hit = jnp.zeros(z.shape, bool)
    for column in range(banned.shape[1]):
        hit |= ids == banned[:, column, None, None]
    return jnp.where(hit, -jnp.inf, z)


def _ranked(z: jax.Array, restriction: Restriction) -> jax.Array:
    """Return z with −inf outside top-k, and outside top-p of the rest."""
    # Bisection over the ordered bit patterns of floats finds both thresholds exactly. Its 32 passes
    # over a row are far cheaper than a sort.
    blocks = z.shape
    z = z.reshape(z.shape[0], -1)
    bits = jax.lax.bitcast_convert_type(z, jnp.int32)
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # in the order of the floats
    count = jnp.where(restriction.top_k > 0, restriction.top_k, z.shape[1])
    floor = _bisect(lambda level: jnp.sum(order >= level[:, None], axis=-1) >= count, z.shape[0])
    z = jnp.where(order >= floor[:, None], z, -jnp.inf)
    chances = jnp.exp(z - jnp.max(z, axis=-1, keepdims=True))
    goal = restriction.top_p * row_sum(chances)[:, 0]

    def reaches(level):
        return row_sum(jnp.where(order >= level[:, None], chances, 0.0))[:, 0] >= goal

    floor = jnp.where(restriction.top_p < 1, _bisect(reaches, z.shape[0]), _LOWEST)
    return jnp.where(order >= floor[:, None], z, -jnp.inf).reshape(blocks)


def _bisect(enough, rows: int) -> jax.Array:
    """Return [rows] int32, the highest level with `enough(level)`, true for the lowest."""

    def halve(_, bounds):
        low, high = bounds  # enough(low) is true; the answer is in [low, high]
        # Overflow-free ceil((low + high) / 2) over the whole int32 range.
        middle = (low | high) - ((low ^ high) >> 1)
        good = enough(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low = jnp.full((rows,), _LOWEST, jnp.int32)
    high = jnp.full((rows,), jnp.iinfo(jnp.int32).max, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
