"""HF's weights in the JAX engine's layout.

One array per layer, because a scan would copy slices at every step. q, k, v are fused, and gate
and up. Matrices are [out, in], for which XLA's CPU product adds in one order for any number of
rows. So a completion does not depend on its batch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig


class ServingParams(NamedTuple):
    """Weights; every matrix is [out, in].

    Attributes:
      embed, head: [V, D], the same array if tied; a reward model's head is [1, D].
      final_norm: [D].
      layers: per layer, `qkv` [(G·K + 2·K)·H, D], `o`, `gate_up` [2·F, D] and `down`. Optional:
        biases, norms, and a mixture's `router` [E, D], with F the columns of all E experts.
    """

    embed: jax.Array
    layers: tuple[dict[str, jax.Array], ...]
    final_norm: jax.Array
    head: jax.Array


def serving_params(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, dtype: Any
) -> ServingParams:
    """Return HF's tensors in the serving layout.

    Args:
      tensors: HF name → [out, in], checked by directory.check_tensors; each is read once.
      dtype: dtype of the result.

    Raises:
      ValueError: a tensor has NaN or infinity.
    """
    rows = {row.path[-1]: row for row in parameters.table(config)}

    def read(name, index=0):
        full = rows[name].names[index]
        tensor = np.asarray(tensors[full])[rows[name].part]
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"tensor {full!r} is {tensor.dtype}; publish floating point weights")
        if not np.isfinite(tensor).all():
            raise ValueError(f"tensor {full!r} is not finite; publish finite weights")
        return tensor

    def put(*parts, axis=0):
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
        return jnp.asarray(np.ascontiguousarray(joined, dtype))

    def layer(index):
        joined = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
        if config.attention_bias:
            joined["qkv_bias"] = ("q_bias", "k_bias", "v_bias")
        norms = (*parameters.NORMS[config.norms], "q_norm", "k_norm")
        single = (*norms, "o", "o_bias", "down", "router")
        joined |= {name: (name,) for name in single if name in rows}
        experts = {}
        if config.num_experts:
            numbers = range(index * config.num_experts, (index + 1) * config.num_experts)
            both = [read(name, i) for name in ("expert_gate", "expert_up") for i in numbers]
            down = [read("expert_down", i) for i in numbers]
            experts = {"gate_up": put(*both), "down": put(*down, axis=1)}
            del joined["gate_up"]
        return experts | {
            key: put(*(read(n, index) for n in parts)) for key, parts in joined.items()
        }

    embed = put(read("embed"))
    return ServingParams(
        embed=embed,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=put(read("final_norm")),
        head=next((put(read(n)) for n in ("value_head", "lm_head") if n in rows), embed),
    )
