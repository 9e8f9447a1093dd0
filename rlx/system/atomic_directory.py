"""Atomic replacement of a directory: a reader finds the old one or the new one."""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlx.base import DiskFull, UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CODE = re.compile(r"os_error_code='(\d+)'")  # in tensorstore's messages
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h


def is_full(error: BaseException) -> bool:
    """Return whether a write failed for lack of space."""
    codes = [getattr(error, "errno", None), *map(int, _CODE.findall(str(error)))]
    return any(code in _FULL for code in codes)


def flush(paths: Iterable[Path]) -> None:
    """Write files and directories to disk, before a rename."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory that replaces `path` if all goes well; UserError or DiskFull if not."""
    fresh, lock = None, -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError("it is a file")
        sweep(path)
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        lock = _lock(fresh)
        yield fresh
        fresh.chmod(0o755)  # mkdtemp's 0700 would hide an exported model from other users
        if not path.exists():
            fresh.rename(path)
        elif not exchange(fresh, path):  # if killed before the next rename, `sweep` restores it
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
            path.rename(old / path.name)
            fresh.rename(path)
            shutil.rmtree(old)
    except OSError as error:
        raise (DiskFull if is_full(error) else UserError)(
            f"cannot write {path}: {error}; free space or choose another directory"
        ) from error
    finally:
        if fresh and fresh.exists():
            shutil.rmtree(fresh)
        if lock >= 0:
            os.close(lock)


def exchange(one: Path, other: Path) -> bool:
    """Swap two directory entries atomically; return False if the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return renameat2 is not None and not renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE)


def sweep(path: Path) -> None:
    """Remove files of killed writers of `path`; restore `path` if one had moved it away."""
    pattern = re.compile(rf"\.{re.escape(path.name)}-(old-)?\w+")  # not those of a longer name
    for left in path.parent.glob(".*"):
        if not pattern.fullmatch(left.name) or (lock := _lock(left)) < 0:
            continue  # another path's, or its writer is alive
        if not path.exists() and (left / path.name).is_dir():
            (left / path.name).rename(path)
        shutil.rmtree(left, ignore_errors=True)
        os.close(lock)


def try_lock(descriptor: int) -> bool:
    """Lock an open file or directory until closed; False if another process has it; or OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(directory: Path) -> int:
    """Return a descriptor that locks a directory until it is closed; −1 if it is locked."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):
            if try_lock(handle):
                return handle
        os.close(handle)
    return -1
