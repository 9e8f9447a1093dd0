"""What leaves the trainer: weights for the fleet, directories for everyone else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.fleet import adapter
from rlx.fleet.publish import Adapter
from rlx.model import hf, peft
from rlx.model.params import Params
from rlx.train.update import Update


class Export:
    """The policy in the forms that others read.

    Args:
      config, update: of the run.
      model_dir: HF directory of the run's first weights, which LoRA's adapters are added to.
      source: HF directory whose tokenizer files go with exported weights.

    Attributes:
      base: digest of `model_dir` for a run that trains adapters, which belong to no other model.
    """

    def __init__(self, config: ConfigDict, update: Update, model_dir: Path, source: Path):
        self._update, self._model_dir, self._source = update, model_dir, source
        self._dtype = config.model.publish_dtype
        self._by_adapter = config.fleet.publish == "adapter"
        self.base = adapter.digest(model_dir) if update.lora else b""

    def weights(self, params: Params) -> Mapping[str, Any] | Adapter:
        """The policy of `state.params` as the fleet takes it, on the host."""
        model, lora = self._update.model, self._update.lora
        if lora and self._by_adapter:
            tensors = peft.to_peft(params, model, lora)
            return Adapter(tensors, lora.scale, self._dtype, self.base)
        return hf.to_hf(self._update.merged(params), model, self._dtype)

    def save(self, workdir: Path, params: Params) -> None:
        """Writes `workdir`/hf, merged, and for LoRA `workdir`/adapter, which PEFT reads."""
        model, lora = self._update.model, self._update.lora
        merged = self._update.merged(params)
        hf.save(workdir / "hf", model, merged, self._dtype, source=self._source)
        if lora:
            peft.save(workdir / "adapter", model, lora, params, str(self._model_dir))

    def require_base(self, host: Mapping[str, Any]) -> None:
        """Raises UserError when a checkpoint's adapters were trained on another model."""
        wanted = host.get("lora_base", "")
        if wanted != self.base.hex():
            raise UserError(
                f"the checkpoint's adapters belong to base {wanted[:12] or 'none'}, and "
                f"{self._model_dir} is {self.base.hex()[:12] or 'no base'}; give the model it was "
                "made with as model.path"
            )
