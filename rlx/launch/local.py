"""Rollout servers on this machine: started, watched, restarted, stopped.

One thread starts every server and stays until the last has ended, because the kernel ends a
server when the *thread* that started it ends (see system/process_settings.py): whatever kills the
trainer, SIGKILL included, its servers go with it.

    start ─▶ spawn all ─▶ JSON ready lines in WORKDIR/logs/server-i.log ─▶ wait() has addresses
    the fleet finds one silent ─▶ SIGKILL ─▶ dead ─▶ back-off ─▶ spawn on the same port, up to
                                                                 `max_restarts`
"""

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlx
from rlx.base import UserError
from rlx.fleet import wire
from rlx.fleet.addresses import Joining
from rlx.fleet.client import Fleet
from rlx.fleet.scratch import Scratch
from rlx.system import exit_reason

_POLL_SECONDS = 0.05
_STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL
_STEADY_SECONDS = 60.0  # a server that lived so long has its restarts forgiven


@dataclass(frozen=True)
class CpuPlan:
    """Which cores the trainer and each server run on."""

    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]


def cpu_plan(cores: Sequence[int], num_servers: int, threads: int = 0) -> CpuPlan:
    """Divide `cores` between the trainer and its servers.

    Everyone gets cores of its own while they last; the trainer, which is one, takes the
    remainder. When they do not last, the trainer keeps the first core and the servers share the
    others; a single core is shared by all.

    Args:
      cores: ids this process may run on, e.g. sorted(os.sched_getaffinity(0)).
      num_servers: ≥ 0.
      threads: cores a server; 0: the same for every process.
    """
    cores = tuple(cores)
    if num_servers == 0 or len(cores) == 1:
        return CpuPlan(cores, (cores,) * num_servers)
    each = min(threads or max(1, len(cores) // (num_servers + 1)), len(cores) - 1)
    own = len(cores) - each * num_servers
    if own >= 1:
        starts = range(own, len(cores), each)
        return CpuPlan(cores[:own], tuple(cores[s : s + each] for s in starts))
    return CpuPlan(cores[:1], _shared(cores[1:], num_servers, each))


def servers_plan(cores: Sequence[int], num_servers: int, threads: int = 0) -> CpuPlan:
    """Divide `cores` between servers where no trainer runs; arguments as of `cpu_plan`."""
    cores = tuple(cores)
    each = min(threads or max(1, len(cores) // max(1, num_servers)), len(cores))
    return CpuPlan(cores, _shared(cores, num_servers, each))


def _shared(pool: tuple[int, ...], num_servers: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Return `each` cores of `pool` for every server, in turn; reused when they run out."""
    return tuple(
        tuple(sorted(pool[(i * each + k) % len(pool)] for k in range(each)))
        for i in range(num_servers)
    )


class LocalServers:
    """`num_servers` processes of `python -m rlx.serve`, as a context manager.

    `start` returns at once, so the trainer can compile meanwhile; `wait` gives the addresses, and
    `fleet` a client: they answer those who have `token`, and take files that lie in `directory`.

    Args:
      model: HF directory.
      workdir: logs go to `workdir`/logs/`name`-i.log.
      name: prefix of the servers' logs.
      plan: cores of each server; default: `cpu_plan` of the cores of this process, so make it
        before the trainer pins itself.
      options: flags of rlx.serve by name: slots, max_model_len, decode_steps, dtype, seed (server
        i gets seed + i), kv_on_update, engine.
      publish_dir: where the private directory of these servers is made.
      weight_roots: further directories that published files may be in.
      token: bearer token that they require; default: a fresh one.
      joining: where further servers of the fleet are found, which have the same token.
      platform: of JAX in servers without GPUs of their own.
      gpus: names of those that each server sees; empty: all have what this process has.
      ready_timeout: seconds until every server must have said it is ready.
      answer_timeout: seconds after which a server that does not answer is killed, to be restarted.
      max_restarts: of one server in a row.
      on_message: takes one line for the user.
      command: what starts a server.

    Attributes:
      directory: private to the servers and their client; removed after the last of them has ended.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        workdir: str | os.PathLike,
        name: str = "server",
        num_servers: int = 1,
        plan: CpuPlan | None = None,
        publish_dir: str = "/dev/shm",
        weight_roots: Sequence[str] = (),
        token: str | None = None,
        joining: Joining | None = None,
        platform: str = "cpu",
        gpus: Sequence[Sequence[str]] = (),
        ready_timeout: float = 180.0,
        answer_timeout: float = 60.0,
        max_restarts: int = 5,
        on_message: Callable[[str], None] | None = None,
        command: Sequence[str] = (sys.executable, "-m", "rlx.serve"),
        **options: str | int,
    ):
        plan = plan or cpu_plan(sorted(os.sched_getaffinity(0)), num_servers)
        seed = int(options.pop("seed", 0))
        logs = Path(workdir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(publish_dir)
        self.directory, self.token = self._scratch.directory, token or secrets.token_urlsafe(32)
        options = {"stage_dir": self.directory, **options}
        flags = [f"--{flag.replace('_', '-')}={value}" for flag, value in options.items()]
        flags += [f"--model={os.fspath(model)}", f"--parent-pid={os.getpid()}"]
        flags += [f"--weight-root={root}" for root in (self.directory, *weight_roots)]
        self._servers = [
            _Server(
                command=(*command, *flags, f"--seed={seed + i}"),
                log=logs / f"{name}-{i}.log",
                cpus=cpus,
                env=_environment(len(cpus), platform, self.token, *gpus[i : i + 1]),
                lock=self._scratch.lock,
            )
            for i, cpus in enumerate(plan.servers)
        ]
        self._ready_timeout, self._max_restarts = ready_timeout, max_restarts
        self._answer_timeout, self._joining = answer_timeout, joining
        self._silent = dict[str, float]()  # address → seconds, as the fleet has found
        self._say = on_message or (lambda text: None)
        self._ready: Future[tuple[str, ...]] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="local-servers", daemon=True)

    def start(self) -> "LocalServers":
        """Begin to start the servers, and return."""
        self._thread.start()
        return self

    def wait(self) -> tuple[str, ...]:
        """Return host:port of each server once all answer.

        Raises:
          UserError: one ended or took too long; has the last line of its log. All are stopped.
        """
        return self._ready.result()

    def fleet(self, **options: Any) -> Fleet:
        """Return the fleet of these servers, not connected yet; raise as `wait`.

        Args:
          options: of Fleet.
        """
        return Fleet(
            self.wait(),
            token=self.token,
            publish_dir=self.directory,
            restart=self._silent.__setitem__,
            joining=self._joining,
            **options,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that run now."""
        return tuple(server.pid for server in self._servers if server.pid)

    def stop(self) -> None:
        """End every server: SIGTERM, then SIGKILL for one that does not end in time."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join()
        self._scratch.close()

    def __enter__(self) -> "LocalServers":
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def _keep(self) -> None:
        """Start, watch, restart and end the processes; runs in the thread that owns them."""
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
                self._say(f"the local rollout servers have to stop: {error}")
        finally:
            _end(self._servers)

    def _wait_ready(self) -> tuple[str, ...]:
        deadline = time.monotonic() + self._ready_timeout
        while waiting := [server for server in self._servers if not server.read_port()]:
            for server in waiting:
                if (status := server.poll()) is not None:
                    said = server.last_words() or f"its log is {server.log}"
                    raise UserError(f"a rollout server ended at start {status}: {said}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"a rollout server was not ready within {self._ready_timeout:g} s; look at "
                    f"{waiting[0].log}"
                )
            if self._stopping.wait(_POLL_SECONDS):
                raise UserError("the rollout servers were stopped before they were ready")
        return tuple(f"127.0.0.1:{server.port}" for server in self._servers)

    def _end_if_hung(self, server: "_Server") -> None:
        """Kill `server` if it runs and has not answered for too long, or sends no token."""
        silent = self._silent.pop(f"127.0.0.1:{server.port}", 0.0)
        ready, mute = server.read_port(), math.isinf(silent)
        limit = self._answer_timeout if ready else self._ready_timeout
        lived = time.monotonic() - (server.ready_at or server.started)
        if server.pid and (mute or min(silent, lived) > limit):
            what = "sends no token" if mute else f"has not answered for {limit:g} s"
            self._say(f"rollout server {server.log.stem} (port {server.port}) {what}; killing it")
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
            what = f"rollout server {server.log.stem} (port {server.port}) ended {status}"
            if server.restarts > self._max_restarts:
                said = server.last_words() or f"its log is {server.log}"
                self._say(f"{what} after {self._max_restarts} restarts: {said}")
                return
            server.retry_at = now + 0.25 * 4 ** (server.restarts - 1)  # five outlast a minute
            said = server.last_words()
            self._say(f"{what}{f' ({said})' if said else ''}; starting it again")
        if now >= server.retry_at:
            server.spawn()


@dataclass(eq=False)
class _Server:
    """One server: its port, log and cores stay, its process may change."""

    command: Sequence[str]
    log: Path
    cpus: tuple[int, ...]
    env: dict[str, str]
    lock: int  # descriptor of a file that the process inherits
    port: int = 0
    ready_at: float = 0.0  # when this process was seen to be ready
    restarts: int = 0
    retry_at: float = 0.0  # 0: its end has not been seen yet
    started: float = 0.0
    process: subprocess.Popen | None = None
    oom_kills: exit_reason.OomKills = field(default_factory=exit_reason.OomKills)
    peak: int = 0  # bytes, when the process was last seen running
    ending: str = ""
    log_start: int = 0

    @property
    def pid(self) -> int:
        """Id of the process; 0 when there is none."""
        return self.process.pid if self.process and self.process.returncode is None else 0

    def spawn(self) -> None:
        """Start the process on its cores, in its own session so that Ctrl-C spares it."""
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus)  # of this thread; the child inherits it
        try:
            with open(self.log, "ab") as log:
                self.log_start = log.seek(0, os.SEEK_END)
                self.process = subprocess.Popen(
                    (*self.command, f"--port={self.port}"),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    pass_fds=(self.lock,),
                    start_new_session=True,
                )
        finally:
            os.sched_setaffinity(0, ours)
        self.started, self.retry_at, self.ready_at = time.monotonic(), 0.0, 0.0
        self.oom_kills, self.peak = exit_reason.OomKills(), 0

    def poll(self) -> str | None:
        """Return how the process ended, None while it runs; kill what it started once it ended."""
        process = self.process
        if process is None:
            return None
        if process.returncode is None:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                self.oom_kills.look()
                self.peak = exit_reason.peak_memory(process.pid) or self.peak
                return None
            self.signal(signal.SIGKILL)  # its group, while its id cannot be another's
            short = self.oom_kills.lately()
            self.ending = exit_reason.words(process.wait(), self.peak, killed_for_memory=short)
        return self.ending

    def read_port(self) -> int:
        """Return the port that the process announced; 0 before."""
        for line in () if self.ready_at else self._lines():
            if line.startswith('{"port"') and line.endswith("}"):
                self.port, self.ready_at = json.loads(line)["port"], time.monotonic()
        return self.port if self.ready_at else 0

    def last_words(self) -> str:
        """Return what the process wrote last, with a remedy where it mentions memory; or ""."""
        return exit_reason.last_words(self._lines())

    def signal(self, number: int) -> None:
        """Send the signal `number` to the process group."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _lines(self) -> list[str]:
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace").splitlines()


def _end(servers: Sequence[_Server]) -> None:
    for server in servers:
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGCONT)  # a stopped one would not hear it
    deadline = time.monotonic() + _STOP_SECONDS
    while running := [s for s in servers if s.pid and s.poll() is None]:
        if time.monotonic() > deadline:
            for server in running:
                server.signal(signal.SIGKILL)
        time.sleep(0.01)


def _environment(
    threads: int, platform: str, token: str, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Return the servers' environment: ours with rlx on the path, thread pools and a token."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    home = str(Path(next(iter(rlx.__path__))).parent)
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        **dict.fromkeys(pools, str(threads)),
        "JAX_PLATFORMS": "cuda" if gpus else platform,
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        wire.TOKEN_VARIABLE: token,
    }
