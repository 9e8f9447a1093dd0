"""Products of bfloat16 on a CPU: what they are, and that its own instructions make them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.model.ops import compiler_options, matmul


def operands(*shapes):
    draws = np.random.default_rng(0)
    return [jnp.asarray(draws.normal(size=shape), jnp.bfloat16) for shape in shapes]


def gradients(x, weight, grad):
    y, back = jax.vjp(matmul, x, weight)
    return y, *back(grad)


# XLA refuses some products of bfloat16 when they run, by their shapes and by what is around them.
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2,), (3, 5), (64,), (4, 128)])
@pytest.mark.parametrize(("inner", "outer"), [(1, 7), (7, 1), (8, 16), (64, 24), (24, 64)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_products_and_gradients_are_those_of_float64(rows, inner, outer, dtype):
    x, weight, grad = operands((*rows, inner), (inner, outer), (*rows, outer))
    y, grad_x, grad_weight = jax.jit(gradients)(x, weight.astype(dtype), grad)
    a, w, g = (np.asarray(part, np.float64) for part in (x, weight, grad))
    wanted = (a @ w, g @ w.T, a.reshape(-1, inner).T @ g.reshape(-1, outer))
    for got, want in zip((y, grad_x, grad_weight), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64).reshape(want.shape), want, 1e-2, 0.1)
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (x.dtype, x.dtype, dtype)


def test_results_may_be_turned():
    """What takes a product's rows for columns may make XLA turn the product itself."""
    x, weight = operands((2, 8), (8, 16))

    @jax.jit
    def heads(x, weight):
        return matmul(x, weight).T, matmul(x, weight).reshape(1, 2, 4, 4).transpose(0, 2, 1, 3)

    turned, headed = heads(x, weight)
    y = np.asarray(matmul(x, weight))
    np.testing.assert_array_equal(turned, y.T)
    np.testing.assert_array_equal(headed, y.reshape(1, 2, 4, 4).transpose(0, 2, 1, 3))


@pytest.mark.usefixtures("own_bfloat16")
def test_no_operand_is_made_float32():
    """In the compiled program all three products take bfloat16."""
    x, weight, grad = operands((2, 96, 32), (32, 48), (2, 96, 48))
    text = jax.jit(gradients).lower(x, weight, grad).compile().as_text()
    shapes = {"192,32", "2,96,32", "32,48", "192,48", "2,96,48", "32,192"}
    entries = re.findall(r"fused_computation\S* \((.*?)\) ->", text)
    taken = [re.findall(r"(\w+)\[([\d,]*)\]", entry) for entry in entries if entry.count("[") == 2]
    assert len(taken) >= 3
    for kind, shape in (pair for entry in taken for pair in entry if pair[1] in shapes):
        assert kind == "bf16", f"{kind}[{shape}] of {text}"


def test_onednn_gives_the_same_products():
    """oneDNN computes the three products, and they are numpy's within bfloat16."""
    if not compiler_options():
        pytest.skip("XLA has no oneDNN for bfloat16 here")
    x, weight, grad = operands((2, 96, 256), (256, 512), (2, 96, 512))
    program = jax.jit(gradients, compiler_options=compiler_options())
    known = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)  # it cannot be stored
    made = program.lower(x, weight, grad).compile()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", known)
    text = made.as_text()
    assert text.count('custom_call_target="__onednn$matmul"') >= 3
    wide = [np.asarray(each, np.float64) for each in (x, weight, grad)]
    rows, pulls = (each.reshape(192, -1) for each in (wide[0], wide[2]))
    wanted = rows @ wide[1], pulls @ wide[1].T, rows.T @ pulls
    for got, want in zip(jax.tree.leaves(made(x, weight, grad)), wanted, strict=True):
        error = np.abs(np.asarray(got, np.float64).reshape(want.shape) - want)
        assert error.max() < 2**-8 * np.abs(want).max()
