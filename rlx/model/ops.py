"""Small operations of the decoder, with hand-written backward passes that XLA compiles well.

On a CPU XLA's own derivatives cost more than the matrix products, by transposed operands, scalar
sums and kept elementwise results.
"""

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rlx.model import sharding
from rlx.model.sharding import Placement

LIBRARY = 1 << 23  # multiplications of the smallest product that XLA gives to oneDNN


def on_cpu() -> bool:
    """Return whether programs are traced for a CPU."""
    return sharding.target_device().platform == "cpu"


def compiler_options() -> dict[str, bool | str]:
    """Return the options of `jax.jit` for faster bfloat16 products; {} where there are none."""
    # XLA has oneDNN's products for AMX, and uses them if asked to. The second option turns off
    # YNNPACK, which would take them first. A persistent cache cannot keep such programs.
    if not _rounds():
        return {}
    name = "xla_cpu_experimental_"
    return {f"{name}onednn_custom_call": True, f"{name}ynn_fusion_type": ""}


def _rounds() -> bool:
    """Return whether XLA has fast bfloat16 products with bfloat16 results on this CPU."""
    fast = platform.machine() == "x86_64" and jax.__version_info__ >= (0, 12)
    return fast and on_cpu()


def result_dtype(dtype: Any, multiplications: int) -> Any:
    """Return the dtype of a product's result that need not be float32, for operands in `dtype`."""
    # oneDNN is an eighth as fast with a float32 result, because XLA casts the operands first.
    # Before JAX 0.12 XLA does so for a bfloat16 result. Small products with such a result are not
    # computed by a library, and XLA's own loops add them up in bfloat16.
    large = _rounds() and multiplications >= LIBRARY
    return dtype if large else jnp.promote_types(dtype, jnp.float32)


def product(x: Array, matrix: Array, axis: int, other: int) -> Array:
    """Contract `axis` of x with axis `other` of a matrix; return the product in x's dtype."""
    over = (((axis,), (other,)), ((), ()))
    wide = x.dtype
    if on_cpu():
        wide = result_dtype(x.dtype, x.size * matrix.shape[1 - other])
    return lax.dot_general(x, matrix, over, preferred_element_type=wide).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, weight: Array, place: Placement | None = None) -> Array:
    """Return x @ weight in x's dtype; the weight's gradient keeps the weight's dtype.

    Takes x [..., D] and weight [D, F]. On a mesh the weight has a `place`: it is gathered for this
    product and again for the backward pass, and its gradient is scattered.
    """
    return product(x, sharding.used(weight, x.dtype, place), x.ndim - 1, 0)


def _matmul_backward(place, residuals, grad):
    x, weight = residuals
    grad_x = product(grad, sharding.used(weight, x.dtype, place), x.ndim - 1, 1)
    return grad_x, weight_gradient(x, grad, weight.dtype, place)


def weight_gradient(x: Array, grad: Array, dtype: Any, place: Placement | None = None) -> Array:
    """Return xᵀ·grad: [..., D] and [..., F] → [D, F], summed in `dtype`, laid out by `place`."""
    # On a CPU the narrower operand first is up to twice as fast; the barrier keeps the order.
    if on_cpu() and place is None and x.dtype == jnp.bfloat16:
        return _rows_first(x, grad).astype(dtype)
    tokens = tuple(range(x.ndim - 1))
    summed = partial(lax.dot_general, dimension_numbers=((tokens, tokens), ((), ())))
    if x.shape[-1] <= grad.shape[-1] or not on_cpu():
        return sharding.gradient_as_stored(summed(x, grad, preferred_element_type=dtype), place)
    swapped = summed(grad, x, preferred_element_type=dtype)
    return lax.optimization_barrier(
        sharding.gradient_as_stored(swapped, place and place.transposed)
    ).T


def _rows_first(x: Array, grad: Array) -> Array:
    """Return xᵀ·grad by the CPU's bfloat16 products, which need row-major operands."""
    # A transposed array stays column-major until it is reshaped behind a barrier.
    flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    turned = lax.optimization_barrier(flat.T.reshape(1, *flat.shape[::-1]))
    dtype = result_dtype(x.dtype, flat.size * grad.shape[-1])
    return jnp.dot(turned.reshape(flat.shape[::-1]), grad, preferred_element_type=dtype)


matmul.defvjp(lambda x, weight, place: (matmul(x, weight, place), (x, weight)), _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(table: Array, tokens: Array, dtype: Any, place: Placement | None = None) -> Array:
    """Return table[tokens] in `dtype`, [..., D]; the gradient has the table's dtype."""
    if place is None:  # cast only the rows that are looked up
        return table[tokens].astype(dtype)
    return sharding.used(table, dtype, place)[tokens]


def _lookup_backward(dtype, place, residuals, grad):
    table, tokens = residuals
    return jnp.zeros(table.shape, table.dtype).at[tokens].add(grad.astype(table.dtype)), None


lookup.defvjp(
    lambda table, tokens, dtype, place: (lookup(table, tokens, dtype, place), (table, tokens)),
    _lookup_backward,
)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Array, scale: Array, eps: float, offset: float = 0.0) -> Array:
    """Return x / √(mean x² + eps) · (offset + scale) over the last axis, in x's dtype.

    Takes x [..., D] and scale [D]. Statistics are in float32; with an offset the product is too, as
    in Gemma.
    """
    return _rms_norm_forward(x, scale, eps, offset)[0]


def _rms_norm_forward(x, scale, eps, offset):
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if offset:
        normed = (wide * inverse * (offset + scale.astype(jnp.float32))).astype(x.dtype)
    else:
        normed = (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)
    return normed, (x, scale, inverse)


def _rms_norm_backward(eps, offset, residuals, grad):
    x, scale, inverse = residuals
    wide, grad = x.astype(jnp.float32), grad.astype(jnp.float32)
    scaled = grad * (offset + scale.astype(jnp.float32))
    along = jnp.mean(scaled * wide, axis=-1, keepdims=True)
    grad_x = inverse * (scaled - wide * (inverse * inverse * along))
    terms = grad * wide * inverse
    if on_cpu():  # the sum over rows stays out of the loop that makes its terms
        terms = lax.optimization_barrier(terms)
    grad_scale = jnp.sum(terms, axis=tuple(range(x.ndim - 1)))
    return grad_x.astype(x.dtype), grad_scale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _gated(activation: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Return (gate, up) → activation(gate) · up; only these are kept for the backward pass."""

    @jax.custom_vjp
    def product(gate: Array, up: Array) -> Array:
        return activation(gate) * up

    def backward(residuals, grad):
        gate, up = residuals
        value, slope = jax.jvp(activation, (gate,), (jnp.ones_like(gate),))
        return grad * up * slope, grad * value

    product.defvjp(lambda gate, up: (product(gate, up), (gate, up)), backward)
    return product


# HF's name of an activation → the function; the product of the gated MLP.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}  # fmt: skip
GATED = {name: _gated(activation) for name, activation in ACTIVATIONS.items()}


def softcapped(x: Array, cap: float) -> Array:
    """Return cap · tanh(x / cap), or x if cap is 0 (Gemma 2, arXiv 2408.00118)."""
    return cap * jnp.tanh(x / cap) if cap else x


def softcap_slope(capped: Array, cap: float) -> Array | float:
    """Return the slope of `softcapped` from its result; 0 beyond ±cap, as for masked scores."""
    return 1.0 - jnp.square(jnp.clip(capped / cap, -1.0, 1.0)) if cap else 1.0


@jax.custom_vjp
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pair (i, i + d/2) of each head by its angle, in float32 (RoPE, arXiv 2104.09864).

    Takes x [..., heads, head_dim], also the result, and cos and sin [..., head_dim / 2] float32,
    without gradient.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


rotate.defvjp(
    lambda x, cos, sin: (rotate(x, cos, sin), (cos, sin)),
    lambda angles, grad: (rotate(grad, angles[0], -angles[1]), None, None),
)
