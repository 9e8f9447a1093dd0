"""The decoder with a KV cache: fill the cache with prompts, then decode a token per slot and step.

Pure. decoder.py has other layouts of weights and cache, see serving_params.py and kv_cache.py.

Shapes: S slots, P prompts, T prompt tokens, N cache length, R steps of one decode call; K key/value
heads, G query heads for each of them, H head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlx.engines.jax.kv_cache import Cache, LayerCache, init_cache, init_recent, write
from rlx.engines.jax.sampling import row_sum
from rlx.engines.jax.serving_params import ServingParams
from rlx.model.attention import is_seen
from rlx.model.decoder import embed_scale, rope_tables
from rlx.model.model_config import ModelConfig
from rlx.model.ops import ACTIVATIONS, product, softcapped


def _rms_norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    """Return ops.rms_norm of x, by a sum that does not depend on the number of rows."""
    x32 = x.astype(jnp.float32)
    mean = row_sum(x32 * x32) / x.shape[-1]
    normed = x32 * jax.lax.rsqrt(mean + config.rms_eps)
    if config.norm_offset:
        return (normed * (config.norm_offset + scale.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * scale


def _norm(layer: dict[str, jax.Array], name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return x after the layer's norm `name`, or x if it has none."""
    return _rms_norm(x, layer[name], config) if name in layer else x


def _head_norm(layer, name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return decoder.head_norm of heads x [..., n, H]."""
    if not config.joint_qk_norm:
        return _norm(layer, name, config, x)
    return _norm(layer, name, config, x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def _linear(layer: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    """Multiply in two dimensions: with a third, XLA's order of adding depends on its size."""
    y = product(x.reshape(-1, x.shape[-1]), layer[name], 1, 1)
    y = y.reshape(*x.shape[:-1], -1)
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias


def _qkv(layer, config: ModelConfig, x, angles):
    """Return q [..., G·K, H], k and v [..., K, H] for the residual stream x [..., D], with RoPE."""
    fused = _linear(layer, "qkv", _norm(layer, "input_norm", config, x))
    heads = fused.reshape(*x.shape[:-1], -1, config.head_dim)
    n, m = config.num_heads, config.num_kv_heads
    q, k, v = heads[..., :n, :], heads[..., n : n + m, :], heads[..., n + m :, :]
    q, k = _head_norm(layer, "q_norm", config, q), _head_norm(layer, "k_norm", config, k)
    q = _rotate(q, angles)
    if config.query_factor != 1.0:
        q = q * jnp.asarray(config.query_factor, q.dtype)
    return q, _rotate(k, angles), v


def _angles(config: ModelConfig, positions: jax.Array) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Return window → (cos, ±sin) of positions [...] int32, each [..., 2, H/2] float32."""
    tables = {w: rope_tables(config, positions, w) for w in sorted(set(config.layer_windows))}
    return {
        window: (jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2))
        for window, (cos, sin) in tables.items()
    }


def _logits(params: ServingParams, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return logits [R, V] float32 (a reward model's values [R, 1]) for a stream [R, D]."""
    x = _rms_norm(x, params.final_norm, config)
    head = params.embed if params.head is None else params.head
    logits = jnp.einsum("rd,vd->rv", x, head, preferred_element_type=jnp.float32)
    return logits if config.value_head else softcapped(logits, config.logit_softcap)


def _rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return ops.rotate of x, by reversing the halves, which XLA vectorises."""
    cos, sin = (factor[..., None, :, :] for factor in angles)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    return (halves * cos + halves[..., ::-1, :] * sin).astype(x.dtype).reshape(x.shape)


def _finish_layer(layer, config: ModelConfig, x, mixed):
    """Return the residual stream after the output projection of `mixed` and the MLP."""
    x = x + _norm(layer, "mixed_norm", config, _linear(layer, "o", mixed))
    normed = _norm(layer, "post_norm", config, x)
    gate, up = jnp.split(_linear(layer, "gate_up", normed), 2, axis=-1)
    inner = ACTIVATIONS[config.activation](gate) * up
    if config.num_experts:
        inner = _weighted(config, _linear(layer, "router", normed), inner)
    return x + _norm(layer, "mlp_norm", config, _linear(layer, "down", inner))


def _weighted(config: ModelConfig, logits: jax.Array, inner: jax.Array) -> jax.Array:
    """Return the activations of all experts [..., E·F] times the router's weights."""
    # Every row goes through every expert, because the slots of a step choose most of them anyway.
    # `ragged_dot` is as slow on a CPU, and adds in an order that depends on the batch.
    logits = logits.astype(jnp.float32)
    chances = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    chosen, experts = jax.lax.top_k(chances / row_sum(chances), config.experts_per_token)
    if config.norm_topk_prob:
        chosen = chosen / row_sum(chosen)
    hot = experts[..., None] == jnp.arange(config.num_experts)
    weights = jnp.sum(jnp.where(hot, chosen[..., None], 0.0), axis=-2).astype(inner.dtype)
    by_expert = inner.reshape(*weights.shape, config.expert_dim)
    mask = weights[..., None] > 0  # else an overflow in another expert would be 0 · inf
    return jnp.where(mask, by_expert * weights[..., None], 0).reshape(inner.shape)


def prefill(
    params: ServingParams, config: ModelConfig, tokens: jax.Array, chunks: jax.Array, chunk: int
) -> Cache:
    """Return a Cache of P rows and length T for prompts, tokens [P, T] int32 padded at the end.

    T is a multiple of `chunk`, the positions computed together. The first `chunks` have tokens, an
    int32 scalar; later positions stay zero.
    """

    def advance(state):
        index, cache = state
        part = jax.lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        _, cache = _advance(params, config, cache, part, index * chunk)
        return index + 1, cache  # XLA skips the unused output of the last layer

    prompts, length = tokens.shape
    empty = init_cache(config, prompts, length, params.embed.dtype)
    return jax.lax.while_loop(lambda state: state[0] < chunks, advance, (jnp.int32(0), empty))[1]


def score(
    params: ServingParams,
    cache: Cache,  # one row, filled before `start`
    tokens: jax.Array,  # [1, C] int32, the tokens at positions start … start + C − 1
    targets: jax.Array,  # [C] int32, the next tokens
    start: jax.Array,  # scalar int32
    wanted: jax.Array,  # scalar bool; False returns zeros and skips the logits
    temperature: jax.Array,  # scalar float32, > 0
    *,
    config: ModelConfig,
) -> tuple[jax.Array, Cache]:
    """Score the tokens after a chunk of one sequence, and add the chunk to the cache.

        logprob_i = log softmax(logits_{start + i} / temperature)[target_i]

    Returns [C] float32 (nats, ≤ 0; or a reward model's values after the tokens), and the cache.
    """
    x, cache = _advance(params, config, cache, tokens, start)

    def logprobs():
        logits = _logits(params, config, x[0])
        if config.value_head:
            return logits[:, 0]
        logits = logits / temperature
        picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return picked - jax.nn.logsumexp(logits, axis=-1)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    return jax.lax.cond(wanted, logprobs, lambda: zeros), cache


def _advance(
    params: ServingParams, config: ModelConfig, cache: Cache, part: jax.Array, start: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return the last layer's output [P, C, D] for tokens [P, C] at `start` …, and the cache."""
    positions = start + jnp.arange(part.shape[1])
    angles = _angles(config, jnp.broadcast_to(positions, part.shape))
    x = embed_scale(config, params.embed[part])
    filled = []
    for layer, old, window in zip(params.layers, cache, config.layer_windows, strict=True):
        q, k, v = _qkv(layer, config, x, angles[window])
        keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        new = LayerCache(
            write(old.keys, keys, (0, 0, 0, start)), write(old.values, values, (0, 0, start, 0))
        )
        filled.append(new)
        mixed = _prompt_attention(q, new, start, window, config.attention_softcap)
        x = _finish_layer(layer, config, x, mixed)
    return x, tuple(filled)


def _prompt_attention(
    q: jax.Array, cache: LayerCache, start: jax.Array, window: int, softcap: float
) -> jax.Array:
    """Attend from queries [P, C, G·K, H] at positions start … to the cache → [P, C, G·K·H]."""
    prompts, chunk, heads, width = q.shape
    kv_heads, length = cache.keys.shape[1], cache.keys.shape[3]
    q = q.reshape(prompts, chunk, kv_heads, -1, width).transpose(0, 2, 3, 1, 4) * width**-0.5
    q = q.reshape(prompts, kv_heads, -1, width)  # one axis of queries: see _linear
    scores = jnp.einsum("pkqh,pkhs->pkqs", q, cache.keys, preferred_element_type=jnp.float32)
    mask = is_seen(start + jnp.arange(chunk)[:, None], jnp.arange(length), window)
    mask = jnp.tile(mask, (heads // kv_heads, 1))
    scores = jnp.where(mask, softcapped(scores, softcap), -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    weights = (weights / row_sum(weights)).astype(cache.values.dtype)
    mixed = jnp.einsum("pkqs,pksh->pkqh", weights, cache.values)
    mixed = mixed.reshape(prompts, kv_heads, -1, chunk, width).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(prompts, chunk, heads * width)


def step(
    params: ServingParams,
    config: ModelConfig,
    cache: Cache,  # [S, …, N], read only
    recent: Cache,  # keys and values of this call's tokens, R places
    index: jax.Array,  # scalar int32, 0 … R − 1
    tokens: jax.Array,  # [S] int32, tokens at positions `lengths + index`
    lengths: jax.Array,  # [S] int32, cached tokens at the start of the call
    angles: dict[int, tuple[jax.Array, jax.Array]],  # `_angles` of these positions
) -> tuple[jax.Array, Cache]:
    """Return the logits of the next token of every slot.

    Each slot attends to its first `lengths` cached tokens and to the first index + 1 tokens of
    `recent`. All slots write to `recent` at the same index, which needs no scatter. The two parts
    are added in the same order at every cache length, so a longer view changes no bit.

    The results are logits [S, V] float32, and `recent` with place `index` filled.
    """
    x = embed_scale(config, params.embed[tokens])
    filled, windows, softcap = [], config.layer_windows, config.attention_softcap
    for layer, cached, new, window in zip(params.layers, cache, recent, windows, strict=True):
        q, k, v = _qkv(layer, config, x, angles[window])
        new = LayerCache(
            write(new.keys, k[:, :, None, :], (0, 0, index, 0)),
            write(new.values, v[:, :, None, :], (0, 0, index, 0)),
        )
        filled.append(new)
        mixed = _cached_attention(q, cached, new, index, lengths, window, softcap)
        x = _finish_layer(layer, config, x, mixed)
    return _logits(params, config, x), tuple(filled)


def _cached_attention(
    q, cached: LayerCache, new: LayerCache, index, lengths, window: int, softcap: float
) -> jax.Array:
    """Attend from queries [S, G·K, H] to both parts of the cache → [S, G·K·H]."""
    slots, heads, width = q.shape
    kv_heads = cached.keys.shape[1]
    q = q.reshape(slots, kv_heads, heads // kv_heads, width) * width**-0.5

    def scores(layout, keys, mask):
        raw = jnp.einsum(layout, q, keys, preferred_element_type=jnp.float32)
        return jnp.where(mask[:, None, None], softcapped(raw, softcap), -jnp.inf)

    places, lengths = jnp.arange(cached.keys.shape[3]), lengths[:, None]
    in_cache = (places < lengths) & is_seen(lengths + index, places, window)
    old = scores("skgh,skhn->skgn", cached.keys, in_cache)
    in_new = is_seen(index, jnp.arange(new.keys.shape[2])[None], window)
    now = scores("skgh,skrh->skgr", new.keys, in_new)
    top = jnp.maximum(jnp.max(old, -1, keepdims=True), jnp.max(now, -1, keepdims=True))
    old, now = jnp.exp(old - top), jnp.exp(now - top)
    total = row_sum(old) + row_sum(now)

    def mix(weights, values):
        return jnp.einsum(
            "skgn,sknh->skgh", weights.astype(values.dtype), values,
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    mixed = (mix(old, cached.values) + mix(now, new.values)) / total
    return mixed.astype(cached.values.dtype).reshape(slots, heads * width)


class Block(NamedTuple):
    """Result of a decode call, in arrays of JAX or numpy; `counts` of a row are valid."""

    tokens: Any  # [S, R] int32
    logprobs: Any  # [S, R] float32, nats
    counts: Any  # [S] int32, in [0, R]
    kept: Any = None  # [S, R, W] uint8, the tokens drawn from as bits


def decode(
    params: ServingParams,
    config: ModelConfig,
    cache: Cache,  # read only
    tokens: jax.Array,  # [S] int32, each slot's last token, not yet in the cache
    lengths: jax.Array,  # [S] int32, tokens in the cache
    budgets: jax.Array,  # [S] int32, tokens a slot still wants; 0 for an idle slot
    stops: jax.Array,  # [S, M] int32, stop tokens; −1 for none
    # (logits [S, V], index) → sampled tokens and logprobs [S], with `masked` also `kept`
    choose: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
    steps: int,
    masked: bool = False,
) -> tuple[Block, Cache]:
    """Sample up to `steps` tokens for every slot; end early if no slot wants more.

    Returns the block, and new keys and values [S, …, steps] to `append` to the cache.
    """
    slots = tokens.shape[0]
    recent = init_recent(config, slots, steps, params.embed.dtype)
    block = Block(
        jnp.zeros((slots, steps), jnp.int32),
        jnp.zeros((slots, steps), jnp.float32),
        jnp.zeros((slots,), jnp.int32),
        jnp.zeros((slots, steps, -(-config.vocab_size // 8)), jnp.uint8) if masked else None,
    )

    # Not in the loop, where XLA would compute them in every layer.
    angles = _angles(config, lengths + jnp.arange(steps, dtype=jnp.int32)[:, None])

    def wanted(state):
        index, alive, *_ = state
        return (index < steps) & jnp.any(alive)

    def advance(state):
        index, alive, tokens, recent, block = state
        now = jax.tree.map(
            partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False), angles
        )
        logits, recent = step(params, config, cache, recent, index, tokens, lengths, now)
        choices, logprobs, *kept = choose(logits, index)

        def put(columns, column):
            return jax.lax.dynamic_update_slice_in_dim(columns, column[:, None], index, 1)

        block = Block(
            put(block.tokens, choices),
            put(block.logprobs, logprobs),
            block.counts + alive,
            put(block.kept, *kept) if masked else None,
        )
        stopped = jnp.any(choices[:, None] == stops, axis=-1)
        alive = alive & ~stopped & (block.counts < budgets)
        return index + 1, alive, choices, recent, block

    state = (jnp.int32(0), budgets > 0, tokens, recent, block)
    *_, recent, block = jax.lax.while_loop(wanted, advance, state)
    return block, recent
