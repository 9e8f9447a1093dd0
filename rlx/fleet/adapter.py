"""Server side of publishing LoRA adapters: the trainer sends A and B, a server adds its own base.

    trainer   {base_model.model.….lora_A.weight: …} ─▶ one safetensors file ─▶ chunks
    server    its model directory, and that file ─▶ W + scale·B·A ─▶ a file for the engine

Sums are in float32, then cast to the published dtype; a W without adapter is only cast. A few
tensors are in memory at a time, whatever the model's size. Both ends must have begun with the same
base: `digest` identifies it. numpy only.
"""

import contextlib
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlx.base import UserError
from rlx.fleet import publish
from rlx.model.tensors import LazyTensors, open_tensors, shards

DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
_PREFIX = "base_model.model."  # of PEFT's names; HF's name follows, except for its last part
_DOWN, _UP, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
_BLOCK = 64 << 20  # elements of a sum at a time


class OtherBase(Exception):
    """The server's base is not the trainer's."""


def digest(directory: str | Path) -> bytes:
    """Return the BLAKE2b digest, 32 bytes, of an HF directory's tensors.

    It covers names, dtypes, shapes and bytes, not the division into files. It reads all tensors,
    one at a time.
    """
    made = hashlib.blake2b(digest_size=32)
    with open_tensors(directory) as tensors:
        for name in sorted(tensors):
            made.update(f"{name} {tensors.dtype(name)} {tensors.shape(name)}\n".encode())
            made.update(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    return made.digest()


class Base:
    """A server's own model directory, to which every adapter is added."""

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self._known: tuple[Any, bytes] = None, b""

    def require(self, wanted: bytes) -> None:
        """Check the directory's digest, read the first time and after changes.

        Raises:
          OtherBase: the digest is not `wanted`.
          UserError: it has no weights.
        """
        files = [path.stat() for path in shards(self._directory)]
        now = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in files]
        if self._known[0] != now:
            self._known = now, digest(self._directory)
        if self._known[1] != wanted:
            raise OtherBase(
                f"the adapter belongs to base {wanted.hex()[:12]}, {self._directory} here is "
                f"{self._known[1].hex()[:12]}; start the server with the trainer's model, or set "
                "fleet.publish=stream"
            )

    def write(self, adapter: str | Path, scale: float, dtype: str, out: str | Path) -> None:
        """Write to `out` a safetensors file of the base plus `adapter`.

        Args:
          adapter: a safetensors file with PEFT's names.
          scale: factor of B·A. dtype: of the result, a key of DTYPES.
          out: an existing file, overwritten in place.

        Raises:
          ValueError: the adapter does not fit this base, `dtype` is unknown or `scale` not finite.
          UserError: there is no room for the result.
        """
        if dtype not in DTYPES or not math.isfinite(scale):
            raise ValueError(f"an adapter with dtype={dtype!r} and scale={scale}; see DTYPES")
        with contextlib.ExitStack() as stack:
            try:
                parts = stack.enter_context(open_tensors(adapter))
            except UserError as error:
                raise ValueError(f"not a safetensors file: {error}") from error
            base = stack.enter_context(open_tensors(self._directory))
            pairs = _pairs(parts, base)
            made = {
                name: _Made(base, parts, name, pairs.get(name), scale, np.dtype(DTYPES[dtype]))
                for name in base
            }
            publish.write_weights(made, out)


def _pairs(parts: LazyTensors, base: LazyTensors) -> dict[str, tuple[str, str]]:
    """Return HF name → names of its A and B; ValueError when they do not fit it or each other."""
    pairs = {}
    for name in parts:
        if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
            raise ValueError(f"tensor {name!r} is not an adapter's; publish by stream")
        stem = name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP)
        pairs[stem + _WEIGHT] = (_PREFIX + stem + _DOWN, _PREFIX + stem + _UP)
    for name, (down, up) in pairs.items():
        missing = [each for each in (down, up) if each not in parts]
        if name not in base or missing:
            raise ValueError(f"{missing[0] if missing else name} is missing; publish by stream")
        a, b, whole = parts.shape(down), parts.shape(up), base.shape(name)
        if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != whole or a[0] != b[1]:
            raise ValueError(f"adapters of shapes {a} and {b} do not fit {name} {whole}")
        if parts.dtype(down) != "F32" or parts.dtype(up) != "F32":
            raise ValueError(f"the adapter of {name} is not float32")
    return pairs


class _Made:
    """One tensor of the result, computed when it is written."""

    def __init__(
        self,
        base: LazyTensors,
        parts: LazyTensors,
        name: str,
        pair: tuple[str, str] | None,
        scale: float,
        dtype: np.dtype,
    ):
        self.shape, self.dtype = base.shape(name), dtype
        self._base, self._parts = base, parts
        self._name, self._pair, self._scale = name, pair, np.float32(scale)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        weight = self._base[self._name]
        if self._pair is None:
            return weight.astype(self.dtype, copy=False)
        down, up = (self._parts[name] for name in self._pair)
        made = np.empty(self.shape, self.dtype)
        rows = max(1, _BLOCK // max(1, self.shape[1]))
        for start in range(0, self.shape[0], rows):
            part = slice(start, start + rows)
            with np.errstate(all="ignore"):  # the engine refuses numbers that are not finite
                made[part] = weight[part].astype(np.float32) + self._scale * (up[part] @ down)
        return made
