"""Processes that leave nothing behind and are told little, for code that nobody vouches for.

    reward workers, agents' processes ─▶ start_worker ─▶ keeper.py ─▶ python -m MODULE DESCRIPTOR
                                              └──────────── a socket pair ───────────┘

`keeper.py` ends what they started; `environment` is what they see of ours.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.fleet.parent_death import keep_private
from rlx.rewards import keeper

_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY",
    "no_proxy", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "HF_HOME", "HF_HUB_OFFLINE",
    "TOKENIZERS_PARALLELISM",
})  # fmt: skip
_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "XDG_")
_HOME = str(Path(__file__).parents[2])  # `import rlx` may be a clone's directory
_END_SECONDS = 10.0  # until a keeper that does not end is killed


@dataclass(frozen=True, slots=True)
class Limits:
    """What each worker process may have.

    Attributes:
      memory_gb: address space of each of its processes, GiB; 0: no limit.
      max_processes: it and all that it started; 0: no limit.
      environment: names of variables that it sees besides the harmless ones.
    """

    memory_gb: float = 0.0
    max_processes: int = 0
    environment: tuple[str, ...] = ()

    @classmethod
    def of(cls, section: Any) -> "Limits":
        """Return those of `reward` or `agents` in a config."""
        return cls(section.memory_gb, section.max_processes, tuple(section.environment))


NO_LIMITS = Limits()


class Kept:
    """A command under a keeper: with it ends all that it started, as with us it does.

    Args:
      environment: of the command; None: ours.
      options: of subprocess.Popen.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: Limits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ):
        numbers = (os.getpid(), int(limits.memory_gb * 2**30), limits.max_processes)
        own = [sys.executable, "-I", "-S", keeper.__file__, *map(str, numbers)]
        self._process = subprocess.Popen(
            [*own, *command], stdin=subprocess.PIPE, env=environment, start_new_session=True,
            **options,
        )  # fmt: skip
        self.pid, self.stdout = self._process.pid, self._process.stdout

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Have everything killed, and return at once."""
        assert self._process.stdin
        self._process.stdin.close()

    def end(self, patience: float = 0.0) -> int:
        """End it, if it has not within `patience` seconds; return its exit code.

        As of subprocess, a signal's number is negative; see `words`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience:
                self._process.wait(patience)
        self.stop()
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def words(code: int | None, limits: Limits) -> str:
    """Return how a worker ended, in words."""
    if code == keeper.TOO_MANY and limits.max_processes:
        return f"was ended: it had more than max_processes={limits.max_processes}"
    return f"died (exit code {code})"


def environment(names: Sequence[str] = ()) -> dict[str, str]:
    """Return what of our environment concerns any program, and `names` besides."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NAMES or name in names or name.startswith(_PREFIXES)
    }
    path = (_HOME, os.environ.get("PYTHONPATH", ""))
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def start_worker(module: str, limits: Limits) -> tuple[Kept, socket.socket]:
    """Start `python -m MODULE DESCRIPTOR`; return it and our end of a socket pair.

    From now on its user's other processes cannot look into this one.
    """
    keep_private()
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", module, str(number)]
        try:
            worker = Kept(
                command, limits=limits, environment=environment(limits.environment),
                pass_fds=(number,),
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
    return worker, ours


def own_end() -> socket.socket:
    """Return a worker's end of the pair that `start_worker` made; called in the worker.

    What it prints goes to standard error, as standard output is a command's.
    """
    os.dup2(2, 1)
    keep_private()
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    return end


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """A context after which no process runs that was started in it, orphans included."""
    libc, own = ctypes.CDLL(None), os.getpid()
    before = set(keeper.descendants(own))
    libc.prctl(keeper.SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        end = time.monotonic() + _END_SECONDS
        while (left := set(keeper.descendants(own)) - before) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)
        libc.prctl(keeper.SUBREAPER, 0, 0, 0, 0)
