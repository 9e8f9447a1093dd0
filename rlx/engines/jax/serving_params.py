"""HF's weights in the JAX engine's layout.

One array per layer, because a scan would copy slices at every step. q, k, v are fused, and gate
and up. Matrices are [out, in], for which XLA's CPU product adds in one order for any number of
rows. So a completion does not depend on its batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig


class ServingParams(NamedTuple):
    """Weights; every matrix is [out, in]."""

    embed: jax.Array  # [V, D]
    # Per layer, `qkv` [(G·K + 2·K)·H, D], `o`, `gate_up` [2·F, D] and `down`. Optional: biases,
    # norms, and a mixture's `router` [E, D], with F the columns of all E experts.
    layers: tuple[dict[str, jax.Array], ...]
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D], None if tied; a reward model's is [1, D]


def serving_params(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, dtype: Any
) -> ServingParams:
    """Return HF's tensors in the serving layout, of `dtype`; ValueError for NaN or infinity.

    `tensors`: HF name → [out, in], checked by directory.check_tensors; each is read once.
    """

    def read(row, index):
        full = row.names[index]
        tensor = np.asarray(tensors[full])[row.part]
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"tensor {full!r} is {tensor.dtype}; publish floating point weights")
        if not np.isfinite(tensor).all():
            raise ValueError(f"tensor {full!r} is not finite; publish finite weights")
        return tensor

    def put(parts, axis):
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
        return jnp.asarray(np.ascontiguousarray(joined, dtype))

    return _layout(config, read, put)


def shapes(config: ModelConfig, dtype: Any) -> ServingParams:
    """Return the serving layout with a `jax.ShapeDtypeStruct` for each array."""

    def read(row, index):
        return (row.shape[-1], *row.hf_shape[1:]) if row.joined_size else row.hf_shape

    def put(parts, axis):
        joined = (*parts[0][:axis], sum(part[axis] for part in parts), *parts[0][axis + 1 :])
        return jax.ShapeDtypeStruct(joined, dtype)

    return _layout(config, read, put)


def _layout(
    config: ModelConfig,
    read: Callable[[parameters.Row, int], Any],
    put: Callable[[Sequence[Any], int], Any],
) -> ServingParams:
    """Return the layout of what `put` makes of parts, joined along an axis, that `read` gives."""
    rows = {row.path[-1]: row for row in parameters.table(config)}

    def joined(*names, index=0):
        return put([read(rows[name], index) for name in names], 0)

    def layer(index):
        parts = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
        if config.attention_bias:
            parts["qkv_bias"] = ("q_bias", "k_bias", "v_bias")
        norms = (*parameters.NORMS[config.norms], "q_norm", "k_norm")
        single = (*norms, "o", "o_bias", "down", "router")
        parts |= {name: (name,) for name in single if name in rows}
        experts = {}
        if config.num_experts:
            numbers = range(index * config.num_experts, (index + 1) * config.num_experts)
            both = [read(rows[f"expert_{x}"], i) for x in ("gate", "up") for i in numbers]
            down = [read(rows["expert_down"], i) for i in numbers]
            experts = {"gate_up": put(both, 0), "down": put(down, 1)}
            del parts["gate_up"]
        return experts | {key: joined(*names, index=index) for key, names in parts.items()}

    return ServingParams(
        embed=joined("embed"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=joined("final_norm"),
        head=next((joined(name) for name in ("value_head", "lm_head") if name in rows), None),
    )
