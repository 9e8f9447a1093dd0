"""Tensors of an HF directory's safetensors files, each read when it is asked for. No JAX."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes as ml_dtypes  # gives numpy the bfloat16 that safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlx.base import UserError
from rlx.model.directory import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class LazyTensors(Mapping):
    """Tensors of one or more open safetensors files, by name; each access reads one."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = dict(files)  # tensor name → open safetensors file

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype in safetensors' words (F32, BF16, …), without reading it."""
        return self._files[name].get_slice(name).get_dtype()

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a tensor; nothing else of it is read."""
        return self._files[name].get_slice(name)[index]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def __iter__(self):
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def open_tensors(path: str | Path):
    """Open the tensors of an HF directory (one file, or several with an index), or of a file.

    Raises:
      UserError: a file is missing or damaged.
    """
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
    """Return the safetensors files of an HF directory, or `path` itself if it is a file.

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


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file that transformers and PEFT read, for every user to read."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it 0600, whatever the umask
