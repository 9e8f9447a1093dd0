"""Rotary position embedding: options, read from and written to HF's `config.json`; angles. No JAX.

RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; `llama3` and
`linear` as in transformers, in float32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.model.config_forms import NotOurs, check

KINDS = ("default", "linear", "llama3", "yarn")
LAYER_KINDS = ("full_attention", "sliding_attention")  # layers without and with a window


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; names are HF's, None where HF's own default applies."""

    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    theta: float = 10_000.0  # base of the geometric series of powers
    factor: float = 1.0  # how many times the context is stretched
    original_max_position_embeddings: int = 0  # tokens the model was trained on before stretching
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] = ()  # for longrope, divisors of each pair's frequency
    long_factor: tuple[float, ...] = ()  # those where sequences may be longer
    long: bool = False  # whether they apply; see `ModelConfig.within`


_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings"),
}


def local_from_hf(hf: Mapping[str, Any]) -> Rope:
    """Return the RoPE of layers with a window, which has its own base (Gemma 3)."""
    local = (hf.get("rope_parameters") or {}).get(LAYER_KINDS[1])
    changes = {"rope_theta": hf["rope_local_base_freq"], "rope_scaling": None}
    return from_hf({**hf, **changes, "rope_parameters": local})


def from_hf(hf: Mapping[str, Any], kinds: tuple[str, ...] = KINDS) -> Rope:
    """Return the RoPE of a `config.json`, of either spelling; UserError if unsupported."""
    check(hf, "rope_scaling", "rope_parameters")
    options = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    check(options)
    options = dict(options.get(LAYER_KINDS[0]) or options)  # newer files have one a kind of layer
    check(options)
    kind = options.pop("rope_type", None) or options.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    options.pop("type", None)
    theta = float(options.pop("rope_theta", None) or hf.get("rope_theta", 10_000.0))
    if kind not in kinds:
        raise NotOurs(f"unsupported RoPE scaling {kind!r}; use one of {', '.join(kinds)}")
    if options.pop("partial_rotary_factor", 1.0) != 1.0:
        raise NotOurs("unsupported option partial_rotary_factor; use a model without it")
    longest, original = hf["max_position_embeddings"], "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope"):
        # As in HF, the model's own key wins over the one among RoPE's.
        options[original] = hf.get(original) or options.get(original) or longest
    if kind == "longrope":
        options.setdefault("factor", longest / options[original])
        options |= {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
    known = {field.name for field in fields(Rope)} - {"kind", "theta", "long"}
    for key in _REQUIRED[kind]:
        if options.get(key) is None:
            raise UserError(f"RoPE scaling {kind!r} has no {key!r}; add it to config.json")
    if kind == "default":
        options = {}
    if extra := sorted(set(options) - known):
        raise NotOurs(f"unsupported RoPE option {extra[0]!r} of {kind!r}; remove it")
    return Rope(kind=kind, theta=theta, **options)


def to_hf(rope: Rope) -> dict[str, Any]:
    """Return both spellings: `rope_parameters` for transformers 5, and the older keys."""
    required = _REQUIRED[rope.kind]
    optional = {
        f.name for f in fields(Rope) if f.default is None and getattr(rope, f.name) is not None
    }
    options = {name: getattr(rope, name) for name in (*required, *sorted(optional))}
    options |= {name: [*value] for name, value in options.items() if isinstance(value, tuple)}
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **options}
    both: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": rope.theta}
    if rope.kind != "default":
        both["rope_scaling"] = {"rope_type": rope.kind, **options}
    return both


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return angular frequencies, [head_dim / 2] float32, radians a token."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.float32(rope.theta) ** exponent
    if rope.kind == "longrope":
        factors = np.asarray(rope.long_factor if rope.long else rope.short_factor, np.float32)
        return np.float32(1.0) / (factors * powers)
    plain = (np.float32(1.0) / powers).astype(np.float32)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope, plain, head_dim) if rope.kind == "yarn" else plain


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


def scale(rope: Rope) -> float:
    """Return the factor of cos and sin, which is 1 except for YaRN and LongRoPE."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position_embeddings)
        return math.sqrt(1 + stretch)

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
