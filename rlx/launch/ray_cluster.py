"""Start and follow a run's processes on the nodes of a Ray cluster. Only this file imports Ray.

    plan (`processes.py`) ─▶ placement groups, one bundle per process ─▶ an actor in each: `Keeper`
    Keeper ─▶ process_supervisor.py ─▶ python -m rlx.main …, python -m rlx.serve …

An actor runs a command that a user could type. The command and its children end with the actor, and
actors end with the process that made them.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx.base import UserError, packages_of
from rlx.launch.processes import Process
from rlx.system import exit_reason, process_supervisor
from rlx.system.host_port import refusal
from rlx.system.process_settings import python_path
from rlx.workers.worker_process import SupervisedProcess

ADDRESS = "RAY_ADDRESS"
_OURS = ("JAX_", "XLA_", "RLX_", "HF_", "NCCL_", "WANDB_", "MLFLOW_", "TOKENIZERS_", "PYTHON",
         "SSL_CERT_")  # fmt: skip
_LAST_LINES = 200  # of a process, to report why it ended
_REACH_SECONDS = 10.0  # for a cluster's head to accept a connection; Ray tries for minutes
_END_SECONDS = 15.0  # for a process and its children to end
_NEXT_PORT = 1009  # step between ports to try: more than the servers of a host
_STORE_BYTES = 100_000_000  # Ray's object store on this machine, which no array uses


class Keeper:
    """Runs one command under a supervisor, on the node that this actor is on."""

    def begin(self, process: Process, env: Mapping[str, str], cwd: str, log: str) -> Process:
        """Start a process on this actor's GPUs, output to `log`; return it with host and port."""
        import ray

        host, port, argv = ray.util.get_node_ip_address(), process.port, process.argv[1:]
        if process.role == "server":
            port = _free_port(host, port)
            argv = tuple(a for a in argv if not a.startswith(("--host=", "--port=")))
            argv += (f"--host={host}", f"--port={port}")
            if any(a.startswith("--metrics-port=") for a in argv):
                argv += (f"--metrics-host={host}",)  # the last one counts
        base = {k: v for k, v in os.environ.items() if not k.startswith("OMP_NUM")}
        gpus = {k: v for k, v in base.items() if k == "CUDA_VISIBLE_DEVICES" and process.gpus}
        environment = {**base, **env, **process.env, **gpus, "PYTHONUNBUFFERED": "1"}
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks Ctrl-C, for children too
        with open(log, "ab") as file:
            self._log, self._log_end = log, file.tell()  # up to where `look` has read it
            self._process = SupervisedProcess(
                (sys.executable, *argv), cwd=cwd, stdout=file, stderr=file, environment=environment
            )
        self._pid = 0  # of the command: looked up while it is its supervisor's only child
        while not self._pid and self._process.running:
            self._pid = next(iter(process_supervisor.descendants(self._process.pid)), 0)
            time.sleep(0.01)
        return replace(process, host=host, port=port)

    def look(self) -> tuple[int | None, list[str]]:
        """Return the command's exit code, None while it runs, and its new lines."""
        code = None if self._process.running else self._process.end()
        with open(self._log, "rb") as file:
            file.seek(self._log_end)
            new = file.read()
        data = new[: new.rfind(b"\n") + 1] if code is None else new
        self._log_end += len(data)
        return code, data.decode(errors="replace").splitlines()

    def signal(self, number: int) -> None:
        if self._process.running:
            os.kill(self._pid, number)

    def end(self) -> None:
        """Kill the command and all that it started."""
        self._process.end()


@dataclass(eq=False)
class Running:
    """A process and its actor."""

    process: Process
    keeper: Any  # the actor
    group: Any
    reply: Any = None  # Ray's reference of the actor's next answer
    started: bool = False  # whether its command has been started
    ready: bool = False  # whether it, a server, has taken calls
    code: int | None = None  # exit code; None while it runs
    lost: str = ""  # why its end is unknown
    lines: list[str] = field(default_factory=list)  # written between the last two looks
    last_lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return a name such as `server 0`."""
        return f"{self.process.role} {self.process.index}"

    @property
    def over(self) -> bool:
        return self.code is not None or bool(self.lost)

    @property
    def ending(self) -> str:
        """Return how it ended, with its last message."""
        if self.lost:
            return f"is lost: {self.lost}"
        message = exit_reason.last_words(self.last_lines)
        return f"ended {exit_reason.words(self.code or 0, 0)}{f' ({message})' if message else ''}"


class RayCluster:
    """A Ray cluster that this process has joined."""

    def __init__(self, ray: Any):
        self._ray = ray
        self.address = ray.get_runtime_context().gcs_address

    def hosts(self) -> dict[str, tuple[str, ...]]:
        """Return address → names of GPUs, for each live node with cores for a run."""
        return {
            node["NodeManagerAddress"]: tuple(map(str, range(int(has.get("GPU", 0)))))
            for node in sorted(self._ray.nodes(), key=lambda node: node["NodeManagerAddress"])
            if node["Alive"] and (has := node["Resources"]).get("CPU", 0) >= 1
        }

    def check(self, plan: Sequence[Process]) -> None:
        """Raise UserError if a host has fewer cores than processes."""
        cores = {n["NodeManagerAddress"]: n["Resources"].get("CPU", 0) for n in self._ray.nodes()}
        for host in dict.fromkeys(process.host for process in plan):
            demand, supply = sum(process.host == host for process in plan), cores.get(host, 0)
            if demand > supply:
                problem = f"{demand} processes on {host} need a core each, and Ray has {supply:g}"
                raise UserError(f"{problem} there; use fewer servers, or more nodes")

    def place(self, plan: Sequence[Process], seconds: float) -> list[Running]:
        """Reserve cores and GPUs within `seconds`, or raise UserError; return the actors."""
        # One placement group reserves all of the trainer's processes at once.
        trainers = [process for process in plan if process.role == "trainer"]
        gangs = [trainers, *([process] for process in plan if process.role == "server")]
        bundles = [[_bundle(process, process.host) for process in gang] for gang in gangs]
        groups = [self._ray.util.placement_group(each) for each in bundles]
        ready, end = [group.ready() for group in groups], time.monotonic() + seconds
        while self._ray.wait(ready, num_returns=len(ready), timeout=1.0)[1]:
            missing = {process.host for process in plan} - set(self.hosts())
            if not missing and time.monotonic() < end:
                continue
            for group in groups:
                self._ray.util.remove_placement_group(group)
            if missing:
                raise UserError(f"{', '.join(sorted(missing))} has left the Ray cluster")
            count, has = len(plan), self._ray.cluster_resources()
            raise UserError(
                f"{count} processes need {count} cores and {sum(len(p.gpus) for p in plan)} GPUs; "
                f"the Ray cluster has {has.get('CPU', 0):g} and {has.get('GPU', 0):g}, too few of "
                f"them free for {seconds:g} s; end other jobs, or raise scheduler.wait_seconds"
            )
        pairs = zip(gangs, groups, strict=True)
        return [self._actor(p, group, i) for gang, group in pairs for i, p in enumerate(gang)]

    def again(self, process: Process, hosts: Sequence[str]) -> Running:
        """Return a new actor for a process, on the first of `hosts` that has room."""
        live = [node for node in self._ray.nodes() if node["Alive"]]
        ids = [node["NodeID"] for node in live if node["NodeManagerAddress"] in hosts]
        where = [{"ray.io/node-id": f"in({','.join(ids)})"}]
        group = self._ray.util.placement_group([_bundle(process)], bundle_label_selector=where)
        return self._actor(process, group, 0)

    def start(self, running: Running, env: Mapping[str, str], log: Path) -> None:
        """Let an actor start its process; `look` notes that it has."""
        env = {k: v for k, v in os.environ.items() if k.startswith(_OURS)} | dict(env)
        running.reply = running.keeper.begin.remote(
            running.process, {**env, ADDRESS: self.address}, os.getcwd(), str(log)
        )

    def look(self, running: Sequence[Running], seconds: float) -> None:
        """Update processes after `seconds`; raise UserError if one cannot be started."""
        time.sleep(seconds)
        by_ref = {one.reply: one for one in running if one.reply and not one.over}
        for one in running:
            one.lines = []
        for ref in self._ready([*by_ref], seconds):
            one = by_ref[ref]
            try:
                answer = self._ray.get(ref)
            except self._ray.exceptions.RayActorError:
                one.lost = "its actor or node has died"
                continue
            except OSError as error:
                problem = f"{one.name} cannot be started on {one.process.host}: {error.__cause__}"
                raise UserError(f"{problem}; use directories that all hosts share") from None
            if isinstance(answer, Process):
                one.process, one.started = answer, True
            else:
                one.code, one.lines = answer
                one.ready |= any(line.startswith('{"port"') for line in one.lines)
                one.last_lines = [*one.last_lines, *one.lines][-_LAST_LINES:]
            one.reply = one.keeper.look.remote()

    def signal(self, running: Running, number: int) -> None:
        """Send a process a signal."""
        running.keeper.signal.remote(number)

    def end(self, running: Sequence[Running]) -> None:
        """End processes with their children, and release their resources."""
        answered = self._ready([one.reply for one in running if one.reply], 0)
        active = [one for one in running if one.started or one.reply in answered]
        # The others may not have a node yet.
        self._ready([one.keeper.end.remote() for one in active], _END_SECONDS)
        for one in running:
            self._ray.kill(one.keeper)
            self._ray.util.remove_placement_group(one.group)

    def _ready(self, refs: list, seconds: float) -> Sequence[Any]:
        """Return Ray's references that have a value within `seconds`."""
        return self._ray.wait(refs, num_returns=len(refs), timeout=seconds)[0] if refs else ()

    def _actor(self, process: Process, group: Any, bundle: int) -> Running:
        """Make the actor of a process, with the resources of one bundle of a placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {"num_cpus": 1, "num_gpus": len(process.gpus), "max_restarts": 0}
        where = PlacementGroupSchedulingStrategy(group, bundle)
        actor = self._ray.remote(Keeper).options(scheduling_strategy=where, **options)
        return Running(process, actor.remote(), group)


def _bundle(process: Process, host: str = "") -> dict[str, float]:
    """Return the resources of a process; a tiny share of `node:…` pins it to its host."""
    amounts = {"CPU": 1.0, "GPU": float(len(process.gpus)), f"node:{host}": 0.001 if host else 0.0}
    return {kind: amount for kind, amount in amounts.items() if amount}


def _free_port(host: str, port: int) -> int:
    """Return the first free port of `host` in steps from `port`."""
    for candidate in range(port, 1 << 16, _NEXT_PORT):
        with contextlib.suppress(OSError):
            socket.create_server((host, candidate)).close()
            return candidate
    return port


@contextlib.contextmanager
def joined() -> Iterator[RayCluster]:
    """Join a Ray cluster for a block, at whose end actors end."""
    ray = join()
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def join() -> Any:
    """Return Ray, joined once at $RAY_ADDRESS or started on this machine; UserError on failure."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get(ADDRESS, "")
    if not address:  # before the import, at which Ray would write a token to the home directory
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with packages_of("ray", "scheduler.type=ray needs Ray"):
        import ray
    if ray.is_initialized():
        return ray
    if address not in ("", "auto", "local") and (error := refusal(address, _REACH_SECONDS)):
        problem = f"{ADDRESS}={address}: no head of a Ray cluster listens there ({error})"
        remedy = "give its host:port on a node of the cluster, or unset it to start one here"
        raise UserError(f"{problem}; {remedy}")
    options: dict[str, Any] = {"address": address}
    if not address:  # loopback only; for 127.0.0.1 Ray would use the machine's public address
        options = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.2",
                   "object_store_memory": _STORE_BYTES}  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            log_to_driver=False, logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}}, **options,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot join Ray at {address or 'this machine'}: {lines[0]}") from error
    if threading.current_thread() is threading.main_thread():  # Ray has replaced the handler
        signal.signal(signal.SIGTERM, handler)
    return ray
