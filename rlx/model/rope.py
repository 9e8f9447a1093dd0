"""Rotary position embeddings: angles from positions.

RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; `llama3` and
`linear` as in transformers, in float32.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model.rope_config import Rope


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Return angular frequencies [head_dim / 2] float32, radians a token; scale of cos and sin."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1.0) / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_scale(rope)
    if rope.kind == "longrope":
        factors = np.asarray(rope.long_factor if rope.long else rope.short_factor, np.float32)
        return np.float32(1.0) / (factors * np.float32(rope.theta) ** exponent), _long_scale(rope)
    return plain, 1.0


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Stretch long wavelengths, keep short ones, interpolate those between."""
    wavelength = 2 * np.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * plain / rope.factor + smooth * plain).astype(np.float32)


def _yarn(rope: Rope, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """Interpolate low frequencies, keep high ones, with a linear ramp over pair indices."""

    def pair_index(rotations: float) -> float:
        length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_index(rope.beta_fast or 32), pair_index(rope.beta_slow or 1)
    if rope.truncate is None or rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _long_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position_embeddings)
    return math.sqrt(1 + stretch)


def tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of positions [...] int32 in a segment: two [..., head_dim / 2] float32."""
    frequency, scale = frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
