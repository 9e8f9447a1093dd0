"""Checkpoints of one trainer for the other: a run may change its trainer in the middle.

Both are read as tensors and numbers with the names of the one in PyTorch, one at a time. The one
file here that knows them both; a library is imported for its own trainer's checkpoints alone.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.config import default
from rlx.model import params as parameters
from rlx.model.lora_config import PREFIX, LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets
from rlx.train import checkpoint
from rlx.train.batch_update import require_one_layout
from rlx.train.train_options import TrainOptions


def tensors_of(path: Path, model: ModelConfig, lora: LoraConfig | None = None) -> Any:
    """Return a mapping of a state's tensors, as numpy's, and numbers; each access reads one.

    Args:
      model: of what is trained, or of what has the adapters of `lora`, which are.

    Raises:
      UserError: it is a mixture of experts', by the trainer in PyTorch.
    """
    if (path / "state").is_dir():
        from rlx_torch.jax_checkpoint import JaxCheckpoint

        return JaxCheckpoint(path, model, lora)
    from rlx_torch.torch_checkpoint import TorchCheckpoint

    require_one_layout(model, lora)
    return TorchCheckpoint(path)


def policy_of(path: Path, model: ModelConfig, dtype: str = "") -> Buckets:
    """Return the policy of a checkpoint with HF's names; one tensor is in memory at a time.

    Args:
      dtype: of the tensors; "" keeps the checkpoint's.

    Raises:
      UserError: the checkpoint is of another model.
    """
    found, shapes = tensors_of(path, model), dict[str, tuple[int, ...]]()
    for row in parameters.table(model):
        for name in row.names:
            own = f"policy.model.{name}"
            shapes[name] = found.shape(own) if own in found else ()
            if shapes[name] != row.hf_shape:
                raise UserError(
                    f"checkpoint {path} has {name} as {list(shapes[name]) or 'nothing'}, the model "
                    f"wants {list(row.hf_shape)}; give the model that it is of"
                )
    kind = np.dtype(dtype or found[f"policy.model.{next(iter(shapes))}"].dtype)
    specs = {name: np.broadcast_to(np.zeros((), kind), shape) for name, shape in shapes.items()}
    return Buckets(specs, ({n: found[f"policy.model.{n}"].astype(kind)} for n in shapes))


def adapters_of(path: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Return the adapters of a checkpoint with the names of PEFT's files."""
    found, prefix = tensors_of(path, model, lora), "policy.model."
    names = (name for name in found if name.startswith(prefix))
    return {
        PREFIX + name.removeprefix(prefix).replace(".default", ""): found[name] for name in names
    }


def rewrite(path: Path, target: Path, trainer: str) -> Path:
    """Write all of a run's checkpoint as `trainer` writes its own, into the directory `target`.

    The state is in memory once, on one CPU.

    Raises:
      UserError: it is of that trainer already, of no run, or of a model that trainer=jax has not.
    """
    host, old = checkpoint.read_host(path), "jax" if (path / "state").is_dir() else "torch"
    if old == trainer or "model" not in host or "optimizer" not in host.get("config", {}):
        what = f"of trainer={trainer} already" if old == trainer else "of no run of this release"
        raise UserError(f"checkpoint {path} is {what}; give one that a run of the other wrote")
    config = ConfigDict(default().to_dict(), type_safe=False)
    config.update(host["config"])
    options, model = TrainOptions.of(config), ModelConfig.from_hf(host["model"])
    model.require_ours("trainer=jax")
    require_one_layout(model, options.lora)
    tensors = tensors_of(path, model, options.lora)
    if trainer == "jax":
        from rlx.train import state_files, steps, torch_state

        abstract = steps.Steps(model, options).abstract()
        state = torch_state.state_of(tensors, abstract, model, options.lora)
        begin: Any = partial(state_files.begin, state=state)
    else:
        from rlx_torch.torch_checkpoint import write

        begin = partial(ThreadPoolExecutor(1).submit, partial(write, tensors=tensors))
    size = sum(file.stat().st_size for file in path.rglob("*"))
    host["config"]["trainer"] = trainer
    groups = checkpoint.read_groups(path / "groups")
    return checkpoint.begin(target, checkpoint.step_of(path), begin, size, host, groups)()
