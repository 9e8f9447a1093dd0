"""Start a run's processes on the nodes of a Ray cluster, and follow them. Ray is imported here.

    plan (`processes.py`) ─▶ a placement group, one bundle a process ─▶ an actor in each: a `Keeper`
    Keeper ─▶ process_supervisor.py ─▶ python -m rlx.main …, python -m rlx.serve …

An actor does nothing but start the command that a user could type, look at it, and end it: all that
the command started ends with its actor, and actors end with the process that asked for them.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rlx
from rlx.base import UserError
from rlx.fleet.addresses import split_address
from rlx.launch.processes import Process
from rlx.system import exit_reason
from rlx.workers.kept_command import KeptCommand

ADDRESS = "RAY_ADDRESS"
_OURS = ("JAX_", "XLA_", "RLX_", "HF_", "NCCL_", "WANDB_", "TOKENIZERS_", "PYTHON", "SSL_CERT_")
_SAID = 200  # lines of a process that are kept, for why it ended
_REACH_SECONDS = 10.0  # for a cluster's head to take a connection; Ray itself tries for minutes
_END_SECONDS = 15.0  # for all that a process started to end
_NEXT_PORT = 1009  # more than a host has servers: each looks for a free one of its own
_STORE_BYTES = 100_000_000  # of a node that is started here: no array of a run goes through it


class Keeper(KeptCommand):
    """Runs one command on the node that this actor is on."""

    def begin(self, process: Process, env: Mapping[str, str], cwd: str, log: str) -> Process:
        """Start the process's command, whose output is appended to `log`; return the process.

        It sees the GPUs that Ray has given this actor, and is run by the Python of this actor. A
        server listens on this node's address, and on a free port, whichever its plan had.
        """
        import ray

        host, port, argv = ray.util.get_node_ip_address(), process.port, process.argv[1:]
        if process.role == "server":
            port = _free_port(host, port)
            argv = tuple(a for a in argv if not a.startswith(("--host=", "--port=")))
            argv += (f"--host={host}", f"--port={port}")
        own = {k: v for k, v in os.environ.items() if not k.startswith("OMP_NUM")}
        gpus = {k: v for k, v in own.items() if k == "CUDA_VISIBLE_DEVICES" and process.gpus}
        self.start((sys.executable, *argv), {**own, **process.env, **env, **gpus}, cwd, log)
        return replace(process, host=host, port=port)


@dataclass(eq=False)
class Running:
    """A process and its actor.

    Attributes:
      begun: its command has been started.
      code: how it ended; None while it runs. lost: why nobody knows how; "" where somebody does.
      lines: new since the look before the last. said: the last of all of them.
    """

    process: Process
    keeper: Any
    group: Any
    asked: Any = None
    begun: bool = False
    code: int | None = None
    lost: str = ""

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self.said: list[str] = []

    @property
    def name(self) -> str:
        """Return e.g. `server 0`."""
        return f"{self.process.role} {self.process.index}"

    @property
    def over(self) -> bool:
        """Return whether it has ended, as far as anybody knows."""
        return self.code is not None or bool(self.lost)

    @property
    def ending(self) -> str:
        """Return how it ended, with what it wrote last."""
        if self.lost:
            return f"is lost: {self.lost}"
        said = exit_reason.last_words(self.said)
        return f"ended {exit_reason.words(self.code or 0, 0)}{f' ({said})' if said else ''}"


class RayCluster:
    """A Ray cluster that this process has joined; made by `joined`."""

    def __init__(self, ray: Any):
        self._ray = ray
        self.address = ray.get_runtime_context().gcs_address

    def hosts(self) -> dict[str, tuple[str, ...]]:
        """Return address → names of its GPUs, of each live node that has cores for a run."""
        return {
            node["NodeManagerAddress"]: tuple(map(str, range(int(has.get("GPU", 0)))))
            for node in sorted(self._ray.nodes(), key=lambda node: node["NodeManagerAddress"])
            if node["Alive"] and (has := node["Resources"]).get("CPU", 0) >= 1
        }

    def check(self, plan: Sequence[Process]) -> None:
        """Raise UserError where a host has fewer cores than processes, with the arithmetic."""
        cores = {n["NodeManagerAddress"]: n["Resources"].get("CPU", 0) for n in self._ray.nodes()}
        for host in dict.fromkeys(process.host for process in plan):
            asked, there = sum(process.host == host for process in plan), cores.get(host, 0)
            if asked > there:
                raise UserError(
                    f"{asked} processes would be on {host}, a core each, and Ray has {there:g} "
                    "there; use fewer servers, or more nodes"
                )

    def place(self, plan: Sequence[Process], seconds: float) -> list[Running]:
        """Reserve a core and its GPUs for each process on its host; return their actors.

        All of the trainer's are reserved at once.

        Raises:
          UserError: they are not free within `seconds`, or a host has left.
        """
        trainers = [process for process in plan if process.role == "trainer"]
        gangs = [trainers, *([process] for process in plan if process.role == "server")]
        bundles = [[_bundle(process, process.host) for process in gang] for gang in gangs]
        groups = [self._ray.util.placement_group(each) for each in bundles]
        ready, end = [group.ready() for group in groups], time.monotonic() + seconds
        while self._ray.wait(ready, num_returns=len(ready), timeout=1.0)[1]:
            gone = {process.host for process in plan} - set(self.hosts())
            if not gone and time.monotonic() < end:
                continue
            for group in groups:
                self._ray.util.remove_placement_group(group)
            if gone:
                raise UserError(f"{', '.join(sorted(gone))} has left the Ray cluster")
            asked, has = len(plan), self._ray.cluster_resources()
            raise UserError(
                f"{asked} processes want {asked} cores and {sum(len(p.gpus) for p in plan)} GPUs; "
                f"the Ray cluster has {has.get('CPU', 0):g} and {has.get('GPU', 0):g}, and too few "
                f"were free for {seconds:g} s; end what holds them, or raise scheduler.wait_seconds"
            )
        pairs = zip(gangs, groups, strict=True)
        return [self._keep(p, group, i) for gang, group in pairs for i, p in enumerate(gang)]

    def again(self, process: Process, hosts: Sequence[str]) -> Running:
        """Return a new actor for a process, on whichever of `hosts` has, or will have, room."""
        live = [node for node in self._ray.nodes() if node["Alive"]]
        ids = [node["NodeID"] for node in live if node["NodeManagerAddress"] in hosts]
        where = [{"ray.io/node-id": f"in({','.join(ids)})"}]
        group = self._ray.util.placement_group([_bundle(process)], bundle_label_selector=where)
        return self._keep(process, group, 0)

    def start(self, running: Running, env: Mapping[str, str], log: Path) -> None:
        """Have an actor start its process; `look` says when it has."""
        env = {k: v for k, v in os.environ.items() if k.startswith(_OURS)} | dict(env)
        running.asked = running.keeper.begin.remote(
            running.process, {**env, ADDRESS: self.address}, os.getcwd(), str(log)
        )

    def look(self, running: Sequence[Running], seconds: float) -> None:
        """Update what is known of processes that were started, after `seconds`.

        Raises:
          UserError: a process cannot be started.
        """
        time.sleep(seconds)
        asked = {one.asked: one for one in running if one.asked and not one.over}
        ready = (
            self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else ()
        )
        for one in running:
            one.lines = []
        for ref in ready:
            one = asked[ref]
            try:
                answer = self._ray.get(ref)
            except self._ray.exceptions.RayActorError:
                one.lost = "its actor has died, or its node"
                continue
            except OSError as error:
                raise UserError(
                    f"{one.name} cannot be started on {one.process.host}: {error.__cause__}; have "
                    "the same directories on all hosts"
                ) from None
            if isinstance(answer, Process):
                one.process, one.begun = answer, True
            else:
                one.code, one.lines = answer
                one.said = [*one.said, *one.lines][-_SAID:]
            one.asked = one.keeper.look.remote()

    def interrupt(self, running: Running) -> None:
        """Send a process what Ctrl-C sends."""
        running.keeper.signal.remote(signal.SIGINT)

    def end(self, running: Sequence[Running]) -> None:
        """End processes with all that they started, and give back what was reserved."""
        asked = [one.asked for one in running if one.asked]
        answered = self._ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else ()
        begun = [one for one in running if one.begun or one.asked in answered]
        ends = [one.keeper.end.remote() for one in begun]  # the others may have no node
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        for one in running:
            self._ray.kill(one.keeper)
            self._ray.util.remove_placement_group(one.group)

    def _keep(self, process: Process, group: Any, bundle: int) -> Running:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {"num_cpus": 1, "num_gpus": len(process.gpus), "max_restarts": 0}
        where = PlacementGroupSchedulingStrategy(group, bundle)
        actor = self._ray.remote(Keeper).options(scheduling_strategy=where, **options)
        return Running(process, actor.remote(), group)


def _bundle(process: Process, host: str = "") -> dict[str, float]:
    """Return what a process has of its node's resources; `node:…` pins it, and costs nothing."""
    asked = {"CPU": 1.0, "GPU": float(len(process.gpus)), f"node:{host}": 0.001 if host else 0.0}
    return {kind: amount for kind, amount in asked.items() if amount}


def _free_port(host: str, port: int) -> int:
    """Return `port`, or the first one of those above it in strides, that nobody has on `host`."""
    for each in range(port, 1 << 16, _NEXT_PORT):
        with contextlib.suppress(OSError):
            socket.create_server((host, each)).close()
            return each
    return port


@contextlib.contextmanager
def joined() -> Iterator[RayCluster]:
    """Join as `join` does, while the block lasts; actors end with it."""
    ray = join()
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def join() -> Any:
    """Return Ray, joined at $RAY_ADDRESS or started on this machine, if that is not done already.

    Raises:
      UserError: Ray is not installed, or nobody answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get(ADDRESS, "")
    if not address:  # a token of its own; Ray, which looks when imported, would keep one at home
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError:
        raise UserError(
            "scheduler.type=ray needs Ray, which is not installed; pip install -e '.[ray]'"
        ) from None
    if ray.is_initialized():
        return ray
    _require(address)
    home = str(Path(next(iter(rlx.__path__))).parent)
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    options: dict[str, Any] = {"address": address}
    if not address:  # on loopback; Ray takes 127.0.0.1 for the address that others see
        options = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.2",
                   "object_store_memory": _STORE_BYTES}  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            log_to_driver=False, logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": paths}}, **options,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot join Ray at {address or 'this machine'}: {said[0]}") from error
    if threading.current_thread() is threading.main_thread():  # Ray has taken it
        signal.signal(signal.SIGTERM, handler)
    return ray


def _require(address: str) -> None:
    """Raise UserError where no cluster's head listens at the address; "" and `auto` are none."""
    if address in ("", "auto", "local"):
        return
    host, port = split_address(address)
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{ADDRESS}={address}: no head of a Ray cluster listens there ({error}); give its "
            "host:port on a node of the cluster, or unset it to start one here"
        ) from None
