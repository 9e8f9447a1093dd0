"""The decoder: a pure function of (params, tokens, positions, segment_ids).

Shapes: B rows, T tokens, D model width, N query heads, K key/value heads, H head width, F MLP
width, V vocabulary. Segments of a row do not see each other; segment 0 is padding.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rlx.model import kept_tokens, rope
from rlx.model import remat as remat_lib
from rlx.model.attention import attention, context_attention
from rlx.model.cross_entropy import target_logprobs
from rlx.model.experts import Routing, mixture
from rlx.model.model_config import ModelConfig
from rlx.model.ops import GATED, lookup, matmul, rms_norm, rotate, softcapped
from rlx.model.params import Params
from rlx.model.sharding import ONE_DEVICE, Layout, scattered_gradient, used

# attend(q_BTNH, k_BTKH, v_BTKH) -> mixed_BTNH
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def embed(
    params: Params, tokens: jax.Array, compute_dtype: Any, layout: Layout = ONE_DEVICE
) -> jax.Array:
    """Return token embeddings: [...] int32 → [..., D] compute_dtype."""
    place = layout.place("embed")

    def rows(table, tokens):
        return lookup(table, tokens, compute_dtype, place)

    return layout.rows(layout.per_shard(rows, params["embed"], place, tokens))


def embed_scale(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return token embeddings [..., D] as the first layer reads them."""
    return x * jnp.asarray(config.model_dim**0.5, x.dtype) if config.scaled_embedding else x


def rope_tables(
    config: ModelConfig, positions: jax.Array, window: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Return (cos, sin) of positions [...] int32, two [..., H/2] float32, for a `window`."""
    options = config.local_rope if window and config.local_rope else config.rope
    angles = positions[..., None].astype(jnp.float32) * rope.frequencies(options, config.head_dim)
    scale = rope.scale(options)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def linear(layer: Params, name: str, x: jax.Array, layout: Layout = ONE_DEVICE) -> jax.Array:
    """Return x @ layer[name], plus its adapter and bias where it has them, in x's dtype."""
    weight, rows = layer[name], layout.flat(x)
    y = matmul(rows, weight, layout.place(name))
    if (down := layer.get(f"{name}_lora_a")) is not None:  # see lora.attach
        inner = matmul(rows, down, layout.place(f"{name}_lora_a"))
        y = y + matmul(inner, layer[f"{name}_lora_b"], layout.place(f"{name}_lora_b"))
    if (bias := layer.get(f"{name}_bias")) is not None:
        y = y + bias.astype(x.dtype)
    return layout.unflat(y, x.shape[:-1])


def project_qkv(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layout: Layout = ONE_DEVICE,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [..., N, H], keys and values [..., K, H] of normed x [..., D], with RoPE."""
    heads = (*x.shape[:-1], -1, config.head_dim)
    q, k, v = (
        checkpoint_name(layout.heads(linear(layer, name, x, layout).reshape(heads)), "qkv")
        for name in ("q", "k", "v")
    )
    q, k = head_norm(layer, "q_norm", config, q), head_norm(layer, "k_norm", config, k)
    q = rotate(q, cos, sin)
    if config.query_factor != 1.0:
        q = q * jnp.asarray(config.query_factor, q.dtype)
    return q, rotate(k, cos, sin), v


def norm(layer: Params, name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return x [..., D] after the RMS norm `name` of a layer or model; x itself without one."""
    scale = layer.get(name)
    return x if scale is None else rms_norm(x, scale, config.rms_eps, config.norm_offset)


def head_norm(layer: Params, name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return heads [..., n, H] after `norm`: each by itself, or all of them as one vector."""
    if not config.joint_qk_norm:
        return norm(layer, name, config, x)
    return norm(layer, name, config, x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


def mlp(layer: Params, config: ModelConfig, x: jax.Array, layout: Layout = ONE_DEVICE) -> jax.Array:
    """Return the gated MLP: down(activation(gate x) · up x); [..., D] → [..., D]."""
    gate, up = (
        checkpoint_name(layout.columns(linear(layer, name, x, layout)), name)
        for name in ("gate", "up")
    )
    return linear(layer, "down", GATED[config.activation](gate, up), layout)


def layer_block(
    layer: Params,  # the layer's parameters: `params["layers"]` without the leading axis
    config: ModelConfig,
    x: jax.Array,  # [..., D] residual stream
    cos: jax.Array,  # cos, sin: [..., H/2] float32
    sin: jax.Array,
    attend: Attend,  # attention: q [..., N, H], k, v [..., K, H] → [..., N, H]
    layout: Layout = ONE_DEVICE,  # of the activations on a mesh
    valid: Any = None,  # [...] bool, tokens that are not padding; read by a mixture of experts
) -> tuple[jax.Array, Routing | None]:
    """Return the residual stream [..., D] after one decoder layer, and its experts' routing."""
    x = layout.stream(x)
    normed = layout.tokens(norm(layer, "input_norm", config, x))
    mixed = attend(*project_qkv(layer, config, normed, cos, sin, layout))
    mixed = layout.columns(mixed.reshape(*x.shape[:-1], config.num_heads * config.head_dim))
    mixed = checkpoint_name(layout.stream(linear(layer, "o", mixed, layout)), "o")
    x = x + norm(layer, "mixed_norm", config, mixed)
    normed, routing = layout.tokens(norm(layer, "post_norm", config, x)), None
    if config.num_experts:
        logits = linear(layer, "router", normed, layout)
        out, routing = mixture(layer, config, normed, logits, valid, layout)
    else:
        out = mlp(layer, config, normed, layout)
    return x + norm(layer, "mlp_norm", config, layout.stream(out)), routing


def head(params: Params, config: ModelConfig) -> jax.Array:
    """Return the output embedding [V, D]: its own matrix, or the token embedding when tied."""
    return params["embed"] if config.tie_embeddings else params["lm_head"]


def unembed(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return the logits [..., V] float32 of hidden states [..., D], as of `states`."""
    weights = head(params, config).astype(x.dtype)
    logits = jnp.einsum("...d,vd->...v", x, weights, preferred_element_type=jnp.float32)
    return softcapped(logits, config.logit_softcap)


def states(
    params: Params,
    config: ModelConfig,
    batch: Mapping[str, jax.Array],
    *,
    remat: str = "none",
    compute_dtype: Any = jnp.float32,
    layout: Layout = ONE_DEVICE,
    unrolled: bool = False,
) -> tuple[jax.Array, Routing | None]:
    """Return the hidden states of packed rows, after the final norm, and the experts' routing.

    Args:
      batch: [B, T] int32: tokens, in [0, V); positions, from 0 within each segment; segment_ids,
        equal ones attend to each other (causally), 0 is padding. Optional: segment_sizes [B, M]
        int32, see `packed_attention`; the arrays of trees as of `train.prefix_trees`, which are
        then computed in place of [B, T].
      remat: none (keep every intermediate for the backward pass) | a key of `remat.KEPT`.
      compute_dtype: of activations; parameters are cast where they are used.
      layout: of weights and activations on a mesh; row_shards divides B, 2 · context divides T.
      unrolled: whether layers follow each other without a loop, which would copy what it keeps.

    Returns:
      [B, T, D] compute_dtype, with a row's tokens in the order of `layout.balanced`; the routing of
      the L layers of a mixture of experts.
    """
    is_tree = "tree_tokens" in batch
    names = ("tree_tokens", "tree_positions") if is_tree else ("tokens", "positions")
    tokens, positions = (layout.balanced(batch[name]) for name in names)
    segment_ids, segment_sizes = layout.balanced(batch["segment_ids"]), batch.get("segment_sizes")
    valid = batch["tree_counts"] if is_tree else segment_ids > 0
    tree = (batch["tree_ends"], positions) if is_tree else None
    windows = sorted(set(config.layer_windows))
    ropes = [rope_tables(config, positions, window) for window in windows]

    def attend(window, q, k, v):
        options = {"window": window, "softcap": config.attention_softcap}
        if layout.context > 1:
            return context_attention(q, k, v, segment_ids, layout, **options)
        return attention(q, k, v, segment_ids, segment_sizes, layout, tree=tree, **options)

    attends = [partial(attend, window) for window in windows]
    if len(windows) == 1:

        def body(x, layer):
            return layer_block(layer, config, x, *ropes[0], attends[0], layout, valid)

        layers = params["layers"]
    else:  # windows differ: each layer carries the index of its window
        tables = [jnp.stack(each) for each in zip(*ropes, strict=True)]

        def body(x, layer):
            layer, kind = layer
            cos, sin = (table[kind] for table in tables)
            chosen = partial(jax.lax.switch, kind, attends)
            return layer_block(layer, config, x, cos, sin, chosen, layout, valid)

        kinds = [windows.index(window) for window in config.layer_windows]
        layers = params["layers"], jnp.asarray(kinds)

    if remat != "none":
        body = jax.checkpoint(body, policy=remat_lib.policy(remat), prevent_cse=unrolled)
    x = layout.stream(embed_scale(config, embed(params, tokens, compute_dtype, layout)))
    x, routing = jax.lax.scan(body, x, layers, unroll=unrolled)
    x = layout.tokens(norm(params, "final_norm", config, x))
    if is_tree:
        x = layout.rows(jax.vmap(lambda x, places: x[places])(x, batch["sources"]))
    return x, routing


def logprobs(
    params: Params,
    config: ModelConfig,
    batch: Mapping[str, jax.Array],
    *,
    x: jax.Array | None = None,
    temperature: float = 1.0,
    chunk: int = 0,
    scored: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
    **how: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return each token's log-probability given the earlier ones of its segment, and the entropy.

        logprob_t = log softmax(logits_{t−1} / temperature)[token_t]

    The only place that shifts tokens against logits. With the arrays of `kept_tokens` in the batch,
    softmax is over the tokens that token t was drawn from.

    Args:
      batch, how: as of `states`. x: its hidden states, if already computed.
      temperature: > 0; the one the tokens were sampled with.
      chunk: tokens whose logits exist at one time on a device; 0: as of `target_logprobs`.
      scored: [B, T] bool, tokens to score; None: all. Ignored on a mesh.

    Returns:
      Two [B, T] float32: log-probabilities (nats, ≤ 0) and entropies (nats, in [0, log V]) of the
      distribution token t was drawn from; 0 at a segment's first token and at padding.
    """
    tokens, segments = batch["tokens"], batch["segment_ids"]
    x = states(params, config, batch, layout=layout, **how)[0] if x is None else x
    targets = layout.balanced(jnp.roll(tokens, -1, axis=1))
    place = layout.place("embed" if config.tie_embeddings else "lm_head")

    kept = _kept_by_shard(batch, layout) if "kept_ids" in batch else ()

    def score(weights, x, targets, *more):
        masks, some = more[: len(kept)], more[len(kept) :]
        return target_logprobs(
            x, weights, targets, temperature=temperature, softcap=config.logit_softcap,
            chunk=chunk, scored=some[0] if some else None, place=place, kept=masks or None,
        )  # fmt: skip

    # On a mesh, the loops of all devices would wait for the one with most scored tokens.
    some = () if scored is None or layout.mesh is not None else (jnp.roll(scored, -1, axis=1),)
    # A chunk holds one device's tokens; otherwise each device would compute everybody's logits.
    both = layout.per_shard(score, head(params, config), place, x, targets, *kept, *some)
    logprob, entropy = map(layout.in_order, both)
    return shift(logprob, segments), shift(entropy, segments)


def _kept_by_shard(batch: Mapping[str, jax.Array], layout: Layout) -> tuple[jax.Array, ...]:
    """Return `kept` of `target_logprobs` for the targets of each shard, for `per_shard`."""
    ids, places, excluded = (batch[name] for name in kept_tokens.INPUTS)
    rows, length = excluded.shape
    size, own_rows = length // layout.context, rows // layout.row_shards
    slot = jnp.argsort(layout.balanced(jnp.arange(length)[None])[0])[places - 1]
    first = (jnp.arange(rows) % own_rows * size)[:, None]
    owners = [  # a row's devices each have all of its ids
        jnp.where((places > 0) & (slot // size == part), first + slot % size, own_rows * size)
        for part in range(layout.context)
    ]
    excluded = layout.balanced(jnp.roll(excluded, -1, axis=1))
    return jnp.tile(ids, layout.context), jnp.concatenate(owners, axis=1), excluded


def values(
    params: Params,  # of a config with `value_head`
    config: ModelConfig,
    batch: Mapping[str, jax.Array],  # batch, how: as of `states`
    *,
    x: jax.Array | None = None,  # its hidden states, if already computed
    layout: Layout = ONE_DEVICE,
    **how: Any,
) -> jax.Array:
    """Return the value head's output, V after each token: [B, T] float32, 0 at padding.

    `shift` turns it into V of the state in which token t was chosen.
    """
    x = states(params, config, batch, layout=layout, **how)[0] if x is None else x
    place = layout.place("value_head")
    weights = used(scattered_gradient(params["value_head"], place), x.dtype, place)[0]
    scores = jnp.einsum("btd,d->bt", x, weights, preferred_element_type=jnp.float32)
    return jnp.where(batch["segment_ids"] > 0, layout.in_order(scores), 0.0)


def shift(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Return x of each token's predecessor in its segment: [B, T], 0 at a segment's first token."""
    first = jnp.zeros_like(segment_ids[:, :1], bool)
    same = jnp.concatenate([first, segment_ids[:, 1:] == segment_ids[:, :-1]], axis=1)
    return jnp.where(same & (segment_ids > 0), jnp.roll(x, 1, axis=1), 0.0)


# For rlx.mismatch; `scorer` is a `measure.TrainerScorer`.


@partial(jax.jit, static_argnums=2)
def row_logprobs(params: Params, batch: Any, scorer: Any) -> jax.Array:
    """Return the log-probabilities of rows' tokens, [B, T] float32, by a TrainerScorer."""
    return logprobs(
        params, scorer.model, batch,
        temperature=scorer.temperature, compute_dtype=jnp.dtype(scorer.compute_dtype),
        chunk=scorer.chunk,
    )[0]  # fmt: skip


@partial(jax.jit, static_argnums=3)
def row_logits(params: Params, batch: Any, index: Any, scorer: Any) -> jax.Array:
    """Return the logits after the flat positions `index` of rows, [N, V] float32."""
    x, _ = states(params, scorer.model, batch, compute_dtype=jnp.dtype(scorer.compute_dtype))
    return unembed(params, scorer.model, x.reshape(-1, x.shape[-1])[index])
