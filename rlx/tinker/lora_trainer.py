"""The contract of trainers of Tinker's API: a frozen base, and adapters of any rank for clients.

    put, get       PEFT's tensors ⇄ arrays of the library
    microbatch     log-probabilities, losses and gradient

Everything else is written once, here. Imports neither JAX nor torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError, packages_of
from rlx.model import lora_config, peft
from rlx.model.lora_config import LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets, open_tensors, save_tensors
from rlx.tinker.target_rows import TargetRows

ADAPTER = "adapter"  # PEFT's directory in that of a saved state
ADAM = {  # options of a step with defaults
    "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
_MOMENTS = ("mu", "nu")
Tensors = dict[str, Any]


@dataclass(eq=False)
class LoraState:
    """A client's adapters, Adam's moments and the gradient, float32 arrays with the same keys."""

    lora: LoraConfig
    adapters: Tensors
    mu: Tensors
    nu: Tensors
    grads: Tensors
    updates: int = 0


def adamw(o: Mapping[str, Any], p: Tensors, grads: Tensors, mu: Tensors, nu: Tensors) -> tuple:
    """Return what torch.optim.AdamW's update `t`, from 1, makes of a gradient times `scale`."""
    g = {k: x * o["scale"] for k, x in grads.items()}
    mu = {k: o["beta1"] * mu[k] + (1 - o["beta1"]) * g[k] for k in g}
    nu = {k: o["beta2"] * nu[k] + (1 - o["beta2"]) * g[k] ** 2 for k in g}
    first, second = (1 - o[beta] ** o["t"] for beta in ("beta1", "beta2"))
    change = {k: mu[k] / first / ((nu[k] / second) ** 0.5 + o["eps"]) for k in g}
    decay = o["weight_decay"]
    return {k: x - o["learning_rate"] * (change[k] + decay * x) for k, x in p.items()}, mu, nu


class LoraTrainer(ABC):
    """Computes losses and gradients of adapters on one device; one thread at a time."""

    config: ModelConfig
    adamw: Callable = staticmethod(adamw)

    @abstractmethod
    def put(self, arrays: Mapping[str, np.ndarray], lora: LoraConfig) -> Tensors:
        """Return tensors with PEFT's names as the library's; UserError if they do not fit."""

    @abstractmethod
    def get(self, tensors: Tensors, lora: LoraConfig) -> dict[str, np.ndarray]:
        """Return the library's arrays as tensors with PEFT's names, float32."""

    @abstractmethod
    def microbatch(self, state: LoraState, loss: str, batch: Any, backward: bool) -> tuple:
        """Return the targets' log-probabilities and losses, [B, T, K] float32, and the gradient.

        The gradient is that of the summed loss, {} without `backward`; log-probabilities and losses
        are 0 where there is no target.
        """

    def fresh(self, lora: LoraConfig, seed: int) -> LoraState:
        """Return adapters that add nothing: A uniform in ±1/√in, B 0, as PEFT's; or UserError."""
        rng, arrays = np.random.default_rng(seed), {}
        for row in lora_config.table(self.config, lora):
            bound = row.hf_shape[1] ** -0.5 if row.kind != "zeros" else 0.0
            for name in row.names:
                arrays[name] = rng.uniform(-bound, bound, row.hf_shape).astype(np.float32)
        return self._state(lora, arrays)

    def _state(self, lora: LoraConfig, arrays: Mapping[str, np.ndarray]) -> LoraState:
        adapters = self.put(arrays, lora)
        mu, nu, grads = ({k: x * 0 for k, x in adapters.items()} for _ in range(3))
        return LoraState(lora, adapters, mu, nu, grads)

    def run(
        self, state: LoraState, loss: str, rows: TargetRows, backward: bool
    ) -> list[list[np.ndarray]]:
        """Return logprobs and losses of each datum's targets; `backward` adds to the gradient."""
        outputs, sums = [], state.grads
        for batch in rows.batches:
            *both, grads = self.microbatch(state, loss, batch, backward)
            outputs.append(map(np.asarray, both))
            sums = {k: x + grads[k] for k, x in sums.items()} if backward else sums
        results = [rows.of_data(parts) for parts in zip(*outputs, strict=True)]
        state.grads = sums  # all or nothing: an error leaves the gradient as it was
        return results

    def step(self, state: LoraState, options: Mapping[str, float]) -> float:
        """Make a finite update, and forget the gradient; return its norm; or UserError."""
        grads, most = state.grads, options.get("grad_clip_norm", 0.0)
        norm = float(sum((g * g).sum() for g in grads.values())) ** 0.5
        state.grads = {k: x * 0 for k, x in state.adapters.items()}
        if not np.isfinite(norm):
            raise UserError("the gradient is not finite, nothing changed; lower learning_rate")
        scale = most / norm if 0 < most < norm else 1.0
        o = {**ADAM, **options, "scale": scale, "t": state.updates + 1.0}
        new = self.adamw(o, state.adapters, grads, state.mu, state.nu)
        if not np.isfinite(float(sum(x.sum() for part in new for x in part.values()))):
            raise UserError("the update is not finite, nothing changed; correct adam_params")
        state.adapters, state.mu, state.nu = new
        state.updates += 1
        return norm

    def save(self, state: LoraState, path: Path, base: str, moments: bool) -> None:
        """Write PEFT's directory into `path`, which belongs to model `base`, and the moments."""
        adapters = self.get(state.adapters, state.lora)
        peft.write(path / ADAPTER, state.lora, Buckets.of(adapters), base)
        for name in _MOMENTS if moments else ():
            save_tensors(self.get(getattr(state, name), state.lora), path / f"{name}.safetensors")

    def load(self, path: Path, updates: int = 0) -> LoraState:
        """Read what `save` wrote, with moments after `updates` of them; UserError if unfit."""
        lora = peft.load_config(path / ADAPTER)
        with open_tensors(path / ADAPTER / peft.WEIGHTS) as tensors:
            state = self._state(lora, tensors)
        for name in _MOMENTS if updates else ():
            with open_tensors(path / f"{name}.safetensors") as tensors:
                setattr(state, name, self.put(tensors, lora))
        state.updates = updates
        return state


def trainer_class(name: str) -> Callable[[Path, str, int], LoraTrainer]:
    """Return what makes a trainer of directory, dtype and context; UserError if it cannot."""
    if name == "jax":
        from rlx.tinker.jax_lora import JaxLora

        return JaxLora
    with packages_of("torch", "--trainer=torch needs PyTorch"):
        from rlx.tinker.torch_lora import TorchLora
    return TorchLora
