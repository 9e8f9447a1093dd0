"""A mixture of experts in place of the MLP (Qwen3-MoE), without dropped tokens.

    p = softmax(x·R),   y = Σ_{e of the k largest p} w_e · down_e(silu(gate_e x) · up_e x)

w is p, or p over the sum of the k. A token's k rows are sorted by expert into blocks of rows that
have one expert each (MegaBlocks, arXiv 2211.15841). XLA computes `ragged_dot`, on CPUs and GPUs, as
products of all rows with all experts.

On a mesh, the e devices of the axis `expert` gather all tokens, compute the rows of their own
experts and scatter the sums back. They send (e − 1) · D numbers a token each way; all-to-all would
send k · (e − 1) / e · D, no fewer while e ≤ k, and needs room for the worst case.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from rlx.model.mesh import EXPERT_WEIGHTS, ROWS
from rlx.model.model_config import ModelConfig
from rlx.model.ops import GATED
from rlx.model.params import MLP, Params
from rlx.model.sharding import Layout

AXIS = "expert"
Weights = tuple[Array, ...]  # gate and up [experts here, D, F], down [experts here, F, D]
Cut = tuple[int, ...]  # the axis of each that EXPERT_WEIGHTS cut; −1: none
_PIECE = 16_384  # rows that are multiplied at one time


class Routing(NamedTuple):
    """Sums over the tokens, without padding, of one layer or of each of L layers."""

    load: Array  # [E] float32, how often each expert was chosen
    chance: Array  # [E] float32, each expert's probability before the choice
    entropy: Array  # scalar float32, nats, of that distribution


def balance_loss(routing: Routing) -> Array:
    """Return how unevenly experts are used, the mean over layers; float32 scalar, 1 where even.

        E · Σ_e f_e · P_e

    f: each expert's share of the choices, without gradient; P: its mean probability
    (Switch Transformers, arXiv 2101.03961, eq. 4; for k choices DeepSeek-V3, 2412.19437, eq. 17).
    """
    load, chance = (x / jnp.maximum(jnp.sum(x, -1, keepdims=True), 1.0) for x in routing[:2])
    return load.shape[-1] * jnp.mean(jnp.sum(lax.stop_gradient(load) * chance, axis=-1))


def mixture(
    layer: Params, config: ModelConfig, x: Array, logits: Array, valid: Array, layout: Layout
) -> tuple[Array, Routing]:
    """Return a layer's mixture of experts of its tokens, [B, T, D], and the routing.

    Takes x [B, T, D] normed, logits [B, T, E] of the router, and valid [B, T] bool, or how often a
    token counts; others have no expert, and give zeros.
    """
    weights = tuple(layer[f"expert_{name}"] for name in MLP)
    if layout.mesh is None:
        return _local(x, logits, valid, weights, config=config, cut=None)
    specs = tuple(layout.places[f"expert_{name}"].stored.spec for name in MLP)
    cut = tuple(spec.index(EXPERT_WEIGHTS) if EXPERT_WEIGHTS in spec else -1 for spec in specs)
    tokens = PartitionSpec(ROWS, "context")
    return jax.shard_map(
        partial(_local, config=config, cut=cut), mesh=layout.mesh,
        in_specs=(tokens, tokens, tokens, specs), out_specs=(tokens, PartitionSpec()),
        check_vma=False,
    )(x, logits, valid, weights)  # fmt: skip


def _local(
    x: Array, logits: Array, valid: Array, weights: Weights, *, config: ModelConfig, cut: Cut | None
) -> tuple[Array, Routing]:
    """Return `mixture` of one device's tokens; `cut` is None without a mesh."""
    shape, gated = x.shape, GATED[config.activation]
    x, valid = x.reshape(-1, shape[-1]), valid.reshape(-1, 1)
    chances = jax.nn.softmax(logits.reshape(len(x), -1).astype(jnp.float32), axis=-1)
    chosen, experts = lax.top_k(chances, config.experts_per_token)
    if config.norm_topk_prob:
        chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
    chosen, experts = chosen.astype(x.dtype), jnp.where(valid, experts, config.num_experts)
    hot = experts[:, :, None] == jnp.arange(config.num_experts)
    entropy = -jnp.sum(chances * jnp.log(jnp.maximum(chances, 1e-30)), axis=-1, keepdims=True)
    routing = Routing(
        jnp.sum(hot * valid[:, :, None], axis=(0, 1), dtype=jnp.float32),
        jnp.sum(chances * valid, axis=0),
        jnp.sum(lax.stop_gradient(entropy) * valid),
    )
    first: Any = 0  # of this device's experts
    if cut is not None:
        routing = lax.psum(routing, (*ROWS, "context"))
        gathered = (lax.all_gather(part, AXIS, tiled=True) for part in (x, chosen, experts))
        (x, chosen, experts), first = gathered, lax.axis_index(AXIS) * len(weights[0])
    local, here = experts.reshape(-1) - first, len(weights[0])
    local = jnp.where((local >= 0) & (local < here), local, here)  # of others: in no block
    blocks, trips = _blocks(local, here, config.num_experts)
    y = _blocked(x, chosen, blocks, weights, cut or (-1, -1, -1), gated, trips)
    if cut is not None:
        y = lax.psum(lax.psum_scatter(y, AXIS, tiled=True), "tensor")
    return y.reshape(shape), routing


def _gathered_weights(weights: Weights, dtype: Any, cut: Cut) -> list[Array]:
    """Return the weights cast to `dtype`, then each gathered along its axis of `cut`."""
    return [
        lax.all_gather(weight, EXPERT_WEIGHTS, axis=axis, tiled=True) if axis >= 0 else weight
        for weight, axis in zip((w.astype(dtype) for w in weights), cut, strict=True)
    ]


def _scattered_gradient(grad: Array, cut: int) -> Array:
    """Return the sum over devices of a weight's gradient, scattered along its axis `cut`."""
    if cut < 0:
        return grad
    return lax.psum_scatter(grad, EXPERT_WEIGHTS, scatter_dimension=cut, tiled=True)


class Blocks(NamedTuple):
    """Rows of x in P pieces of S blocks; the rows of a block, R, have the same expert."""

    slots: Array  # [P, S, R] int32, place in [N, k]; N · k: none
    experts: Array  # [P, S] int32
    used: Array  # int32 scalar, pieces with rows


def _blocks(local: Array, here: int, total: int) -> tuple[Blocks, int]:
    """Return the blocks of slots with experts `local` [N · k], and the pieces of an even load.

    Of `total` experts, `here` are this device's; slots of others have this number.
    """
    slots = len(local)
    rows = min(max(slots // total // 2, 16), 1024)
    rows = 1 << rows.bit_length() - 1
    width = min(_PIECE // rows, 32)
    order = jnp.argsort(local)
    counts = jnp.sum(local[:, None] == jnp.arange(here), axis=0, dtype=jnp.int32)
    blocks = -(-counts // rows)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(counts) - counts
    pieces = -(-(slots // rows + here) // width)
    numbers = jnp.arange(pieces * width)
    experts = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), here - 1)
    within = (numbers - (ends - blocks)[experts])[:, None] * rows + jnp.arange(rows)
    places = order.at[starts[experts][:, None] + within].get(mode="clip")
    places = jnp.where(within < counts[experts][:, None], places, slots)
    used = -(-ends[-1] // width)
    even = -(-(slots * here // total // rows + here // 2) // width)
    table = Blocks(places.reshape(pieces, width, rows), experts.reshape(pieces, width), used)
    return table, even


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _blocked(x, chosen, blocks: Blocks, weights: Weights, cut: Cut, gated: Any, trips: int):
    """Return the weighted sum [N, D] of the blocks' experts, of x [N, D] and `chosen` [N, k].

    The backward pass computes gate and up again, for each piece. `gated` is a function of GATED;
    `trips` are those expected of the loop, for who reads the program.
    """
    return _blocked_forward(x, chosen, blocks, weights, cut, gated, trips)[0]


def _blocked_forward(x, chosen, blocks, weights, cut, gated, trips):
    wholes = _gathered_weights(weights, x.dtype, cut)

    def one(i, y):
        tokens, rows, scale, (gate, up, down) = _piece(x, chosen, blocks, wholes, i)
        inner = gated(_times(rows, gate, x.dtype), _times(rows, up, x.dtype))
        return y.at[tokens].add(scale * _times(inner, down), mode="drop")

    with jax.named_scope(f"trips_{trips}"):
        y = lax.fori_loop(0, blocks.used, one, jnp.zeros(x.shape, jnp.float32))
    return y.astype(x.dtype), (x, chosen, blocks, weights)


def _blocked_backward(cut, gated, trips, residuals, grad):
    x, chosen, blocks, weights = residuals
    wholes = _gathered_weights(weights, x.dtype, cut)

    def one(i, carry):
        grad_x, grad_chosen, grads = carry
        tokens, rows, scale, (gate, up, down) = _piece(x, chosen, blocks, wholes, i)
        pulled = grad.at[tokens].get(mode="fill", fill_value=0)
        inner, pull = jax.vjp(gated, _times(rows, gate, x.dtype), _times(rows, up, x.dtype))
        back = _times(pulled, jnp.swapaxes(down, 1, 2))
        both = pull((scale * back).astype(x.dtype))
        pairs = (rows, both[0]), (rows, both[1]), (inner, (scale * pulled).astype(x.dtype))
        parts = (_times(jnp.swapaxes(a, 1, 2), b).reshape(len(a), -1) for a, b in pairs)
        grads = tuple(
            total.at[blocks.experts[i]].add(part.astype(total.dtype))
            for total, part in zip(grads, parts, strict=True)
        )
        grad_rows = sum(
            _times(part, jnp.swapaxes(matrices, 1, 2))
            for part, matrices in zip(both, (gate, up), strict=True)
        )
        weighed = jnp.sum(inner.astype(jnp.float32) * back, axis=-1)
        grad_chosen = grad_chosen.at[blocks.slots[i]].add(weighed, mode="drop")
        return grad_x.at[tokens].add(grad_rows, mode="drop"), grad_chosen, grads

    with jax.named_scope(f"trips_{trips}"):
        start = jnp.zeros(x.shape, jnp.float32), jnp.zeros(chosen.size, jnp.float32)
        # XLA would transpose sums of three axes for each addition.
        empty = tuple(
            jnp.zeros((len(w), w[0].size), v.dtype) for w, v in zip(wholes, weights, strict=True)
        )
        grad_x, grad_chosen, totals = lax.fori_loop(0, blocks.used, one, (*start, empty))
    grads = tuple(
        _scattered_gradient(total.reshape(w.shape), axis)
        for total, w, axis in zip(totals, wholes, cut, strict=True)
    )
    return grad_x.astype(x.dtype), grad_chosen.reshape(chosen.shape).astype(x.dtype), None, grads


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _piece(x, chosen, blocks, wholes, i):
    """Return the tokens [S, R] of piece i, their rows of x, weights, and each block's matrices."""
    slots = blocks.slots[i]
    tokens = slots // chosen.shape[1]
    rows = x.at[tokens].get(mode="fill", fill_value=0)
    scale = chosen.reshape(-1).at[slots].get(mode="fill", fill_value=0)
    return tokens, rows, scale[..., None], [matrices[blocks.experts[i]] for matrices in wholes]


def _times(x: Array, matrices: Array, dtype: Any = jnp.float32) -> Array:
    """Return the product of each block and its matrix."""
    return jnp.einsum("sri,sij->srj", x, matrices, preferred_element_type=dtype)
