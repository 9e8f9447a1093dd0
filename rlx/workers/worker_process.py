"""Processes for code that rlx does not trust: rewards of users, agents.

    reward workers, agents ─▶ start_worker ─▶ process_supervisor.py ─▶ python -m MODULE DESCRIPTOR
                                  └────────────── a socket pair ──────────────┘

The supervisor kills whatever such a process leaves behind, and the process sees only a few
variables of the environment (`environment`).
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rlx.option import option, read_options
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system import process_supervisor as supervisor
from rlx.system.process_settings import keep_private, python_path

_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY",
    "no_proxy", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "HF_HOME", "HF_HUB_OFFLINE",
    "TOKENIZERS_PARALLELISM", "REQUESTS_CA_BUNDLE",
})  # fmt: skip
_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "XDG_")
_SANDBOX = "RLX_SANDBOX"  # a worker's variable: the fields of its SandboxOptions
_END_SECONDS = 10.0  # until a supervisor that does not end is killed


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of each worker process."""

    memory_gb: float = option(0.0, "address space of each process; 0: no limit", "0")
    max_processes: int = option(0, "processes of a worker and all it starts; 0: no limit", "0")
    environment: tuple[str, ...] = option((), "further variables it sees, after PATH, HOME, …")
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)  # of `worker_sandbox`

    @classmethod
    def of(cls, section: Any, sandbox: Any) -> "WorkerLimits":
        """Return the limits in the `reward` or `agents` section of a config, and in `sandbox`."""
        return read_options(cls, section, sandbox=SandboxOptions(**sandbox))


NO_LIMITS = WorkerLimits()


class WorkerHandle(Protocol):
    """A worker's process, here or on another machine; see `SupervisedProcess`."""

    def stop(self) -> None: ...

    def end(self, patience: float = 0.0) -> int: ...


# Starts a module as a worker; returns it and this process's end of a socket to it.
StartWorker = Callable[[str, WorkerLimits], tuple[WorkerHandle, socket.socket]]


class SupervisedProcess:
    """A command under a supervisor, which kills all it started when it or this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: WorkerLimits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,  # of the command; None: this process's
        **options: Any,  # of subprocess.Popen
    ):
        numbers = (os.getpid(), int(limits.memory_gb * 2**30), limits.max_processes)
        prefix = [sys.executable, "-I", "-S", supervisor.__file__, *map(str, numbers)]
        self._process = subprocess.Popen(
            [*prefix, *command], stdin=subprocess.PIPE, env=environment, start_new_session=True,
            **options,
        )  # fmt: skip
        self.pid, self.stdout = self._process.pid, self._process.stdout

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Have the supervisor kill everything, and return at once."""
        assert self._process.stdin
        self._process.stdin.close()

    def end(self, patience: float = 0.0) -> int:
        """End it, unless it ends within `patience` seconds; return its code as in subprocess."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.stop()
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def environment(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the harmless variables of this environment, and those called `names`."""
    keys = [name for name in os.environ if name in {*_NAMES, *names} or name.startswith(_PREFIXES)]
    return {**{name: os.environ[name] for name in keys}, "PYTHONPATH": python_path()}


def start_worker(module: str, limits: WorkerLimits) -> tuple[SupervisedProcess, socket.socket]:
    """Start `python -m MODULE DESCRIPTOR`; return it and this process's end of a socket pair."""
    keep_private()  # from now on other processes of this user cannot read our memory
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", module, str(number)]
        env = {**environment(limits.environment), _SANDBOX: json.dumps(asdict(limits.sandbox))}
        try:
            worker = SupervisedProcess(command, limits=limits, environment=env, pass_fds=(number,))
        except OSError:
            ours.close()
            raise
    return worker, ours


def worker_sandbox(preload: Sequence[str] = ()) -> Any:
    """Return a sandbox, not entered yet, as the config of this worker's run asks for it.

    For rewards and agents: `async with worker_sandbox() as sandbox: await sandbox.run(code)`.
    """
    return SandboxOptions(**json.loads(os.environ.get(_SANDBOX, "{}"))).make(preload)


class WorkerEnd:
    """The worker's side of its socket; `receive` in one thread, `send` in any."""

    def __init__(self):
        os.dup2(2, 1)  # standard output belongs to the command, not to what users print
        keep_private()
        self._socket = socket.socket(fileno=int(sys.argv[1]))
        self._socket.set_inheritable(False)
        self._lines, self._lock = self._socket.makefile("rb", 1 << 20), threading.Lock()
        self.first = self.receive() or sys.exit()  # message from the process that started this one
        # Modules are looked for where the starting process does, then elsewhere.
        path = self.first["path"]
        sys.path[:] = [*path, *(p for p in sys.path if p not in path)]

    def receive(self) -> dict[str, Any]:
        """Wait for the next message and return it; {} where there will be none."""
        line = self._lines.readline()
        return json.loads(line) if line.endswith(b"\n") else {}

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(data)
