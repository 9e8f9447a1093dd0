"""Read the policy of a checkpoint, of either trainer, one tensor at a time under HF's names.

JAX is not imported for either; PyTorch is imported for its own trainer's checkpoints only.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.model import lora_config
from rlx.model import params as parameters
from rlx.model.lora_config import PREFIX, LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Row
from rlx.model.tensors import Buckets

_OF_TORCH = "policy.model."


class _JaxTensors(Mapping[str, np.ndarray]):
    """The trained parameters of a checkpoint by trainer=jax; each access reads one.

    params.layers.q[i], [in, out] is model.layers.i.self_attn.q_proj.weight, [out, in].
    """

    def __init__(self, path: Path, rows: tuple[Row, ...]):
        import tensorstore

        self._open, self._base = tensorstore.open, f"file://{Path(path).absolute()}/state/"
        found = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
        leaves = {leaf["key_metadata"][0]["key"] for leaf in found}
        # A tensor of HF's may hold several of ours, one below the other: (leaf, index, transposed).
        self._places: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}
        for row in rows:
            leaf = "params." + ".".join(row.path)
            for at, name in zip(row.places, row.names, strict=True):
                if leaf in leaves:
                    self._places.setdefault(name, []).append((leaf, at, row.transposed))

    def _parts(self, name: str) -> list[Any]:
        """Return the stored parts of a tensor, not read yet, as HF's file has their axes."""
        parts = []
        for leaf, at, transposed in self._places[name]:
            store = {"driver": "ocdbt", "base": self._base, "path": f"{leaf}/"}
            found = self._open({"driver": "zarr", "kvstore": store}, read=True).result()
            found = found[at] if at else found
            parts.append(found.T if transposed else found)
        return parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        first, *more = (tuple(part.shape) for part in self._parts(name))
        return (first[0] + sum(shape[0] for shape in more), *first[1:]) if more else first

    def __getitem__(self, name: str) -> np.ndarray:
        read = [part.read().result() for part in self._parts(name)]
        return np.asarray(read[0] if len(read) == 1 else np.concatenate(read), order="C")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _TorchTensors(Mapping[str, np.ndarray]):
    """The trained parameters of a checkpoint by trainer=torch; each access reads one."""

    def __init__(self, path: Path):
        from rlx_torch.torch_checkpoint import TorchCheckpoint

        self._found = TorchCheckpoint(path)
        names = (n.removeprefix(_OF_TORCH) for n in self._found if n.startswith(_OF_TORCH))
        self._names = {self._peft(name): _OF_TORCH + name for name in names}

    @staticmethod
    def _peft(name: str) -> str:
        """Return the name of PEFT's file for an adapter; other names stay."""
        return PREFIX + name.replace(".default", "") if ".default." in name else name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        return self._found.shape(self._names[name])

    def __getitem__(self, name: str) -> np.ndarray:
        return self._found[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _tensors(path: Path, rows: tuple[Row, ...]) -> Any:
    return _JaxTensors(path, rows) if (path / "state").is_dir() else _TorchTensors(path)


def policy_of(path: Path, model: ModelConfig, dtype: str = "") -> Buckets:
    """Return the policy of a checkpoint with HF's names; one tensor is in memory at a time.

    Args:
      dtype: of the tensors; "" keeps the checkpoint's.

    Raises:
      UserError: the checkpoint is of another model.
    """
    rows = parameters.table(model)
    found, shapes = _tensors(path, rows), dict[str, tuple[int, ...]]()
    for row in rows:
        for name in row.names:
            shapes[name] = found.shape(name) if name in found else ()
            if shapes[name] != row.hf_shape:
                raise UserError(
                    f"checkpoint {path} has {name} as {list(shapes[name]) or 'nothing'}, the model "
                    f"wants {list(row.hf_shape)}; give the model that it is of"
                )
    kind = np.dtype(dtype or found[next(iter(shapes))].dtype)
    specs = {name: np.broadcast_to(np.zeros((), kind), shape) for name, shape in shapes.items()}
    return Buckets(specs, ({name: found[name].astype(kind)} for name in shapes))


def adapters_of(path: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Return the adapters of a checkpoint with the names of PEFT's files."""
    found = _tensors(path, lora_config.table(model, lora))
    return {name: found[name] for name in found if name.startswith(PREFIX)}
