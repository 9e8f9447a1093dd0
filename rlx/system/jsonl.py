"""Append-only JSON lines: each line is written by one system call, and undone if the disk is full.

A killed process may leave an incomplete last line, which `read_jsonl` skips. `set_aside` moves
unreadable lines to another file before a run resumes.
"""

import contextlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.system.atomic_directory import is_full

_SCRATCH = re.compile(r"\..+\.\d+-\d+")


def jsonable(value: Any) -> Any:
    """Return `value` as JSON types, null for non-finite floats; TypeError if it has none."""
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
        exact = getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u")
        return plain if exact else jsonable(plain)
    raise TypeError(f"cannot write {type(value).__name__} as JSON: {value!r}")


def encode(obj: Mapping[str, Any]) -> bytes:
    """Return a line of UTF-8 JSON; lone surrogates stay JSON escapes."""
    text = json.dumps(jsonable(obj), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def append_jsonl(path: str | os.PathLike, obj: Mapping[str, Any]) -> None:
    """Append a line to a file, made if missing; if that fails, UserError and an unchanged file."""
    line = encode(obj)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with open(handle, "rb", buffering=0):  # closes it
            size, written = os.fstat(handle).st_size, 0
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # after the incomplete line of a killed writer
            try:
                while written < len(line):
                    written += os.write(handle, line[written:])
            except OSError:
                os.ftruncate(handle, size)
                raise
    except OSError as error:
        raise _unwritable(path, error) from error


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Replace a file by `data` atomically; make its directory if it is missing."""
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
    """Return the JSON object in a file, {} if it is missing or unreadable."""
    try:
        return _object(Path(path).read_bytes()) or {}
    except OSError:
        return {}


def read_jsonl(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order, skipping unreadable lines; none if it is missing."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if (record := _object(line)) is not None:
                yield record


def read_last(path: str | os.PathLike) -> dict[str, Any]:
    """Return the last record with a step, of the last 256 KiB of a file; {} without one."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 18)))
        records = [*filter(None, map(_object, file.read().splitlines()))]
        return next(filter(has_step, reversed(records)), {})
    return {}


def has_step(record: Mapping[str, Any]) -> bool:
    """Return whether a record has an integer `step` ≥ 0."""
    step = record.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def set_aside(
    path: str | os.PathLike,
    good: Callable[[Mapping[str, Any]], bool] = has_step,
    first_step: float = math.inf,
) -> int:
    """Move lines that are not a `good` record to PATH.unreadable, and return how many.

    Records of `first_step` and later steps are removed.
    """
    path, kept, bad = Path(path), [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        record = _object(line)
        if record is None or not good(record):
            bad += [line] * line.endswith(b"\n")  # an incomplete last line is removed, not counted
        elif record.get("step", 0) < first_step:  # a resumed run makes the others again
            kept.append(line)
    if bad:
        side_file = path.with_name(f"{path.name}.unreadable")
        before = side_file.read_bytes() if side_file.exists() else b""
        write_atomically(side_file, before + b"".join(bad))
    if kept != lines:
        write_atomically(path, b"".join(kept))
    return len(bad)


def _object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; return None if `text` is not one."""
    try:
        value = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unwritable(path: str | os.PathLike, error: OSError) -> UserError:
    remedy = "free some space" if is_full(error) else "move what is there"
    what = f"cannot write {os.fspath(path)}: {error.strerror or error}"
    return UserError(f"{what}; {remedy} or give another --workdir")
