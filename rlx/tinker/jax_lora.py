"""The trainer of Tinker's API in JAX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlx.model import compile_cache, decoder, hf, peft
from rlx.model import lora as lora_lib
from rlx.model.attention import attention_kind
from rlx.model.cross_entropy import target_logprobs
from rlx.model.lora_config import LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.tinker.lora_trainer import LoraState, LoraTrainer, Tensors, adamw
from rlx.tinker.target_rows import NO_TARGET, loss_of
from rlx.train.packing import segment_sizes


class JaxLora(LoraTrainer):
    """Trains on JAX's default device; adapters are stacked over layers."""

    adamw = staticmethod(jax.jit(adamw))

    def __init__(self, directory: Path, dtype: str, context: int):
        for name, value in compile_cache.options().items():
            jax.config.update(name, value)
        config, self._base = hf.load(directory, dtype)
        self.config = config.within(context)
        how = attention_kind(dtype, config.head_dim, config.attention_softcap)
        self._dtype, self._sizes_segments = dtype, how == "packed"

    def put(self, arrays: Mapping[str, np.ndarray], lora: LoraConfig) -> Tensors:
        return peft.from_peft(arrays, self.config, lora)["layers"]

    def get(self, tensors: Tensors, lora: LoraConfig) -> dict[str, np.ndarray]:
        return peft.to_peft({"layers": tensors}, self.config, lora).arrays()

    def microbatch(self, state: LoraState, loss: str, batch: Any, backward: bool) -> tuple:
        if self._sizes_segments:
            batch = batch | {"segment_sizes": segment_sizes(batch["segment_ids"])}
        args = self.config, state.lora, loss, self._dtype, state.adapters, self._base, batch
        if not backward:
            return *_losses(*args)[1], {}
        grads, both = _gradients(*args)
        return *both, grads


def _sum(
    config: ModelConfig, lora: LoraConfig, loss: str, dtype: str, adapters: Tensors, base: Params,
    batch: Any,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
    """Return the summed loss; log-probabilities and losses of the targets, [B, T, K] each."""
    full, targets = lora_lib.attach(base, {"layers": adapters}, lora), batch["targets"]
    x, _ = decoder.states(full, config, batch, remat="full", compute_dtype=jnp.dtype(dtype))
    x, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    logprobs, _ = target_logprobs(
        jnp.repeat(x, targets.shape[-1], axis=0), decoder.head(full, config),
        jnp.maximum(flat, 0), softcap=config.logit_softcap, scored=flat != NO_TARGET,
    )  # fmt: skip
    logprobs = logprobs.reshape(targets.shape)
    losses = jnp.where(targets != NO_TARGET, loss_of(loss, logprobs, batch), 0.0)
    return jnp.sum(losses), (logprobs, losses)


_losses = jax.jit(_sum, static_argnums=(0, 1, 2, 3))
_gradients = jax.jit(jax.grad(_sum, argnums=4, has_aux=True), static_argnums=(0, 1, 2, 3))
