"""Start, watch, restart and stop rollout servers on this machine.

    start ─▶ spawn all ─▶ JSON ready lines in WORKDIR/logs/server-i.log ─▶ wait() has addresses
    the fleet finds one silent ─▶ SIGKILL ─▶ back-off ─▶ spawn on the same port, at most
                                                         `max_restarts` times in a row

One thread starts all servers and outlives them, because the kernel ends a server when the *thread*
that started it ends (system/process_settings.py). So servers end with the trainer, even by SIGKILL.
"""

import contextlib
import itertools
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.fleet import wire
from rlx.fleet.addresses import Joining
from rlx.fleet.client import Fleet
from rlx.fleet.scratch import Scratch
from rlx.fleet.tls import Tls
from rlx.model.tensors import num_bytes
from rlx.system import exit_reason
from rlx.system.process_settings import python_path
from rlx.system.process_supervisor import ask_for_stacks, descendants

COMMAND = (sys.executable, "-m", "rlx.serve")
_EARLY = ("engine", "slots", "max_model_len", "dtype", "decode_steps")  # flags of JAX's engine
_POLL_SECONDS = 0.05
_STACKS_SECONDS = 0.5  # for a process to write its stacks
_START_SECONDS, _START_BYTES_A_SECOND = 180.0, 50e6  # compilation; a cold disk, shared by servers
_STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL
_STEADY_SECONDS = 60.0  # a server that ran this long may restart as often as a new one


@dataclass(frozen=True)
class CpuPlan:
    """The cores of the trainer and of each server."""

    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]


def cpu_plan(
    cores: Sequence[int], num_servers: int, threads: int = 0, sharing: bool = False,
    trains: bool = True,
) -> CpuPlan:  # fmt: skip
    """Divide `cores`, ids of usable ones, between servers and, if it `trains`, a trainer.

    Each server gets `threads` cores, 0 for as many as every process, and the trainer the rest.
    With `sharing`, processes that would have one core each or less use all of them.
    """
    cores = tuple(cores)
    # A core of one's own is idle while its process waits for the other's.
    few = sharing and not threads and len(cores) <= num_servers + 1
    if num_servers == 0 or len(cores) == 1 or few:
        return CpuPlan(cores, (cores,) * num_servers)
    per_server = min(threads or max(1, len(cores) // (num_servers + trains)), len(cores) - trains)
    # 1: too few, so servers share the others.
    rest = max(1, len(cores) - per_server * num_servers) if trains else 0
    pool = itertools.cycle(cores[rest:])
    servers = [tuple(sorted(itertools.islice(pool, per_server))) for _ in range(num_servers)]
    return CpuPlan(cores[:rest], tuple(servers))


class LocalServers:
    """`num_servers` processes of `python -m rlx.serve`, as a context manager."""

    def __init__(
        self,
        model: str | os.PathLike,  # HF directory
        *,
        workdir: str | os.PathLike,  # logs go to its logs/`name`-i.log
        name: str = "server",
        num_servers: int = 1,
        # The default uses the cores of this process, before the trainer pins itself.
        plan: CpuPlan | None = None,
        publish_dir: str = "/dev/shm",  # parent of the private directory
        weight_roots: Sequence[str] = (),  # further directories for published files
        token: str | None = None,  # bearer token that servers require; None: a new one
        joining: Joining | None = None,  # where to find further servers with the same token
        platform: str = "cpu",  # of JAX in servers without their own GPUs
        gpus: Sequence[Sequence[str]] = (),  # of each server; empty: all that this process sees
        ready_timeout: float = 0.0,  # seconds to start; 0: by the weights' size
        answer_timeout: float = 60.0,  # seconds of silence before a server is restarted
        max_restarts: int = 5,  # of one server in a row
        on_message: Callable[[str], None] | None = None,  # takes one line for the user
        command: Sequence[str] = COMMAND,
        early: Sequence[subprocess.Popen] = (),  # from `start_early`, for the first ones
        metrics_ports: Iterable[int] = (),  # its servers' Prometheus listeners take the next ones
        **options: str | int,  # flags of rlx.serve; server i gets seed + i
    ):
        plan = plan or cpu_plan(sorted(os.sched_getaffinity(0)), num_servers)
        seed = int(options.pop("seed", 0))
        logs = Path(workdir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(publish_dir)
        # Private, of the servers and their client; removed after they have ended.
        self.directory, self.token = self._scratch.directory, token or secrets.token_urlsafe(32)
        options = {"stage_dir": self.directory, **options}
        flags = [f"--{flag.replace('_', '-')}={value}" for flag, value in options.items()]
        flags += [f"--model={os.fspath(model)}", f"--parent-pid={os.getpid()}"]
        flags += [f"--weight-root={root}" for root in (self.directory, *weight_roots)]
        metrics = (f"--metrics-port={port}" for port in metrics_ports)  # one flag a server
        self._servers = [
            _Server(
                command=(*command, *flags, f"--seed={seed + i}", *itertools.islice(metrics, 1)),
                log=logs / f"{name}-{i}.log", cpus=cpus, lock=self._scratch.lock,
                env=_environ(len(cpus), platform, self.token, *gpus[i : i + 1]),
                early=None if gpus or i >= len(early) else early[i],
            )
            for i, cpus in enumerate(plan.servers)
        ]  # fmt: skip
        seconds = _START_SECONDS + num_bytes(Path(model)) / _START_BYTES_A_SECOND
        self._ready_timeout = ready_timeout or seconds
        self._max_restarts = max_restarts
        self._answer_timeout, self._joining = answer_timeout, joining
        self._silent = dict[str, float]()  # address → seconds of silence, from the fleet
        self._say = on_message or (lambda text: None)
        self._ready: Future[tuple[str, ...]] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="local-servers", daemon=True)

    def start(self) -> "LocalServers":
        """Begin to start the servers; return at once, so that the trainer can compile."""
        self._thread.start()
        return self

    def wait(self) -> tuple[str, ...]:
        """Return host:port of each server once all are ready; UserError if one fails to start."""
        return self._ready.result()

    def fleet(self, **options: Any) -> Fleet:
        """Return the servers' unconnected fleet once they are ready; `options` are Fleet's."""
        return Fleet(
            self.wait(), token=self.token, publish_dir=self.directory, joining=self._joining,
            restart=self._silent.__setitem__, **options,
        )  # fmt: skip

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        return tuple(server.pid for server in self._servers if server.pid)

    def stop(self) -> None:
        """End every server by SIGTERM, then SIGKILL."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join()
        self._scratch.close()

    def __enter__(self) -> "LocalServers":
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def _keep(self) -> None:
        """Start, watch, restart and end the processes, in the thread that owns them."""
        try:
            for server in self._servers:
                server.spawn()
            self._ready.set_result(self._wait_ready())
            while not self._stopping.wait(_POLL_SECONDS):
                for server in self._servers:
                    self._end_if_hung(server)
                    self._revive(server)
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                self._say(f"the local rollout servers stop because of an error: {error}")
        finally:
            _end(self._servers)

    def _wait_ready(self) -> tuple[str, ...]:
        deadline = time.monotonic() + self._ready_timeout
        while waiting := [server for server in self._servers if not server.read_port()]:
            for server in waiting:
                if (status := server.poll()) is not None:
                    raise UserError(f"a rollout server ended at start {status}: {server.message}")
            if time.monotonic() > deadline:
                problem = f"a rollout server was not ready within {self._ready_timeout:g} s"
                raise UserError(f"{problem}; read {waiting[0].log}{waiting[0].write_stacks()}")
            if self._stopping.wait(_POLL_SECONDS):
                raise UserError("the rollout servers were stopped before they were ready")
        return tuple(f"127.0.0.1:{server.port}" for server in self._servers)

    def _end_if_hung(self, server: "_Server") -> None:
        """Kill `server` if it has not answered for too long, or sends no token."""
        silence = self._silent.pop(f"127.0.0.1:{server.port}", 0.0)
        ready, mute = server.read_port(), math.isinf(silence)
        limit = self._answer_timeout if ready else self._ready_timeout
        lived = time.monotonic() - (server.ready_at or server.started)
        if server.pid and (mute or min(silence, lived) > limit):
            why = "sends no token" if mute else f"has not answered for {limit:g} s"
            self._say(f"{server} {why}; killing it{server.write_stacks()}")
            server.signal(signal.SIGKILL)

    def _revive(self, server: "_Server") -> None:
        """Restart `server` if it ended and its back-off is over."""
        status = server.poll()
        if status is None or server.restarts > self._max_restarts:
            return
        now = time.monotonic()
        if not server.retry_at:
            if now - server.started > _STEADY_SECONDS:
                server.restarts = 0
            server.restarts += 1
            text = f"{server} ended {status}"
            if server.restarts > self._max_restarts:
                self._say(f"{text} after {self._max_restarts} restarts: {server.message}")
                return
            server.retry_at = now + 0.25 * 4 ** (server.restarts - 1)  # five last over a minute
            self._say(f"{text} ({server.message}); starting it again")
        if now >= server.retry_at:
            server.spawn()


@dataclass(eq=False)
class _Server:
    """One server, whose process may be restarted with the same port, log and cores."""

    command: Sequence[str]
    log: Path
    cpus: tuple[int, ...]
    env: dict[str, str]
    lock: int  # descriptor for the process to inherit
    early: subprocess.Popen | None = None  # may become its first process
    port: int = 0
    ready_at: float = 0.0  # when this process was ready; 0: not yet
    restarts: int = 0
    retry_at: float = 0.0  # 0: no restart is due
    started: float = 0.0
    process: subprocess.Popen | None = None
    oom_kills: exit_reason.OomKills = field(default_factory=exit_reason.OomKills)
    peak: int = 0  # bytes of memory
    ending: str = ""  # how the process ended, as of `poll`
    log_start: int = 0  # where the process's lines begin in the log

    def __str__(self) -> str:
        return f"rollout server {self.log.stem} (port {self.port})"

    @property
    def pid(self) -> int:
        """Id of the process; 0 if none runs."""
        return self.process.pid if self.process and self.process.returncode is None else 0

    def spawn(self) -> None:
        """Start the process on its cores, unless an early one can take its place."""
        command, early = (*self.command, f"--port={self.port}"), self.early
        with open(self.log, "ab") as log:
            self.log_start = log.seek(0, os.SEEK_END)
            if early and _hand_over(early, command, self):
                self.process = early
            else:
                self.process = start_on(
                    command, self.cpus, stdin=subprocess.DEVNULL, stdout=log, env=self.env,
                    pass_fds=(self.lock,),
                )  # fmt: skip
        self.early = None
        self.started, self.retry_at, self.ready_at = time.monotonic(), 0.0, 0.0
        self.oom_kills, self.peak = exit_reason.OomKills(), 0

    def poll(self) -> str | None:
        """Return how the process ended, None while it runs; kill its children once it ended."""
        process = self.process
        if process is None:
            return None
        if process.returncode is None:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                self.oom_kills.look()
                self.peak = exit_reason.peak_memory(process.pid) or self.peak
                return None
            self.signal(signal.SIGKILL)  # its group, before the id can be reused
            oom = self.oom_kills.lately()
            self.ending = exit_reason.words(process.wait(), self.peak, killed_for_memory=oom)
        return self.ending

    def read_port(self) -> int:
        """Return the port that the process has announced; 0 before that."""
        for line in () if self.ready_at else self._lines():
            if line.startswith('{"port"') and line.endswith("}"):
                self.port, self.ready_at = json.loads(line)["port"], time.monotonic()
        return self.port if self.ready_at else 0

    @property
    def message(self) -> str:
        """Return the last line of the process, with a remedy if memory ran out, or its log."""
        return exit_reason.last_words(self._lines()) or f"its log is {self.log}"

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def write_stacks(self) -> str:
        """Have the process write its threads' stacks to its log; return where, "" if it cannot."""
        size = self.log.stat().st_size
        if self.pid:
            ask_for_stacks([self.pid, *descendants(self.pid)])
            time.sleep(_STACKS_SECONDS)
        grew = self.log.stat().st_size > size
        return f"; the stacks of its threads are in {self.log}" if grew else ""

    def _lines(self) -> list[str]:
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace").splitlines()


def _end(servers: Sequence[_Server]) -> None:
    for server in servers:
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGCONT)  # a stopped process would not handle SIGTERM
    deadline = time.monotonic() + _STOP_SECONDS
    while running := [s for s in servers if s.pid and s.poll() is None]:
        if time.monotonic() > deadline:
            for server in running:
                server.signal(signal.SIGKILL)
        time.sleep(0.01)


def start_on(command: Sequence[str], cpus: Sequence[int], **options: Any) -> subprocess.Popen:
    """Start a process on its cores, in its own session, so Ctrl-C does not reach it."""
    options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)  # this thread's, which the child inherits
    try:
        return subprocess.Popen(command, **options)
    finally:
        os.sched_setaffinity(0, affinity)


def start_early(
    model: str | os.PathLike, cpus: Sequence[int], seed: int, options: Mapping[str, Any]
) -> subprocess.Popen:
    """Start a JAX server that compiles, then waits for flags; it ends with this thread."""
    flags = [f"--{name.replace('_', '-')}={options[name]}" for name in _EARLY]
    flags += [f"--seed={seed}", f"--model={os.fspath(model)}", f"--parent-pid={os.getpid()}"]
    return start_on(
        (*COMMAND, *flags, "--early"), cpus, env=_environ(len(cpus), "cpu", ""),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _hand_over(early: subprocess.Popen, command: Sequence[str], server: "_Server") -> bool:
    """Let `early` serve by `command`; end it and return False if its engine is another one."""
    assert early.stdin
    with contextlib.suppress(OSError), early.stdin as pipe:  # OSError: it has ended
        same = {*early.args} - {"--early"} <= {*command}  # type: ignore[misc]
        if same and os.sched_getaffinity(early.pid) == {*server.cpus}:
            message = str(server.log.absolute()), server.env[wire.TOKEN_VARIABLE], *command[3:]
            pipe.write(json.dumps(message).encode())
            pipe.close()  # raises OSError too
            return True
    early.kill()
    early.wait()
    return False


def _environ(threads: int, platform: str, token: str, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return this environment for a server: rlx on its path, `threads` in each pool, its token."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        **os.environ, **dict.fromkeys(pools, str(threads)),
        "JAX_PLATFORMS": "cuda" if gpus else platform,
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}), "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1", wire.TOKEN_VARIABLE: token,
    }  # fmt: skip


class RunningServers(contextlib.ExitStack):
    """Running servers at known addresses; `options` are those of Fleet."""

    # `publish_dir` is the parent of a private directory; "": nothing is published.
    def __init__(self, addresses: Sequence[str], *, publish_dir: str = "", **options: Any):
        super().__init__()
        if publish_dir:
            options["publish_dir"] = self.enter_context(Scratch(publish_dir)).directory
        self.fleet = partial(Fleet, tuple(addresses), **options)  # takes further ones


def servers_of(
    addresses: Sequence[str],
    model: str | os.PathLike,
    *,
    token: str | None = None,  # of servers at `addresses`, and of started ones that others may join
    tls: Tls | None = None,  # of servers at `addresses`
    joining: Joining | None = None,
    **local: Any,  # other options of LocalServers
) -> LocalServers | RunningServers:
    """Return the servers at `addresses`; without any, servers of `model` to start."""
    if addresses or (joining and not local["plan"].servers):
        place = local.get("publish_dir", "")
        return RunningServers(addresses, publish_dir=place, token=token, tls=tls, joining=joining)
    return LocalServers(model, token=token if joining else None, joining=joining, **local)
