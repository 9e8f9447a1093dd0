"""The tensors in an HF directory's safetensors files, each read when it is asked for. No JAX."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes as ml_dtypes  # gives numpy the bfloat16 that safetensors looks for
import numpy as np
from safetensors import SafetensorError, safe_open

from rlx.base import UserError
from rlx.model.directory import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class LazyTensors(Mapping):
    """The tensors of one or more safetensors files; each is read when it is asked for."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = dict(files)  # tensor name → open safetensors file

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Of a tensor, as safetensors has it (F32, BF16, …), without reading it."""
        return self._files[name].get_slice(name).get_dtype()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def __iter__(self):
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def open_tensors(path: str | Path):
    """The tensors of an HF directory (single file or sharded with an index), or of one file."""
    path = Path(path)
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for shard in shards(path):
            try:
                opened = stack.enter_context(safe_open(shard, framework="np"))
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"cannot read {shard}: {error}; not a whole safetensors file, get it again"
                ) from error
            files |= dict.fromkeys(opened.keys(), opened)
        yield LazyTensors(files)


def shards(path: Path) -> list[Path]:
    """The safetensors files of an HF directory; or the one file that `path` is.

    Raises:
      UserError: the directory has none, or one that its index names is missing.
    """
    if path.is_file():
        return [path]
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if (path / INDEX).exists():
        places = read_json(path / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise UserError(f"{path / INDEX} has no weight_map; get it again")
        names = sorted(set(places.values()))
        for name in names:
            if not (path / name).exists():
                raise UserError(f"{path / INDEX} names {name}, which is missing; get it again")
        return [path / name for name in names]
    raise UserError(f"{path} has no {WEIGHTS} (nor {INDEX}); give a directory with safetensors")
