"""Start workers of rewards and agents on nodes of a Ray cluster.

    pool ── socket pair ── two threads ── calls of an actor ══ socket pair ── supervisor, worker

A pool sees a socket and a process, as with local workers. Ray's calls carry the bytes, so no port
is open to others. A worker ends with its actor, which ends with this process or its node.
"""

import math
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.launch import ray_cluster, run_secrets
from rlx.workers.worker_process import StartWorker, WorkerHandle, WorkerLimits, start_worker

_CHUNK = 1 << 20  # bytes per call
_ANSWER_SECONDS = 10.0  # for a node to report a worker's exit code; then it is lost


def starter(key: str, config: Any) -> StartWorker:  # key: reward | agents
    """Return a function that starts workers here, or on Ray if the section has `resources`."""
    section, count, certificate = config[key], config.reward.workers, config.online.tls_cert
    if not section.resources:
        return start_worker
    setting = f"{key}.resources={section.resources}"
    try:
        pairs = (part.split(":") for part in section.resources.split(","))
        amounts = {kind.strip(): float(amount) for kind, amount in pairs}
        if not all(0 <= amount < math.inf for amount in amounts.values()):
            raise ValueError
    except ValueError:
        raise UserError(f"{setting}: give Ray resources, such as CPU:1 or CPU:2,big:1") from None
    ray = ray_cluster.join()
    for kind, amount in amounts.items():
        if (total := ray.cluster_resources().get(kind, 0)) < amount * count:
            need = f"{count} workers with {setting} need {count * amount:g} {kind}"
            raise UserError(f"{need}, and the Ray cluster has {total:g}; lower reward.workers")
    env = {name: os.environ[name] for name in section.environment if name in os.environ}
    if certificate and (bundle := Path(certificate).with_name(run_secrets.BUNDLE)).exists():
        env |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(bundle.absolute()))
    options = {
        "num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0), "resources": amounts,
        "max_concurrency": 4, "runtime_env": {"env_vars": env}, "max_restarts": 0,
    }  # fmt: skip
    return partial(_start, ray, options)


class KeptWorker:
    """Runs one worker as an actor, and forwards the bytes of both sides."""

    def __init__(self, module: str, limits: WorkerLimits, cwd: str):
        os.chdir(cwd)  # names of files are relative to it
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks Ctrl-C
        self._process, self._socket = start_worker(module, limits)

    def write(self, data: bytes) -> None:
        """Send the worker bytes; none end them."""
        if data:
            self._socket.sendall(data)
        else:
            self._socket.shutdown(socket.SHUT_WR)

    def read(self, size: int) -> bytes:
        """Return the worker's next bytes; none once it has ended."""
        return self._socket.recv(size)

    def end(self, patience: float) -> int:
        return self._process.end(patience)


def _start(
    ray: Any, options: Mapping[str, Any], module: str, limits: WorkerLimits
) -> tuple[WorkerHandle, socket.socket]:
    pool_end, actor_end = socket.socketpair()
    actor = ray.remote(KeptWorker).options(**options).remote(module, limits, os.getcwd())
    return _RemoteWorker(ray, actor, actor_end), pool_end


class _RemoteWorker:
    """A `WorkerHandle` of a worker on another node."""

    def __init__(self, ray: Any, actor: Any, end: socket.socket):
        self._ray, self._actor, self._end = ray, actor, end
        self._code: int | None = None
        self._receiving = threading.Thread(target=self._receive, daemon=True)
        self._receiving.start()
        threading.Thread(target=self._send, daemon=True).start()

    def stop(self) -> None:
        """Kill the worker and its children, and return at once."""
        self._ray.kill(self._actor)

    def end(self, patience: float = 0.0) -> int:
        """End it after `patience` seconds at most; return its exit code, −9 if it is lost."""
        if self._code is None:
            self._code = -signal.SIGKILL
            if patience:
                with suppress(self._ray.exceptions.RayError):
                    ref = self._actor.end.remote(patience)
                    self._code = self._ray.get(ref, timeout=patience + _ANSWER_SECONDS)
            self.stop()
        return self._code

    def _send(self) -> None:
        """Forward the pool's bytes, one call after the other, as actors may reorder calls."""
        data = b"begin"
        with suppress(OSError, self._ray.exceptions.RayError):
            while data:
                data = self._end.recv(_CHUNK)
                self._ray.get(self._actor.write.remote(data))
        self._receiving.join()
        self._end.close()

    def _receive(self) -> None:
        with suppress(OSError, self._ray.exceptions.RayError):
            while data := self._ray.get(self._actor.read.remote(_CHUNK)):
                self._end.sendall(data)
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
