"""The trainer of Tinker's API in PyTorch, for models of transformers. Imports no JAX."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlx.base import UserError
from rlx.model import peft
from rlx.model.directory import load_config
from rlx.model.lora_config import PREFIX, LoraConfig
from rlx.model.model_config import CHUNK
from rlx.tinker.lora_trainer import LoraState, LoraTrainer, Tensors
from rlx.tinker.target_rows import NO_TARGET, loss_of
from rlx_torch import packed_model


class TorchLora(LoraTrainer):
    """Trains on the first GPU, or without one on the CPU; adapters have PEFT's names."""

    def __init__(self, directory: Path, dtype: str, context: int):
        self.config = load_config(directory).within(context)
        if self.config.foreign:  # whose matrices have names that no table knows
            why = f"{self.config.why}; rlx.tinker trains models of rlx's decoder"
            raise UserError(f"{why}: use another model")
        self._dtype = getattr(torch, dtype)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = packed_model.load(directory, self._device, dtype, remat=True)
        self._model.requires_grad_(False)
        self._adapters, self._scale = Tensors(), 1.0  # of the current call
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.to(self._dtype)  # no update needs the digits that the products drop
                module.register_forward_hook(partial(self._add, PREFIX + name))

    def _add(self, name: str, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Return a matrix's output plus that of the current adapter, if it has one."""
        if f"{name}.lora_A.weight" not in self._adapters:
            return out
        down, up = (self._adapters[f"{name}.lora_{half}.weight"] for half in "AB")
        return out + linear(linear(args[0], down), up) * self._scale

    def put(self, arrays: Mapping[str, np.ndarray], lora: LoraConfig) -> Tensors:
        peft.require_fit(arrays, self.config, lora)
        return {k: torch.tensor(np.array(x), device=self._device) for k, x in arrays.items()}

    def get(self, tensors: Tensors, lora: LoraConfig) -> dict[str, np.ndarray]:
        return {k: x.cpu().numpy() for k, x in tensors.items()}

    def microbatch(self, state: LoraState, loss: str, batch: Any, backward: bool) -> tuple:
        loras = {k: x.detach().requires_grad_(backward) for k, x in state.adapters.items()}
        self._adapters, self._scale = loras, state.lora.scale
        inputs = packed_model.put(batch, self._device)
        targets, places = inputs["targets"], inputs["places"]
        low = self._dtype != torch.float32
        with torch.set_grad_enabled(backward), torch.autocast(self._device, self._dtype, low):
            x = packed_model.hidden_states(self._model, inputs)
            ids = targets.flatten(0, 1)[places].long()
            scores, _ = packed_model.token_scores(self._model, x, ids.clamp(min=0), chunk=CHUNK)
        logprobs = torch.zeros_like(targets, dtype=torch.float32).flatten(0, 1)
        logprobs = logprobs.index_put((places,), scores).view(targets.shape)
        logprobs = torch.where(targets != NO_TARGET, logprobs, 0.0)
        losses = torch.where(targets != NO_TARGET, loss_of(loss, logprobs, inputs), 0.0)
        grads = torch.autograd.grad(losses.sum(), [*loras.values()]) if backward else ()
        return logprobs.detach().cpu(), losses.detach().cpu(), dict(zip(loras, grads, strict=False))
