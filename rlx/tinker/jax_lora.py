"""The trainer of Tinker's API in JAX: one frozen base, and adapters of any rank for each client."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from rlx.base import UserError
from rlx.model import compile_cache, decoder, hf, peft
from rlx.model import lora as lora_lib
from rlx.model.attention import attention_kind
from rlx.model.cross_entropy import target_logprobs
from rlx.model.lora_config import LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.model.tensors import open_tensors, save_tensors
from rlx.tinker.target_rows import NO_TARGET, TargetRows
from rlx.tinker.token_losses import LOSSES
from rlx.train.packing import segment_sizes

ADAPTER = "adapter"  # PEFT's directory in that of a saved state
_MOMENTS = ("mu", "nu")  # optax's names of Adam's first and second
ADAM = {  # options of a step with defaults; an update is that of torch.optim.AdamW
    "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip


@dataclass(eq=False)
class LoraState:
    """A client's adapters, float32, with Adam's moments and the gradient since the last step."""

    lora: LoraConfig
    adapters: Params
    moments: Any
    grads: Params

    @classmethod
    def of(cls, lora: LoraConfig, adapters: Params) -> "LoraState":
        """Return the state of adapters that have not been trained."""
        zeros = jax.tree.map(jnp.zeros_like, adapters)
        return cls(lora, adapters, optax.scale_by_adam().init(adapters), zeros)

    def step(self, options: Mapping[str, float]) -> float:
        """Make one update and forget the gradient; return its norm before clipping.

        UserError if the gradient is not finite; the adapters then stay as they are.
        """
        norm = float(optax.tree.norm(self.grads))
        if not np.isfinite(norm):
            self.grads = jax.tree.map(jnp.zeros_like, self.grads)
            raise UserError("the gradient is not finite, nothing changed; lower learning_rate")
        state = self.adapters, self.moments, self.grads
        self.adapters, self.moments, self.grads = _adamw(*state, {**ADAM, **options}, norm)
        return norm

    def save(self, path: Path, config: ModelConfig, base: str, moments: bool) -> None:
        """Write PEFT's directory into `path`, which belongs to model `base`, and the moments."""
        peft.save(path / ADAPTER, config, self.lora, self.adapters, base)
        for name in _MOMENTS if moments else ():
            tensors = peft.to_peft(getattr(self.moments, name), config, self.lora)
            save_tensors(tensors, path / f"{name}.safetensors")

    @classmethod
    def load(cls, path: Path, config: ModelConfig, updates: int = 0) -> "LoraState":
        """Read what `save` wrote, with moments after `updates` of them; UserError if unfit."""
        state = cls.of(*peft.load(path / ADAPTER, config))
        if updates:
            found = {"count": jnp.int32(updates)}
            for name in _MOMENTS:
                with open_tensors(path / f"{name}.safetensors") as tensors:
                    found[name] = peft.from_peft(tensors, config, state.lora)
            state.moments = state.moments._replace(**found)
        return state


class JaxLora:
    """Computes losses and gradients of adapters, on JAX's default device."""

    def __init__(self, directory: Path, dtype: str, context: int):
        for name, value in compile_cache.options().items():
            jax.config.update(name, value)
        config, self._base = hf.load(directory, dtype)
        self.config: ModelConfig = config.within(context)
        how = attention_kind(dtype, config.head_dim, config.attention_softcap)
        self._dtype, self._sizes_segments = dtype, how == "packed"

    def fresh(self, lora: LoraConfig, seed: int) -> LoraState:
        """Return adapters that add nothing; UserError if the model has no such matrices."""
        return LoraState.of(lora, lora_lib.init(self.config, lora, jax.random.key(seed)))

    def run(
        self, state: LoraState, loss: str, rows: TargetRows, backward: bool
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the targets' log-probabilities and losses of each microbatch, [B, T, K] float32.

        With `backward` the gradient of the summed loss is added to the state's.
        """
        how, found, sums = (self.config, state.lora, loss, self._dtype), [], state.grads
        for batch in rows.batches:
            if self._sizes_segments:
                batch = batch | {"segment_sizes": segment_sizes(batch["segment_ids"])}
            if backward:
                grads, both = _gradients(*how, state.adapters, self._base, batch)
                sums = jax.tree.map(jnp.add, sums, grads)
            else:
                both = _losses(*how, state.adapters, self._base, batch)[1]
            found.append(both)
        results = jax.device_get(found)  # all or nothing: an error leaves the gradient as it was
        state.grads = sums
        return results


def _sum(
    config: ModelConfig, lora: LoraConfig, loss: str, dtype: str, adapters: Params, base: Params,
    batch: Any,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
    """Return the summed loss; log-probabilities and losses of the targets, [B, T, K] each."""
    full, targets = lora_lib.attach(base, adapters, lora), batch["targets"]
    x, _ = decoder.states(full, config, batch, remat="full", compute_dtype=jnp.dtype(dtype))
    x, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    logprobs, _ = target_logprobs(
        jnp.repeat(x, targets.shape[-1], axis=0), decoder.head(full, config),
        jnp.maximum(flat, 0), softcap=config.logit_softcap, asked=flat != NO_TARGET,
    )  # fmt: skip
    logprobs = logprobs.reshape(targets.shape)
    losses = jnp.where(targets != NO_TARGET, LOSSES[loss][0](logprobs, batch), 0.0)
    return jnp.sum(losses), (logprobs, losses)


_losses = jax.jit(_sum, static_argnums=(0, 1, 2, 3))
_gradients = jax.jit(jax.grad(_sum, argnums=4, has_aux=True), static_argnums=(0, 1, 2, 3))


@partial(jax.jit, donate_argnums=2)
def _adamw(adapters: Params, moments: Any, grads: Params, options: Any, norm: Any) -> tuple:
    o, most = options, options["grad_clip_norm"]
    scale = jnp.where((most > 0) & (norm > most), most / norm, 1.0)
    adam = optax.scale_by_adam(o["beta1"], o["beta2"], o["eps"])
    changes, moments = adam.update(jax.tree.map(lambda g: g * scale, grads), moments)
    rate, decay = o["learning_rate"], o["weight_decay"]
    new = jax.tree.map(lambda p, change: p - rate * (change + decay * p), adapters, changes)
    return new, moments, jax.tree.map(jnp.zeros_like, grads)
