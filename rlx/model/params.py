"""Table of the parameters, one row each: shapes, sharding and HF's names follow from it.

Parameters are a nested dict, stacked over layers on axis 0 and over experts on axis 1. JAX is
imported only by functions that make arrays.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx.base import UserError
from rlx.model.model_config import ModelConfig

if TYPE_CHECKING:
    import jax

Params = dict[str, Any]
# Experts' names in the pytree are `expert_gate` and so on.
MLP = {"gate": ("model", "mlp"), "up": ("model", "mlp"), "down": ("mlp", "model")}


class Row(NamedTuple):
    """One parameter."""

    path: tuple[str, ...]  # keys in the nested dict; `("layers", …)` rows have a layer axis first
    axes: tuple[str, ...]  # logical axis names, the layer axis first where there is one
    hf: str  # HF's name, with `{}` for the layer's index, and for the expert's
    transposed: bool  # HF stores the matrix as [out, in]; here it is [in, out]
    kind: str  # initialisation: `matrix` (normal), `ones`, `zeros`
    shape: tuple[int, ...] = ()  # in the pytree, the size of each axis
    begin: int = 0  # first row of this matrix in a tensor where HF joins several
    joined_size: int = 0  # that tensor's rows; 0: it is only this matrix

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def depth(self) -> int:
        """Number of stacked axes: layers, and experts."""
        return sum(axis in ("layers", "experts") for axis in self.axes)

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Index in the array of each of `names`: its layer, or its layer and expert."""
        return list(product(*map(range, self.shape[: self.depth])))

    @property
    def names(self) -> list[str]:
        """Names of HF's tensors: one in all, one a layer, or one an expert of each layer."""
        return [self.hf.format(*place) for place in self.places]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of each of HF's tensors."""
        inner = self.shape[self.depth :]
        shape = inner[::-1] if self.transposed else inner
        return (self.joined_size, *shape[1:]) if self.joined_size else shape

    @property
    def part(self) -> slice:
        """Rows of each of HF's tensors that belong to this parameter."""
        return slice(self.begin, self.begin + self.shape[-1]) if self.joined_size else slice(None)

    def sized(self, sizes: Mapping[str, int]) -> "Row":
        """Return the row with its shape filled in."""
        return self._replace(shape=tuple(sizes[axis] for axis in self.axes))


def table(config: ModelConfig) -> tuple[Row, ...]:
    """Return the rows of every parameter that a model of this config has."""
    rows = [
        Row(("embed",), ("vocab", "model"), "model.embed_tokens.weight", False, "matrix"),
        *_norms(config, "input_norm"),
        *_linear("q", ("model", "heads"), "self_attn.q_proj", config.attention_bias),
        *_linear("k", ("model", "kv_heads"), "self_attn.k_proj", config.attention_bias),
        *_linear("v", ("model", "kv_heads"), "self_attn.v_proj", config.attention_bias),
        *_linear("o", ("heads", "model"), "self_attn.o_proj", config.output_bias),
        *_norms(config, "mixed_norm", "post_norm"),
        *_mlp(config),
        *_norms(config, "mlp_norm"),
        Row(("final_norm",), ("model",), "model.norm.weight", False, "ones"),
    ]
    if config.qk_norm:
        heads = ("heads", "kv_heads") if config.joint_qk_norm else ("head_dim", "head_dim")
        rows += [
            _norm(f"{x}_norm", axis, f"self_attn.{x}_norm")
            for x, axis in zip("qk", heads, strict=True)
        ]
    if config.value_head:
        # Zeros, so that all values are 0 at first.
        rows += [Row(("value_head",), ("values", "model"), "score.weight", False, "zeros")]
    elif not config.tie_embeddings:
        rows += [Row(("lm_head",), ("vocab", "model"), "lm_head.weight", False, "matrix")]
    sizes = axis_sizes(config)
    if config.norm_offset:  # weight 0 then means scale 1
        rows = [row._replace(kind="zeros") if row.kind == "ones" else row for row in rows]
    rows = [row.sized(sizes) for row in rows]
    return tuple(_fused(rows) if config.fused else rows)


# HF's name of a joined matrix → ours of its parts, in the order of their rows.
FUSED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}


def _fused(rows: list[Row]) -> list[Row]:
    by_name = {row.path[-1]: row for row in rows}
    for hf, names in FUSED.items():
        sizes = [by_name[name].shape[-1] for name in names]
        for i, name in enumerate(names):
            by_name[name] = by_name[name]._replace(
                hf=f"model.layers.{{}}.{hf}.weight", begin=sum(sizes[:i]), joined_size=sum(sizes)
            )
    return list(by_name.values())


# ModelConfig.norms → our name of a norm → HF's. Attention reads input_norm and is followed by
# mixed_norm; the MLP reads post_norm and is followed by mlp_norm.
NORMS = {
    "before": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "after": {"mixed_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm", "mixed_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm", "mlp_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip


def _norms(config: ModelConfig, *names: str) -> list[Row]:
    hf_names = NORMS[config.norms]
    return [_norm(name, "model", hf_names[name]) for name in names if name in hf_names]


def _norm(name: str, axis: str, hf: str) -> Row:
    return Row(("layers", name), ("layers", axis), f"model.layers.{{}}.{hf}.weight", False, "ones")


def _mlp(config: ModelConfig) -> list[Row]:
    if not config.num_experts:
        return [row for x, axes in MLP.items() for row in _linear(x, axes, f"mlp.{x}_proj")]
    rows = _linear("router", ("model", "routes"), "mlp.gate")
    for name, axes in MLP.items():
        hf = f"model.layers.{{}}.mlp.experts.{{}}.{name}_proj.weight"
        path = ("layers", f"expert_{name}")
        rows += [Row(path, ("layers", "experts", *axes), hf, True, "matrix")]
    return rows


def _linear(name: str, axes: tuple[str, str], hf: str, bias: bool = False) -> list[Row]:
    prefix = f"model.layers.{{}}.{hf}"
    rows = [Row(("layers", name), ("layers", *axes), f"{prefix}.weight", True, "matrix")]
    if bias:
        path = ("layers", f"{name}_bias")
        rows += [Row(path, ("layers", axes[1]), f"{prefix}.bias", False, "zeros")]
    return rows


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the size of each logical axis; `heads`, `kv_heads` count columns: heads · head_dim."""
    return {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "values": 1,
        "model": config.model_dim,
        "mlp": config.expert_dim or config.mlp_dim,
        "experts": config.num_experts,
        "routes": config.num_experts,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }


def shapes(config: ModelConfig, dtype: Any = "float32", rows: Sequence[Row] = ()) -> Params:
    """Return the pytree of `jax.ShapeDtypeStruct` of a model, or of other `rows`."""
    import jax

    rows = rows or table(config)
    return build({row.path: jax.ShapeDtypeStruct(row.shape, dtype) for row in rows})


def init(config: ModelConfig, key: "jax.Array", dtype: Any = "float32") -> Params:
    """Return random parameters: matrices N(0, initializer_range²), norms one, biases zero."""
    import jax
    import jax.numpy as jnp

    rows = table(config)
    leaves = {}
    for row, row_key in zip(rows, jax.random.split(key, len(rows)), strict=True):
        if row.kind == "matrix":
            noise = jax.random.normal(row_key, row.shape, jnp.float32)
            leaves[row.path] = (noise * config.initializer_range).astype(dtype)
        else:
            leaves[row.path] = jnp.full(row.shape, row.kind == "ones", dtype)
    return build(leaves)


def with_value_head(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Return `params` with a value head of zeros, sharing arrays, and the config with it."""
    import jax.numpy as jnp

    config = dataclasses.replace(config, value_head=True)
    head = jnp.zeros((1, config.model_dim), params["embed"].dtype)
    rows = [row for row in table(config) if row.path != ("value_head",)]
    return build({("value_head",): head, **{row.path: leaf(params, row) for row in rows}}), config


def build(leaves: dict[tuple[str, ...], Any]) -> Params:
    """Return the nested dict of leaves given by path."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def leaf(params: Params, row: Row) -> Any:
    """Return the row's parameter in the pytree."""
    node = params
    for name in row.path:
        node = node[name]
    return node


def count(config: ModelConfig) -> int:
    """Return the number of parameters, tied embeddings once."""
    return config.numbers or sum(math.prod(row.shape) for row in table(config))


# Time of attention per FLOP over that of matrix products. Measured on a CPU: a 4-layer model 256
# wide takes 1.35 times as long per token in rows of 512 as in rows of 128.
ATTENTION_SLOWDOWN = {"cpu": 2.0}


def attention_cost(config: ModelConfig, platform: str = "gpu") -> float:
    """Return the time of attention per token and key over that of everything else per token."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return ATTENTION_SLOWDOWN.get(platform, 1.0) * attention / (2 * _num_multiplied(config))


def forward_flops(config: ModelConfig, lengths: np.ndarray) -> float:
    """Return the FLOPs of the products of a forward pass; a backward pass has twice as many.

        2 · weights · tokens + 4 · heads · head width · Σ over layers and queries of visible keys

    Source: appendix B of PaLM (arXiv 2204.02311), with causal attention; lengths: [N], tokens.
    """
    sizes, keys = np.asarray(lengths, np.float64), 0.0
    for window, layers in Counter(config.layer_windows).items():
        reach = np.minimum(sizes, window or np.inf)
        keys += layers * (reach * (reach + 1) / 2 + (sizes - reach) * reach).sum()
    products = 2 * _num_multiplied(config) * sizes.sum()
    return float(products + 4 * config.num_heads * config.head_dim * keys)


def _num_multiplied(config: ModelConfig) -> int:
    """Return the number of weights in one token's products: head included, idle experts not."""
    matrices = (math.prod(row.shape) for row in table(config) if row.kind == "matrix")
    embedding = config.vocab_size * config.model_dim  # looked up; a tied one is the head too
    looked_up = 0 if config.tie_embeddings and not config.value_head else embedding
    idle = config.num_layers * (config.num_experts - config.experts_per_token)
    idle *= 3 * config.model_dim * config.expert_dim
    return (config.numbers or sum(matrices)) - looked_up - idle


def check_shape(name: str, got: tuple[int, ...], row: Row) -> None:
    """Raise UserError unless a tensor has its row's shape."""
    if got != row.hf_shape:
        raise UserError(
            f"tensor {name!r} has shape {got}, config.json wants {row.hf_shape}; get both again, "
            "from one and the same model"
        )
