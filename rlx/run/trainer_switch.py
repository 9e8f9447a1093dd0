"""Checkpoints of one trainer for the other: a run may change its trainer in the middle.

Both are read as tensors and numbers with the names of the one in PyTorch, one at a time. The one
file here that knows them both; a library is imported for its own trainer's checkpoints alone.
"""

from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets


def tensors_of(path: Path, model: ModelConfig) -> Any:
    """Return a mapping of a state's tensors, as numpy's, and numbers; each access reads one.

    Args:
      model: of what is trained.
    """
    if (path / "state").is_dir():
        from rlx_torch.jax_checkpoint import JaxCheckpoint

        return JaxCheckpoint(path, model)
    from rlx_torch.torch_checkpoint import TorchCheckpoint

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
