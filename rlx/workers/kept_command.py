"""Processes that another one has from afar: a command with a log, a worker. For actors of Ray."""

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlx.system import process_supervisor
from rlx.workers.worker_process import SupervisedProcess, WorkerLimits, start_worker


class KeptCommand:
    """Runs one command under a supervisor; all that it started ends with this process."""

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: str, log: str
    ) -> None:
        """Start the command in `cwd`; what it writes is appended to the file `log`."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks Ctrl-C, for children too
        with open(log, "ab") as file:
            self._log, self._read = log, file.tell()
            self._process = SupervisedProcess(
                command, cwd=cwd, stdout=file, stderr=file,
                environment={**environment, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._pid = 0  # of the command: looked up while it is its supervisor's only child
        while not self._pid and self._process.running:
            self._pid = next(iter(process_supervisor.descendants(self._process.pid)), 0)
            time.sleep(0.01)

    def look(self) -> tuple[int | None, list[str]]:
        """Return the command's exit code, None while it runs, and the lines it wrote since."""
        code = None if self._process.running else self._process.end()
        with open(self._log, "rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1] if code is None else new
        self._read += len(whole)
        return code, whole.decode(errors="replace").splitlines()

    def signal(self, number: int) -> None:
        """Send a signal to the command, and not to what it started."""
        if self._process.running:
            os.kill(self._pid, number)

    def end(self) -> None:
        """Kill the command and all that it started."""
        self._process.end()


class KeptWorker:
    """Runs one worker; hands on what it says, and what its pool says."""

    def __init__(self, module: str, limits: WorkerLimits, cwd: str):
        os.chdir(cwd)  # names of files are relative to it
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._process, self._socket = start_worker(module, limits)

    def write(self, data: bytes) -> None:
        """Send the worker bytes; none: there will be no more."""
        if data:
            self._socket.sendall(data)
        else:
            self._socket.shutdown(socket.SHUT_WR)

    def read(self, size: int) -> bytes:
        """Return the worker's next bytes; none: it has ended."""
        return self._socket.recv(size)

    def end(self, patience: float) -> int:
        return self._process.end(patience)
