"""Append-only JSON lines, a run's records on disk: written whole, read back line by line.

A line is written by a single system call and taken back when the disk is full, so a reader never
meets half a record. A killed process may still leave a last line without its end; `read_jsonl`
skips it. Before a run goes on, `set_aside` moves lines that a disk has spoilt to another file.
"""

import contextlib
import errno
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.base import UserError

_SCRATCH = re.compile(r"\..+\.\d+-\d+")


def jsonable(value: Any) -> Any:
    """Return `value` as JSON types: non-finite floats become None, arrays lists, keys strings.

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
        plain = value.tolist()
        whole = getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u")
        return plain if whole else jsonable(plain)
    raise TypeError(f"cannot write {type(value).__name__} as JSON: {value!r}")


def encode(obj: Mapping[str, Any]) -> bytes:
    """Return one line of UTF-8 JSON with its newline; lone surrogates stay JSON escapes."""
    text = json.dumps(jsonable(obj), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def append_jsonl(path: str | os.PathLike, obj: Mapping[str, Any]) -> None:
    """Append `obj` as one line, visible to readers when this returns; make its directory.

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
    """Replace the file by `data`; readers see the old bytes or the new ones, never a part."""
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


def sweep(directory: Path) -> None:
    """Remove scratch files of killed `write_atomically` calls; no other process may be writing."""
    for path in directory.glob(".*.*-*"):
        if _SCRATCH.fullmatch(path.name):
            path.unlink(missing_ok=True)


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Return the object in a file; empty where there is none or it cannot be read."""
    try:
        return _object(Path(path).read_bytes()) or {}
    except OSError:
        return {}


def read_jsonl(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order; none if it is missing. Skip unreadable lines."""
    if not Path(path).exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if (record := _object(line)) is not None:
                yield record


def has_step(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a step, as every line of a run's files must."""
    step = record.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def set_aside(
    path: str | os.PathLike,
    good: Callable[[Mapping[str, Any]], bool] = has_step,
    first_step: float = math.inf,
) -> int:
    """Move the lines that are no `good` record to PATH.unreadable, and return how many.

    A last line without its end is a killed writer's: it is removed and not counted. So are records
    whose `step` is ≥ `first_step`: a run restored at step r − 1 writes step r again.
    """
    path, kept, bad = Path(path), [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        record = _object(line)
        if record is None or not good(record):
            bad += [line] * line.endswith(b"\n")
        elif record.get("step", 0) < first_step:
            kept.append(line)
    if bad:
        beside = path.with_name(f"{path.name}.unreadable")
        before = beside.read_bytes() if beside.exists() else b""
        write_atomically(beside, before + b"".join(bad))
    if kept != lines:
        write_atomically(path, b"".join(kept))
    return len(bad)


def _object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if `text` is none."""
    try:
        value = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return UserError(
        f"cannot write {os.fspath(path)}: {error.strerror or error}; "
        f"{'free some space' if full else 'move what is there'} or give another --workdir"
    )
