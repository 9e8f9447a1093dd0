"""Turn failures of memory, disks, ports and open files into one-line errors, without JAX."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlx.base import UserError
from rlx.engines.kv_memory import device_is_full
from rlx.system import available_memory
from rlx.system.atomic_directory import is_full
from rlx.system.workdir_lock import existing

_PLACES = {  # errors of a path → remedy
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable, or give another"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT),
        "its disk or server fails: repair or remount it, or give another",
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
        "a file is where a directory should be, or the reverse: move it away, or give another",
    ),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "give another"),
}
_SIZE = re.compile(r"allocat\w*\D{0,20}?([\d.]+)\s?(bytes|[KMGT]i?B)", re.IGNORECASE)


@contextmanager
def friendly_errors(advice: Callable[[], str] = lambda: "", doing: str = "") -> Iterator[None]:
    """Turn a failure of the block, named `doing`, that `explain` knows into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if user_error := explain(error, advice, doing):
            raise user_error from error
        raise


def explain(
    error: BaseException, advice: Callable[[], str] = lambda: "", doing: str = ""
) -> UserError | None:
    """Return the UserError for a failure or its cause, or None; `advice` is about memory."""
    when = f" ({doing})" if doing else ""
    for cause in _causes(error):
        if device_is_full(cause):
            detail = f": {amount} more wanted" if (amount := _size(str(cause))) else ""
            more = advice() or "use smaller batches, fewer sequences or a smaller model"
            return UserError(f"out of memory{when}{detail}; {more}")
        if isinstance(cause, MemoryError) or _errno(cause) == errno.ENOMEM:
            memory = available_memory.memory()
            return UserError(f"memory is used up{when}: {memory}; {advice() or memory.remedy}")
        if is_full(cause):
            return UserError(_disk(cause))
        if _errno(cause) == errno.EADDRINUSE:
            remedy = "end the process that listens there, or choose another port (0: any free one)"
            return UserError(f"a port is in use already ({cause}); {remedy}")
        if _errno(cause) == errno.EMFILE:
            remedy = "raise the limit with `ulimit -n 65536`"
            return UserError(f"too many open files ({cause}); {remedy}")
        if (number := _errno(cause)) in _PLACES and (name := getattr(cause, "filename", None)):
            return UserError(f"{os.fsdecode(name)}{when}: {os.strerror(number)}; {_PLACES[number]}")
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    errors = [error]
    for exception in errors:  # which grows meanwhile
        causes = (*getattr(exception, "exceptions", ()), *filter(None, [exception.__cause__]))
        errors += [cause for cause in causes if cause not in errors]
        yield exception


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _size(text: str) -> str:
    """Return the size in an allocator's message; empty if it has none."""
    if not (match := _SIZE.search(text)):
        return ""
    number, unit = float(match[1]), match[2].lower()
    scale = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}.get(unit[0], 1)
    return f"{number * scale / 1e9:.2f} GB"


def _disk(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    if not isinstance(name, str | os.PathLike):
        return f"no space left where the run writes ({error}); free some, or give another --workdir"
    place = existing(Path(os.fspath(name)))
    free = shutil.disk_usage(place).free / 1e9
    shared = str(place).startswith("/dev/shm")
    which = "set fleet.publish_dir to a disk" if shared else "give another --workdir"
    return f"no space left for {name} ({free:.2f} GB free there); free some, or {which}"
