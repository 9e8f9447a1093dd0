"""Read the policy of any checkpoint, one tensor at a time under HF names, without JAX."""

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


class _Tensors(Mapping[str, np.ndarray]):
    """Trained parameters of a checkpoint by name; each access reads one."""

    _names: Mapping[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _JaxTensors(_Tensors):
    """Trained parameters of a checkpoint by trainer=jax.

    params.layers.q[i], [in, out] is model.layers.i.self_attn.q_proj.weight, [out, in].
    """

    def __init__(self, path: Path, rows: tuple[Row, ...]):
        import tensorstore

        self._open, self._base = tensorstore.open, f"file://{Path(path).absolute()}/state/"
        found = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
        leaves = {leaf["key_metadata"][0]["key"] for leaf in found}
        # An HF tensor may concatenate several of ours: (leaf, index, transposed).
        places: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}
        for row in rows:
            leaf = "params." + ".".join(row.path)
            for at, name in zip(row.places, row.names, strict=True):
                if leaf in leaves:
                    places.setdefault(name, []).append((leaf, at, row.transposed))
        self._names = places

    def _parts(self, name: str) -> list[Any]:
        """Return a tensor's stored parts, not read yet, with the axes of HF's file."""
        parts = []
        for leaf, at, transposed in self._names[name]:
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


class _TorchTensors(_Tensors):
    """Trained parameters of a checkpoint by trainer=torch."""

    def __init__(self, path: Path):
        from rlx_torch.torch_checkpoint import TorchCheckpoint

        self._found = TorchCheckpoint(path)
        names = (n.removeprefix(_OF_TORCH) for n in self._found if n.startswith(_OF_TORCH))
        self._names = {self._peft(name): _OF_TORCH + name for name in names}

    @staticmethod
    def _peft(name: str) -> str:
        """Return PEFT's name of an adapter; other names unchanged."""
        return PREFIX + name.replace(".default", "") if ".default." in name else name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        return self._found.shape(self._names[name])

    def __getitem__(self, name: str) -> np.ndarray:
        return self._found[self._names[name]]


def _tensors(path: Path, rows: tuple[Row, ...]) -> Any:
    return _JaxTensors(path, rows) if (path / "state").is_dir() else _TorchTensors(path)


def policy_of(path: Path, model: ModelConfig, dtype: str = "") -> Buckets:
    """Return a checkpoint's policy under HF names; one tensor is in memory at a time.

    Args:
      dtype: dtype of the tensors; "" keeps the checkpoint's.

    Raises:
      UserError: the checkpoint belongs to another model.
    """
    rows = parameters.table(model)
    found, shapes = _tensors(path, rows), dict[str, tuple[int, ...]]()
    for row in rows:
        for name in row.names:
            shapes[name] = found.shape(name) if name in found else ()
            if shapes[name] != row.hf_shape:
                raise UserError(
                    f"checkpoint {path} has {name} as {list(shapes[name]) or 'nothing'}, the model "
                    f"wants {list(row.hf_shape)}; give the checkpoint's model"
                )
    kind = np.dtype(dtype or found[next(iter(shapes))].dtype)
    specs = {name: np.broadcast_to(np.zeros((), kind), shape) for name, shape in shapes.items()}
    return Buckets(specs, ({name: found[name].astype(kind)} for name in shapes))


def adapters_of(path: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Return a checkpoint's adapters under PEFT names."""
    found = _tensors(path, lora_config.table(model, lora))
    return {name: found[name] for name in found if name.startswith(PREFIX)}
