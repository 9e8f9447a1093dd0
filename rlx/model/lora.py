"""LoRA (arXiv 2106.09685): small trained matrices added to frozen ones of the decoder.

    y = x·W + (alpha / rank) · (x·A)·B        A: [in, rank], B: [rank, out]

Adapters have the parameters' structure, stacked over layers. `attach` puts them into the base's
pytree, where `decoder.linear` finds them; `merge` adds them to the matrices. I/O is in peft.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import params as parameters
from rlx.model.lora_config import LoraConfig
from rlx.model.lora_config import count as count
from rlx.model.lora_config import table as table
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params


def init(config: ModelConfig, lora: LoraConfig, key: jax.Array) -> Params:
    """Return adapters that add nothing, float32: A uniform in ±1/√in, B zero, as PEFT does."""
    rows = table(config, lora)
    leaves = {}
    for row, row_key in zip(rows, jax.random.split(key, len(rows)), strict=True):
        if row.kind == "zeros":
            leaves[row.path] = jnp.zeros(row.shape, jnp.float32)
        else:
            bound = row.shape[1] ** -0.5
            leaves[row.path] = jax.random.uniform(row_key, row.shape, jnp.float32, -bound, bound)
    return parameters.build(leaves)


def attach(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """Return parameters that compute x·W + scale·(x·A)·B; the base is not copied."""
    pairs = {
        name: leaf * lora.scale if name.endswith("_lora_b") else leaf
        for name, leaf in _single(base, adapters).items()
    }
    return {**base, "layers": {**base["layers"], **pairs}}


def merge(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """Return plain parameters W + scale·A·B, added in float32 and cast back to W's dtype."""
    layers, pairs = dict(base["layers"]), _single(base, adapters)
    for name in lora.targets:
        pair = pairs[f"{name}_lora_a"], pairs[f"{name}_lora_b"]
        layers[name] = merged(layers[name], *pair, lora.scale)
    return {**base, "layers": layers}


def _single(base: Params, adapters: Params) -> Params:
    """Return the adapters of each matrix; joined matrices share A, and each has a part of B."""
    pairs = dict(adapters["layers"])
    for hf, names in parameters.FUSED.items():
        joined = hf.split(".")[1].removesuffix("_proj")
        if (down := pairs.pop(f"{joined}_lora_a", None)) is not None:
            ends = np.cumsum([base["layers"][name].shape[-1] for name in names])
            parts = jnp.split(pairs.pop(f"{joined}_lora_b"), ends[:-1], axis=-1)
            for name, up in zip(names, parts, strict=True):
                pairs |= {f"{name}_lora_a": down, f"{name}_lora_b": up}
    return pairs


@jax.jit
def merged(weight: Any, down: Any, up: Any, scale: Any) -> jax.Array:
    """Return W + scale·A·B of L layers: [L, in, out], [L, in, rank] and [L, rank, out]."""
    exact = jax.lax.Precision.HIGHEST  # GPUs would round the factors to fewer bits
    change = jnp.einsum("lir,lro->lio", down, up, precision=exact)
    return (weight.astype(jnp.float32) + scale * change).astype(weight.dtype)
