"""Safetensors files of weights to publish: write, checksum, cut into chunks, clean up.

The trainer writes one file for the fleet; a server collects received chunks in a file. Both lock
their files. Files without a lock belong to killed processes, and `sweep` removes them.
"""

import contextlib
import errno
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.fleet import cast, delta
from rlx.model.tensors import INDEX, WEIGHTS, Buckets, open_tensors
from rlx.system.atomic_directory import try_lock

_BLOCK = 8 << 20  # bytes hashed at a time
METHODS = ("path", "stream", "delta", "adapter", *cast.BACKENDS)
DELTA_SHARE = 0.8  # × the file size is the largest delta worth its cost
_PREFIX, _SUFFIX = "rlx-weights-", ".safetensors"


def checksum(path: str | os.PathLike, stopped: Callable[[], bool] = lambda: False) -> int:
    """Return the CRC-32 of a file, in [0, 2³²); it detects accidents, not attacks.

    `stopped` is called before every block; True ends the reading.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # do not wait to open a pipe
    descriptor = os.open(path, flags)
    with open(descriptor, "rb", buffering=0) as file:
        left, crc = os.fstat(descriptor).st_size, 0
        # Not mapped: a mapped file that shrinks kills the process.
        buffer = memoryview(bytearray(min(_BLOCK, left)))
        while left > 0 and not stopped() and (count := file.readinto(buffer[:left])):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


def write_weights(tensors: Mapping[str, Any] | Buckets, path: str | os.PathLike) -> int:
    """Write a safetensors file and return its `checksum`; see `write_sums`."""
    return write_sums(tensors, path)[-1]


def write_sums(tensors: Mapping[str, Any] | Buckets, path: str | os.PathLike) -> list[int]:
    """Write a safetensors file and return the result of `Buckets.write`, in one pass.

    Tensors, HF name → array, are fetched one at a time; the file is overwritten in place to keep
    its lock. UserError for a missing or full directory, ValueError for a dtype it cannot hold.
    """
    buckets = Buckets.of(tensors)
    need = buckets.header()[1]
    check_room(Path(path).parent, need)
    with _writing(path, need), open(path, "wb", buffering=0) as file:
        return buckets.write(file)


def check_room(directory: str | os.PathLike, num_bytes: int) -> None:
    """Raise UserError if `directory` has fewer than `num_bytes` free."""
    with _writing(directory, num_bytes):
        free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UserError(
            f"no space for the weights in {directory}: {num_bytes >> 20} MiB needed, "
            f"{free >> 20} MiB free; make room or set fleet.publish_dir to another disk"
        )


@contextlib.contextmanager
def _writing(path: str | os.PathLike, num_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError into UserError; the weights have `num_bytes`, 0: unknown."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            need = f": {num_bytes >> 20} MiB needed" * bool(num_bytes)
            raise UserError(
                f"no space for the weights at {path}{need}; make room or set fleet.publish_dir to "
                "another disk"
            ) from error
        reason = error.strerror or error
        raise UserError(
            f"cannot write weights to {path}: {reason}; set fleet.publish_dir to another directory"
        ) from error


def chunks(path: str | os.PathLike, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield a file's bytes in order as (offset, at most `size` bytes)."""
    offset = 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(size):
            yield offset, data
            offset += len(data)


class WeightFile:
    """A new locked file in `directory`, removed by `close`, or by `sweep` if we are killed."""

    def __init__(self, directory: str | os.PathLike):
        self.path = ""
        while not self.path:
            path = Path(directory) / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
            with _writing(directory):
                self._lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                is_ours = try_lock(self._lock) and path.exists()  # else swept between the two
            if is_ours:
                self.path = str(path)
            else:
                os.close(self._lock)

    def close(self) -> None:
        """Remove the file; servers that have it open can still read it."""
        if self.path:
            Path(self.path).unlink(missing_ok=True)
            os.close(self._lock)
            self.path = ""


def sweep(directory: str | os.PathLike) -> None:
    """Remove weight files of killed processes."""
    for path in Path(directory).glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone already, or another user's
            continue
        with open(descriptor, "rb"), contextlib.suppress(OSError):
            if try_lock(descriptor):
                path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class Delta:
    """Binary patch from one version's weights file to the next."""

    base_version: int
    base_crc32: int
    path: str
    num_bytes: int
    crc32: int
    owned: WeightFile

    def fits(self, base: "Weights | None") -> bool:
        """Return whether the patch can be applied to `base`."""
        return base is not None and base.identity == (self.base_version, self.base_crc32)


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA adapters to publish; servers add them to their base model."""

    # PEFT name → float32 array, A [rank, in] and B [out, rank] of every target
    tensors: Mapping[str, Any] | Buckets
    scale: float  # factor of B·A: alpha / rank
    dtype: str  # of the sum: float32 | bfloat16 | float16
    base: bytes  # `adapter.digest` of the base model
    base_bytes: int = 0  # size of its files, which each server reads


@dataclass(frozen=True, eq=False)
class Weights:
    """One version's file, ready to be published; `close` removes it if we wrote it."""

    version: int
    path: str
    num_bytes: int
    crc32: int
    method: str  # one of METHODS
    owned: WeightFile | None = None
    delta: Delta | None = None
    adapter: Adapter | None = None
    sums: tuple[int, ...] = ()  # as of `Buckets.write`, if we wrote the file

    @property
    def work_bytes(self) -> int:
        """Bytes that a server reads for it, for a deadline."""
        return self.num_bytes + (self.adapter.base_bytes if self.adapter else 0)

    @property
    def identity(self) -> tuple[int, int]:
        """Version and checksum, by which servers know their weights."""
        return self.version, self.crc32

    def close(self) -> None:
        if self.owned:
            self.owned.close()
        if self.delta:
            self.delta.owned.close()


def stage(
    version: int,  # policy version of the weights, ≥ 0
    # HF name → array, Buckets or an Adapter, written to a new file in `directory`; or the path of a
    # safetensors file or HF directory, used in place.
    source: Any,
    # `path`: servers read the file; `stream`: it is sent; `delta`: servers that have `base` get
    # only the changes, others the file; `adapter`: for an Adapter; one of `cast.BACKENDS`: tensors
    # go to all at once.
    method: str,
    directory: str | os.PathLike,
    base: Weights | None = None,  # ignored unless we wrote it for method `delta`
) -> Weights:
    """Prepare weights for publishing: one file and, for method `delta`, a patch from `base`.

    There is no patch if the sizes differ or too much has changed. UserError if the path has no
    weights, the disk is full, or the method is unknown; ValueError if the source does not fit the
    method, or safetensors does not have its dtype.
    """
    if method not in METHODS:
        raise UserError(f"publish method {method!r} is unknown; use one of {', '.join(METHODS)}")
    if isinstance(source, Adapter) != (method == "adapter"):
        raise ValueError(f"{type(source).__name__} cannot be published by {method}")
    weights = _whole_file(version, source, method, directory)
    if not (method == "delta" and weights.owned and base and base.method == method and base.owned):
        return weights
    try:
        return replace(weights, delta=_delta(base, weights, directory))
    except BaseException:
        weights.close()
        raise


def _delta(base: Weights, weights: Weights, directory: str | os.PathLike) -> Delta | None:
    """Return the delta; None if the whole file is as good."""
    try:
        file = WeightFile(directory)
    except UserError:
        return None
    patch = None
    try:
        limit = int(DELTA_SHARE * weights.num_bytes)
        patch = delta.encode(base.path, weights.path, file.path, limit)
    except (ValueError, OSError):  # another size, or no room
        return None
    finally:
        if patch is None:
            file.close()
    return patch and Delta(base.version, base.crc32, file.path, *patch, file)


def _whole_file(version: int, source: Any, method: str, directory: str | os.PathLike) -> Weights:
    """Return the weights at a path, or those written to a new file in `directory`."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if (path / INDEX).exists() and not (path / WEIGHTS).exists():
            with open_tensors(path) as tensors:  # of several files, which become one
                return _whole_file(version, tensors, method, directory)
        path = path / WEIGHTS if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"no weights at {path}; give a safetensors file or an HF directory")
        path = path.resolve()
        return Weights(version, str(path), path.stat().st_size, checksum(path), method)
    file = WeightFile(directory)
    adapter = source if isinstance(source, Adapter) else None
    try:
        with _writing(file.path):  # the directory may be removed meanwhile
            sums = write_sums(adapter.tensors if adapter else source, file.path)
            size = os.path.getsize(file.path)
        adapter = replace(adapter, tensors={}) if adapter else None  # they are in the file
        return Weights(
            version, file.path, size, sums[-1], method, file, adapter=adapter, sums=tuple(sums)
        )
    except BaseException:
        file.close()
        raise
