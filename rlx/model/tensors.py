"""Tensors of safetensors files, read on access and written bucket by bucket. No JAX."""

import contextlib
import json
import math
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes as ml_dtypes  # gives numpy the bfloat16 that safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from rlx.base import UserError
from rlx.model.config_forms import read_json
from rlx.model.model_config import ModelConfig
from rlx.system.atomic_directory import atomic_directory

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUCKET = 1 << 30  # bytes of tensors on the host at a time, while they move to or from a device
# Copied next to exported weights from the directory that the run started from.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
DTYPES = {  # names of numpy and torch → of safetensors
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32",
}  # fmt: skip
_BLOCK = 8 << 20  # bytes hashed or written at a time


class LazyTensors(Mapping):
    """Tensors of one or more open safetensors files, by name; each access reads one."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = dict(files)  # tensor name → open safetensors file

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype (F32, BF16, …), without reading it."""
        return self._files[name].get_slice(name).get_dtype()

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a tensor, reading only the slice."""
        return self._files[name].get_slice(name)[index]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def __iter__(self):
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def open_tensors(path: str | Path):
    """Open the tensors of an HF directory or of a file; UserError for a missing or damaged one."""
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
    """Return an HF directory's safetensors files, or `path` if it is one; UserError for none."""
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


def num_bytes(directory: str | Path) -> int:
    """Return the size of an HF directory's safetensors files; 0 without any."""
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))


@dataclass(frozen=True, eq=False)
class Buckets:
    """Tensors that are iterated once, bucket by bucket, to keep only one bucket in memory."""

    tensors: Mapping[str, Any]  # name → an object with its shape and dtype, in the buckets' order
    buckets: Iterable[Mapping[str, Any]]  # name → array, or an argument of np.asarray

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.buckets)

    @classmethod
    def of(cls, source: "Mapping[str, Any] | Buckets") -> "Buckets":
        """Return `source`, wrapping a mapping as one bucket."""
        return source if isinstance(source, Buckets) else cls(source, [source])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all tensors, on the host."""
        return {k: np.asarray(v) for bucket in self for k, v in bucket.items()}

    def header(self) -> tuple[bytes, int]:
        """Return a safetensors file's first bytes and its size; ValueError for an odd dtype."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, tensor in self.tensors.items():
            shape, dtype = [int(n) for n in tensor.shape], np.dtype(tensor.dtype)
            if dtype.name not in DTYPES:
                names = ", ".join(DTYPES)
                raise ValueError(f"{name} is {dtype.name}; a weight must be one of {names}")
            end = start + math.prod(shape) * dtype.itemsize
            kind = DTYPES[dtype.name]
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, 8 + len(text) + start

    def write(self, file: BinaryIO) -> list[int]:
        """Write a safetensors file to an unbuffered `file`; ValueError for odd dtypes or buckets.

        Returns the CRC-32 of the file up to the end of its header, and of each tensor.
        """
        sums = [_write(file, memoryview(self.header()[0]), 0)]
        rest = iter(self.tensors.items())
        for bucket in self:
            for name in bucket:
                data = _bytes(name, bucket[name], *next(rest, ("none", None)))
                sums.append(_write(file, data, sums[-1]))
            del bucket  # before the next one is made
        if missing := next(rest, None):
            raise ValueError(f"{missing[0]} did not come")
        return sums


def _bytes(name: str, tensor: Any, wanted: str, spec: Any) -> memoryview:
    """Return a tensor's bytes; raise ValueError unless it is `wanted`, with the spec's shape."""
    array = np.ascontiguousarray(tensor)
    if name != wanted or (tensor.shape, array.dtype) != (spec.shape, spec.dtype):
        raise ValueError(f"{name} {array.dtype}{list(tensor.shape)} came, wanted {wanted}")
    return array.reshape(-1).view(np.uint8).data


def save_tensors(tensors: Mapping[str, Any] | Buckets, path: Path) -> list[int]:
    """Write a safetensors file as `Buckets.write` does; UserError for a NaN or an infinity."""
    buckets = Buckets.of(tensors)
    with open(path, "wb", buffering=0) as file:
        return Buckets(buckets.tensors, map(_finite, buckets)).write(file)


def _finite(bucket: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, tensor in bucket.items():
        if not np.isfinite(np.asarray(tensor)).all():
            error = f"tensor {name} has numbers that are not finite, and is not written"
            raise UserError(f"{error}; lower optimizer.learning_rate, or begin from other weights")
    return bucket


def _write(file: BinaryIO, data: memoryview, crc: int) -> int:
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        crc = zlib.crc32(block, crc)
        while block:
            block = block[file.write(block) :]
    return crc


def write_directory(
    path: str | Path,
    config: ModelConfig,
    tensors: Buckets,
    source: str | Path | None = None,
    chat_template: str = "",  # replaces that of `source`
) -> list[int]:
    """Write an HF directory: config.json, model.safetensors, and `source`'s tokenizer files.

    `path` is replaced in one step; on UserError nothing is left behind. Returns the result of
    `Buckets.write`.
    """
    with atomic_directory(Path(path)) as fresh:
        name = np.dtype(next(iter(tensors.tensors.values())).dtype).name
        record = {**config.to_hf(), "dtype": name, "torch_dtype": name}
        (fresh / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        sums = save_tensors(tensors, fresh / WEIGHTS)
        for companion in COMPANIONS if source else ():
            if Path(source or "", companion).exists():
                shutil.copyfile(Path(source or "", companion), fresh / companion)
        if chat_template:
            (fresh / "chat_template.jinja").write_text(chat_template)
    return sums
