"""Private directory for a run's weights, removed even if the run is killed.

The run and its servers share one lock. A small process waits for it and removes the directory when
the last of them ends. If it is killed too, the next run removes unlocked directories.
"""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from rlx.base import UserError, explained
from rlx.fleet.publish import sweep
from rlx.system.atomic_directory import try_lock

_PREFIX, _LOCK = "rlx-run-", "lock"
_REMOVE_SECONDS = 5.0
_REMOVE = """
import fcntl, shutil, sys
with open(sys.argv[1] + "/lock", "r+") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Scratch(contextlib.AbstractContextManager):
    """A new directory in `parent` that other users can neither list, read nor change."""

    def __init__(self, parent: str | os.PathLike):
        problem = f"cannot make a directory for weights in {parent}"
        with explained(problem, "set fleet.publish_dir to another directory"):
            _check_parent(parent)
            sweep(parent)
            self.directory, self.lock = make_private(parent)
        self._remover = subprocess.Popen(  # survives signals to our session
            (sys.executable, "-I", "-S", "-c", _REMOVE, self.directory),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={}, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """Release the lock and remove the directory; wait a while for others that hold the lock."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
            with contextlib.suppress(subprocess.TimeoutExpired):  # another process holds the lock
                self._remover.wait(_REMOVE_SECONDS)
            shutil.rmtree(self.directory, ignore_errors=True)  # the remover may have been killed

    def __exit__(self, *_) -> None:
        self.close()


def _check_parent(parent: str | os.PathLike) -> None:
    """Raise UserError if any user could replace our directory by another."""
    mode = os.stat(parent).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UserError(
            f"every user of this machine may rename files in {parent} (mode "
            f"{stat.S_IMODE(mode):o}); chmod +t it, or set fleet.publish_dir to another directory"
        )


def make_private(parent: str | os.PathLike) -> tuple[str, int]:
    """Make a directory; return its path and a locked descriptor, which its writers inherit.

    Directories of killed processes are removed.
    """
    _sweep_dead(parent)
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        lock = os.open(Path(path, _LOCK), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if try_lock(lock) and Path(path, _LOCK).exists():  # else another run swept it
            return path, lock
        os.close(lock)


def _sweep_dead(parent: str | os.PathLike) -> None:
    """Remove this user's directories that are not locked."""
    for path in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed already, or made by another program
            if path.lstat().st_uid != os.geteuid():
                continue
            with open(path / _LOCK, "r+") as lock:
                if try_lock(lock.fileno()):
                    shutil.rmtree(path, ignore_errors=True)
