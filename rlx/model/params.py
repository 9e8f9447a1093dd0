"""The table of parameters: one row each, and everything that follows from it.

A row gives the path in the pytree, the logical axes (whose sizes give the shape and whose names
the sharding), HF's tensor name, and how HF lays it out. Initialisation, sharding and both HF
directions read this table and nothing else. Parameters are a nested dict; those of the layers
are stacked on axis 0.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlx.model.model_config import ModelConfig

Params = dict[str, Any]


class Row(NamedTuple):
    """One parameter.

    Attributes:
      path: keys in the nested dict; `("layers", …)` rows carry a leading layer axis.
      axes: logical axis names, the layer axis first where there is one.
      hf: HF's name, with `{}` for the layer index.
      transposed: HF stores the matrix as [out, in]; here it is [in, out].
      kind: how it starts: `matrix` (normal), `ones`, `zeros`.
    """

    path: tuple[str, ...]
    axes: tuple[str, ...]
    hf: str
    transposed: bool
    kind: str

    @property
    def stacked(self) -> bool:
        """True for a parameter of the layers."""
        return self.axes[0] == "layers"


def table(config: ModelConfig) -> tuple[Row, ...]:
    """The rows of every parameter that a model of this config has."""
    rows = [
        Row(("embed",), ("vocab", "model"), "model.embed_tokens.weight", False, "matrix"),
        _norm("input_norm", "model", "input_layernorm"),
        *_linear("q", ("model", "heads"), "self_attn.q_proj", config.attention_bias),
        *_linear("k", ("model", "kv_heads"), "self_attn.k_proj", config.attention_bias),
        *_linear("v", ("model", "kv_heads"), "self_attn.v_proj", config.attention_bias),
        *_linear("o", ("heads", "model"), "self_attn.o_proj", config.output_bias),
        _norm("post_norm", "model", "post_attention_layernorm"),
        *_linear("gate", ("model", "mlp"), "mlp.gate_proj"),
        *_linear("up", ("model", "mlp"), "mlp.up_proj"),
        *_linear("down", ("mlp", "model"), "mlp.down_proj"),
        Row(("final_norm",), ("model",), "model.norm.weight", False, "ones"),
    ]
    if config.qk_norm:
        rows += [_norm("q_norm", "head_dim", "self_attn.q_norm")]
        rows += [_norm("k_norm", "head_dim", "self_attn.k_norm")]
    if config.value_head:
        # A row of its own kind: it begins at zero, so that values do.
        rows += [Row(("value_head",), ("values", "model"), "score.weight", False, "zeros")]
    elif not config.tie_embeddings:
        rows += [Row(("lm_head",), ("vocab", "model"), "lm_head.weight", False, "matrix")]
    return tuple(rows)


def _norm(name: str, axis: str, hf: str) -> Row:
    return Row(("layers", name), ("layers", axis), f"model.layers.{{}}.{hf}.weight", False, "ones")


def _linear(name: str, axes: tuple[str, str], hf: str, bias: bool = False) -> list[Row]:
    prefix = f"model.layers.{{}}.{hf}"
    rows = [Row(("layers", name), ("layers", *axes), f"{prefix}.weight", True, "matrix")]
    if bias:
        path = ("layers", f"{name}_bias")
        rows += [Row(path, ("layers", axes[1]), f"{prefix}.bias", False, "zeros")]
    return rows


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Size of each logical axis; `heads` and `kv_heads` count columns: heads · head_dim."""
    return {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "values": 1,
        "model": config.model_dim,
        "mlp": config.mlp_dim,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }


def shape(config: ModelConfig, row: Row) -> tuple[int, ...]:
    """The row's shape in the pytree."""
    sizes = axis_sizes(config)
    return tuple(sizes[axis] for axis in row.axes)


def shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The pytree of `jax.ShapeDtypeStruct` of a model, without allocating it."""
    return build(
        {row.path: jax.ShapeDtypeStruct(shape(config, row), dtype) for row in table(config)}
    )


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: matrices N(0, initializer_range²), norms one, biases zero."""
    rows = table(config)
    leaves = {}
    for row, row_key in zip(rows, jax.random.split(key, len(rows)), strict=True):
        size = shape(config, row)
        if row.kind == "matrix":
            noise = jax.random.normal(row_key, size, jnp.float32)
            leaves[row.path] = (noise * config.initializer_range).astype(dtype)
        else:
            leaves[row.path] = jnp.full(size, row.kind == "ones", dtype)
    return build(leaves)


def with_value_head(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """A critic or reward model that begins as a copy of a policy: its decoder, and a head of zeros.

    Returns:
      The parameters of `config` with `value_head`, sharing arrays with `params`; that config.
    """
    config = dataclasses.replace(config, value_head=True)
    head = jnp.zeros((1, config.model_dim), params["embed"].dtype)
    rows = [row for row in table(config) if row.path != ("value_head",)]
    return build({("value_head",): head, **{row.path: leaf(params, row) for row in rows}}), config


def build(leaves: dict[tuple[str, ...], Any]) -> Params:
    """The nested dict of leaves given by path (at most two keys deep)."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def leaf(params: Params, row: Row) -> Any:
    """The row's parameter in the pytree."""
    node = params
    for name in row.path:
        node = node[name]
    return node


def count(config: ModelConfig) -> int:
    """How many numbers the model has (tied embeddings once)."""
    return sum(math.prod(shape(config, row)) for row in table(config))
