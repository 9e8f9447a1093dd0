"""Server side of publishing LoRA adapters: the trainer sends A and B, a server adds its base model.

    trainer   {base_model.model.….lora_A.weight: …} ─▶ one safetensors file ─▶ chunks
    server    base model + that file ─▶ W + scale·B·A in float32, cast ─▶ a file for the engine

A few tensors are in memory at a time. `digest` checks that both ends have the same base.
"""

import contextlib
import hashlib
import math
from pathlib import Path
from typing import Any

import ml_dtypes as ml_dtypes  # numpy knows the name bfloat16 by it
import numpy as np

from rlx.base import UserError
from rlx.fleet import publish
from rlx.model.directory import resolve
from rlx.model.tensors import Buckets, LazyTensors, open_tensors, shards

DTYPES = ("float32", "bfloat16", "float16")
_PREFIX = "base_model.model."  # before HF's name in PEFT's names
_DOWN, _UP, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
_BLOCK = 64 << 20  # elements summed at a time


class OtherBase(Exception):
    """The server's base is not the trainer's."""


def digest(directory: str | Path) -> bytes:
    """Return the BLAKE2b digest, 32 bytes, of an HF directory's tensors, in any number of files."""
    blake = hashlib.blake2b(digest_size=32)
    with open_tensors(directory) as tensors:
        for name in sorted(tensors):
            blake.update(f"{name} {tensors.dtype(name)} {tensors.shape(name)}\n".encode())
            blake.update(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    return blake.digest()


class Base:
    """A server's model directory, to which adapters are added."""

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)  # or a hub name, until `require` finds its directory
        self._read: Any = None  # identities of the files when they were read
        self._digest = b""  # their digest

    def require(self, wanted: bytes) -> None:
        """Raise OtherBase unless the directory's digest is `wanted`, UserError without weights."""
        self._directory = resolve(str(self._directory), "--model")
        files = [path.stat() for path in shards(self._directory)]
        now = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in files]
        if self._read != now:
            self._read, self._digest = now, digest(self._directory)
        if self._digest != wanted:
            raise OtherBase(
                f"the adapter belongs to base {wanted.hex()[:12]}, {self._directory} here is "
                f"{self._digest.hex()[:12]}; start the server with the trainer's model, or set "
                "fleet.publish=stream"
            )

    def write(self, adapter: str | Path, scale: float, dtype: str, out: str | Path) -> None:
        """Write the base plus scale · B·A of a file with PEFT's names to the existing file `out`.

        ValueError for an adapter that does not fit, a `dtype` that is not in DTYPES, or a scale
        that is not finite; UserError for a full disk.
        """
        if dtype not in DTYPES or not math.isfinite(scale):
            raise ValueError(f"dtype={dtype!r} or scale={scale} of an adapter is not possible")
        with contextlib.ExitStack() as stack:
            try:
                parts = stack.enter_context(open_tensors(adapter))
            except UserError as error:
                raise ValueError(f"not a safetensors file: {error}") from error
            base = stack.enter_context(open_tensors(self._directory))
            pairs, kind = _pairs(parts, base), np.dtype(dtype)
            shaped = {name: np.broadcast_to(kind.type(0), base.shape(name)) for name in base}
            sums = ({name: _sum(base, parts, name, pairs.get(name), scale, kind)} for name in base)
            publish.write_weights(Buckets(shaped, sums), out)  # `shaped` takes no memory


def _pairs(parts: LazyTensors, base: LazyTensors) -> dict[str, tuple[str, str]]:
    """Return HF name → names of its A and B; raise ValueError if shapes or dtypes do not fit."""
    pairs = {}
    for name in parts:
        if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
            raise ValueError(f"tensor {name!r} is not part of an adapter; publish by stream")
        stem = name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP)
        pairs[stem + _WEIGHT] = (_PREFIX + stem + _DOWN, _PREFIX + stem + _UP)
    for name, (down, up) in pairs.items():
        missing = [each for each in (down, up) if each not in parts]
        if name not in base or missing:
            raise ValueError(f"{missing[0] if missing else name} is missing; publish by stream")
        a, b, full = parts.shape(down), parts.shape(up), base.shape(name)
        if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != full or a[0] != b[1]:
            raise ValueError(f"adapters of shapes {a} and {b} do not fit {name} {full}")
        if parts.dtype(down) != "F32" or parts.dtype(up) != "F32":
            raise ValueError(f"the adapter of {name} is not float32")
    return pairs


def _sum(
    base: LazyTensors, parts: LazyTensors, name: str, pair: tuple[str, str] | None, scale: float,
    dtype: np.dtype,
) -> np.ndarray:  # fmt: skip
    """Return one tensor of the base, plus scale · B·A if it has a `pair`, cast to `dtype`."""
    weight = base[name]
    if pair is None:
        return weight.astype(dtype, copy=False)
    down, up = (parts[each] for each in pair)
    result = np.empty(weight.shape, dtype)
    rows = max(1, _BLOCK // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        with np.errstate(all="ignore"):  # the engine refuses numbers that are not finite
            product = np.float32(scale) * (up[part] @ down)
            result[part] = weight[part].astype(np.float32) + product
    return result
