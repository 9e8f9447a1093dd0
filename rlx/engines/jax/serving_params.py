"""Weights as the JAX engine reads them, made of HF's tensors.

They are per layer (a scan would copy every layer's slice at every step), fused (q, k, v; gate and
up) and stored [out, in]: XLA's CPU matrix product then adds in one order whatever the number of
rows, which keeps a completion independent of its batch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig


class ServingParams(NamedTuple):
    """Weights as the engine reads them; every matrix is [out, in].

    Attributes:
      embed, head: [V, D] (the same array when tied; of a reward model's head [1, D]).
      final_norm: [D].
      layers: per layer, `qkv` [(G·K + 2·K)·H, D], `o`, `gate_up` [2·F, D], `down`, and where the
        model has them `qkv_bias`, `o_bias`, `q_norm`, `k_norm` and the norms of `params.NORMS`. Of
        a mixture `router` [E, D]; F then are the columns of all E experts.
    """

    embed: jax.Array
    layers: tuple[dict[str, jax.Array], ...]
    final_norm: jax.Array
    head: jax.Array


def serving_params(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, dtype: Any
) -> ServingParams:
    """Return HF's tensors in serving layout: q, k, v joined as `qkv`, gate, up as `gate_up`.

    Args:
      tensors: HF's names and layouts ([out, in]), already checked against `config`
        (rlx.model.hf_files.check_tensors); each is read once, so it may be lazy.
      dtype: of the result, and of the engine's activations and cache.

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
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
        return jnp.asarray(np.ascontiguousarray(whole, dtype))

    def layer(index):
        joined = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
        if config.attention_bias:
            joined["qkv_bias"] = ("q_bias", "k_bias", "v_bias")
        norms = (*parameters.NORMS[config.norms], "q_norm", "k_norm")
        alone = (*norms, "o", "o_bias", "down", "router")
        joined |= {name: (name,) for name in alone if name in rows}
        experts = {}
        if config.num_experts:
            everyone = range(index * config.num_experts, (index + 1) * config.num_experts)
            both = [read(name, i) for name in ("expert_gate", "expert_up") for i in everyone]
            down = [read("expert_down", i) for i in everyone]
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
