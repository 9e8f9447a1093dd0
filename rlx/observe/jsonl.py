"""Append-only JSON lines: how a run's records reach the disk whole, and come back.

One object a line. A line is written by a single system call and taken back when the disk
is full, so a reader never meets half a record of ours; what a killed process may still
leave behind (a last line without its end) is skipped by `read_jsonl`.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.base import UserError


def jsonable(value: Any) -> Any:
    """`value` as JSON types: non-finite floats become None, arrays lists, keys strings.

    Array scalars of any library (numpy, JAX) are read through `tolist`.

    Raises:
      TypeError: for an object that is none of these.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    raise TypeError(f"cannot write {type(value).__name__} as JSON: {value!r}")


def encode(obj: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 JSON with its newline; lone surrogates stay JSON escapes."""
    text = json.dumps(jsonable(obj), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def append_jsonl(path: str | os.PathLike, obj: Mapping[str, Any]) -> None:
    """Appends `obj` as one line, visible to readers when this returns. Makes directories.

    Raises:
      UserError: when the line does not fit on the disk; the file is then as it was.
    """
    line = encode(obj)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        _append_whole(handle, line)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        os.close(handle)


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Replaces the file by `data`; readers see the old bytes or the new ones, never a part."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise _unwritable(path, error) from error


def read_jsonl(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The objects of a file in order; none for a missing file. Unreadable lines are skipped."""
    if not Path(path).exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def truncate_jsonl(path: str | os.PathLike, first_step: int) -> int:
    """Drops the records whose `step` is ≥ `first_step`, atomically; returns how many.

    A run restored at step r − 1 writes step r again: what its killed predecessor wrote past
    the checkpoint never happened. A broken last line goes as well.
    """
    if not Path(path).exists():
        return 0
    records = list(read_jsonl(path))
    kept = [record for record in records if record.get("step", 0) < first_step]
    write_atomically(path, b"".join(encode(record) for record in kept))
    return len(records) - len(kept)


def _append_whole(handle: int, line: bytes) -> None:
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        line = b"\n" + line  # a killed writer's last line stays a line of its own
    try:
        written = os.write(handle, line)
        while written < len(line):
            written += os.write(handle, line[written:])
    except OSError:
        if os.fstat(handle).st_size > size:
            os.ftruncate(handle, size)
        raise


def _unwritable(path: str | os.PathLike, error: OSError) -> UserError:
    return UserError(
        f"cannot write {os.fspath(path)}: {error.strerror or error}; "
        "free some space or give another --workdir"
    )
