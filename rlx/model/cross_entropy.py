"""Log-probabilities and entropies of tokens, without keeping all logits in memory.

The backward pass computes a chunk's logits again: with a 152k vocabulary that saves 0.6 MB a token.
Prompt tokens are skipped, because a third of a small model's work is in its head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rlx.model import kept_tokens, sharding
from rlx.model.model_config import CHUNK
from rlx.model.ops import on_cpu, product, softcap_slope, softcapped, weight_gradient
from rlx.model.sharding import Placement

SMALLEST_CHUNK = 128  # scored tokens; smaller ones make the head's products slow


def target_logprobs(
    x: Array,  # [N, D] hidden states
    head: Array,  # [V, D]
    targets: Array,  # [N] int32 in [0, V)
    *,
    temperature: float = 1.0,  # > 0
    softcap: float = 0.0,  # c where logits are c · tanh(head·x / c) before the temperature; 0: not
    # Tokens whose logits exist at one time; 0: CHUNK, and on a GPU at least D. With N or more, the
    # logits are kept for the backward pass.
    chunk: int = 0,
    scored: Array | None = None,  # [N] bool, the tokens to score; None: all of them
    place: Placement | None = None,  # of the head on a mesh; it is gathered once in each pass
    # The tokens that each target was drawn from, over which the distribution is renormalised: [E]
    # int32 ids; [E] int32, the target in N that lists each, N or more at padding; [N] bool, whether
    # a target lists the tokens left out. None: the whole vocabulary.
    kept: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Return log softmax(head·x / temperature)[target] and the entropy of that distribution.

    Both are [N] float32, nats; 0 for tokens that are not scored.
    """
    if not chunk:
        # The head's gradient, V · D numbers, is read and written for each chunk's V · chunk.
        chunk = CHUNK if on_cpu() else max(CHUNK, x.shape[1])
    tokens, how = len(x), (temperature, softcap, chunk >= len(x), place)
    chunk = min(chunk, tokens)
    if scored is not None:
        chunk = min(chunk, max(SMALLEST_CHUNK, -(-tokens // 8)))
    pieces = -(-tokens // chunk)
    size = -(-tokens // pieces)
    size += 0 if on_cpu() else -size % 16  # cuBLAS would pad other sizes, in a pass over the logits

    def cut(x: Array) -> Array:
        padding = ((0, pieces * size - tokens), *[(0, 0)] * (x.ndim - 1))
        return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])

    if scored is None:
        kept = kept and (*kept[:2], cut(kept[2]))
        logprob, entropy = _chunked(cut(x), head, cut(targets), None, kept, how)
        return logprob.reshape(-1)[:tokens], entropy.reshape(-1)[:tokens]
    order = jnp.argsort(~scored)  # scored ones first, in as many chunks as they fill
    used = -(-jnp.sum(scored) // size)
    back = jnp.argsort(order)
    if kept is not None:
        ids, owners, excluded = kept
        kept = ids, back.at[owners].get(mode="fill", fill_value=len(x)), cut(excluded[order])
    both: Any = _chunked(cut(x[order]), head, cut(targets[order]), used, kept, how)
    logprob, entropy = (jnp.where(scored, part.reshape(-1)[back], 0.0) for part in both)
    return logprob, entropy


def _logits(x, head, scaling, kept, i):
    """Return [N, V] float32 of a head in x's dtype; `scaling`: (temperature, softcap).

    Logits of tokens that chunk i excludes are replaced.
    """
    temperature, softcap = scaling
    logits = jnp.einsum("nd,vd->nv", x, head, preferred_element_type=jnp.float32)
    logits = softcapped(logits, softcap)
    logits = logits if temperature == 1.0 else logits / temperature
    if kept is None:
        return logits
    ids, owners, excluded = kept
    size = len(x)
    rows = jnp.where(owners // size == i, owners % size, size)
    listed = jnp.zeros(logits.shape, bool).at[rows, ids].set(True, mode="drop")
    return jnp.where(listed != excluded[i][:, None], logits, kept_tokens.OUTSIDE)


def _reduce(logits, targets):
    """Return ([N] logprob, [N] entropy, [N] log normaliser) of [N, V] logits."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - highest)
    total = jnp.sum(weights, axis=-1)
    normaliser = highest[:, 0] + jnp.log(total)
    weighted = weights * logits
    if on_cpu():  # the sum stays out of the loop that makes its terms; a GPU reads logits once
        weighted = lax.optimization_barrier(weighted)
    mean = jnp.sum(weighted, axis=-1) / total
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return picked - normaliser, normaliser - mean, normaliser


def _gradients(x, head, targets, logits, normaliser, entropy, grads, scaling):
    """Return the gradients of x [N, D] and of a head [V, D] in its dtype.

    With p = softmax(z):  ∂logp_t/∂z = onehot_t − p,  ∂H/∂z = −p (log p + H).
    """
    (grad_logprob, grad_entropy), (temperature, softcap) = grads, scaling
    log_p = logits - normaliser[:, None]
    pull = grad_logprob[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    hot = targets[:, None] == jnp.arange(logits.shape[1])[None]
    grad = (jnp.where(hot, grad_logprob[:, None], 0.0) - jnp.exp(log_p) * pull) / temperature
    grad = (grad * softcap_slope(logits * temperature, softcap)).astype(x.dtype)
    return product(grad, head, 1, 0), weight_gradient(grad, x, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked(x, head, targets, used, kept, how):
    """Return ([P, S] logprob, [P, S] entropy) of x [P, S, D] and targets [P, S].

    Args:
      used: how many of the P chunks have tokens (the others give 0); None: all.
      kept: as of `target_logprobs`, with [P, S] bool.
      how: temperature, softcap, whether logits are kept for the backward pass, place.
    """
    return _chunked_forward(x, head, targets, used, kept, how)[0]


def _chunked_forward(x, head, targets, used, kept, how):
    *scaling, keep, place = how
    weights = sharding.used(head, x.dtype, place)

    def one(i, arrays):
        logits = _logits(x[i], weights, scaling, kept, i)
        parts = *_reduce(logits, targets[i]), logits
        return tuple(all_.at[i].set(part) for all_, part in zip(arrays, parts, strict=False))

    shapes = [targets.shape] * 3 + [(*targets.shape, len(weights))] * keep
    start = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    arrays = _each(one, len(x), used, start)
    return arrays[:2], (x, head, targets, used, kept, *arrays[1:])


def _chunked_backward(how, residuals, grads):
    x, head, targets, used, kept, entropy, normaliser, *logits = residuals
    *scaling, _, place = how
    weights = sharding.used(head, x.dtype, place)

    def one(i, carry):
        grad_x, grad_head = carry
        again = logits[0][i] if logits else _logits(x[i], weights, scaling, kept, i)
        part, more = _gradients(
            x[i], weights, targets[i], again, normaliser[i], entropy[i],
            (grads[0][i], grads[1][i]), scaling,
        )  # fmt: skip
        return grad_x.at[i].set(part), grad_head + more

    start = jnp.zeros_like(x), jnp.zeros(head.shape, jnp.float32)
    grad_x, grad_head = _each(one, len(x), used, start)
    return grad_x, grad_head.astype(head.dtype), None, None, None


def _each(step, pieces, used, start):
    """Fold `step` over the used chunks, beginning with `start`."""
    if used is None and pieces == 1:
        return step(0, start)
    return lax.fori_loop(0, pieces if used is None else used, step, start)


_chunked.defvjp(_chunked_forward, _chunked_backward)
