"""Run a config in other processes (local, Slurm or Ray), and retry it after a failure."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.command import INTERRUPTED, say
from rlx.config import default
from rlx.engines.engine import SLEEPS
from rlx.launch import allocation
from rlx.launch.processes import Process, processes
from rlx.launch.run_secrets import CERTIFICATE, KEY
from rlx.model.directory import resolve
from rlx.run.inputs import INITIAL
from rlx.run.room_options import RunOptions, served_dtype
from rlx.run.trainers import PARENT, end_with_spawner
from rlx.system import exit_reason
from rlx.system.jsonl import read_last
from rlx.system.signals import interrupts

DONE, FAILED = 0, 1  # exit statuses
RETRIES = 3  # where scheduler.retries is −1
SCHEDULERS = {"ray": "rlx.run.on_ray", "slurm": "rlx.run.slurm_run"}
ADDRESSES = "servers"  # file of the servers' addresses, host:port per line
_LOCAL_OPTIONS = (  # not of rlx.serve
    "publish_dir", "ready_timeout", "answer_timeout", "max_restarts", "seed",
)  # fmt: skip
_LOAD_SECONDS = 900.0  # until servers answer


class Ended(NamedTuple):
    """How an attempt at a run ended."""

    status: int  # exit status for the command
    failure: str = ""  # error message if a retry may help
    by_itself: bool = False  # the run ended itself; without a new step a retry would fail again


def retry(attempt: Callable[[], Ended], config: ConfigDict, workdir: Path) -> Ended:
    """Attempt a run until it ends or has used its retries; return how it ended."""
    retries = RETRIES if config.scheduler.retries < 0 else config.scheduler.retries
    for n in range(1, retries + 1):
        before = steps_in(workdir)
        outcome = attempt()
        if not outcome.failure or (outcome.by_itself and steps_in(workdir) <= before):
            return outcome
        say(f"{outcome.failure}; resuming from the last checkpoint (retry {n} of {retries})")
    return attempt()


def steps_in(workdir: Path) -> int:
    """Return the last recorded step in a run's directory."""
    return read_last(workdir / "metrics.jsonl").get("step", 0)


def launch(config: ConfigDict, workdir: Path, flags: Sequence[str], dry_run: bool) -> int:
    """Start a run in other processes and wait for its end; return rlx.main's exit status.

    `config` is allocated and checked, all hosts see `workdir`, `flags` are the user's. `dry_run`
    only writes and shows what starts. UserError if the run fails; no process is left.
    """
    end_with_spawner()  # a sweep
    if config.scheduler.type == "local":
        return _launch_here(config, workdir)
    module: Any = import_module(SCHEDULERS[config.scheduler.type])
    args = [flag for flag in flags if not re.match("--dry[-_]run(=|$)", flag)]
    return module.launch(config, workdir, args, dry_run)


def _launch_here(config: ConfigDict, workdir: Path) -> int:
    """Run a config in a child process, and retry it if it dies."""
    command = (*sys.orig_argv, f"--workdir={workdir}", "--config.scheduler.retries=0")

    def attempt() -> Ended:
        # In its own session, so that this process forwards Ctrl-C.
        environment, stop = {**os.environ, PARENT: str(os.getpid())}, Event()
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            with interrupts(stop.set, forward=process.send_signal):
                try:
                    status = process.wait()
                except KeyboardInterrupt:  # the second time
                    process.send_signal(signal.SIGINT)
                    status = process.wait()
        finally:
            process.kill()
            process.wait()
        words = f"the run ended {exit_reason.words(status, 0)} after step {steps_in(workdir)}"
        over = stop.is_set() or status in (DONE, INTERRUPTED)
        return Ended(status if status >= 0 else 128 - status, "" if over else words, status >= 0)

    return retry(attempt, config, workdir).status


def until_weights(config: ConfigDict, workdir: Path) -> str:
    """Return shell code that waits for random first weights, which trainer 0 writes; or ""."""
    first = shlex.quote(str(workdir / INITIAL / "config.json"))
    return f"until [ -e {first} ]; do sleep 1; done; " * config.model.random_init


def processes_of(
    config: ConfigDict,  # after `apply_allocation` and `check`
    workdir: Path,
    flags: Sequence[str],  # the user's flags of rlx.main
    hosts: Mapping[str, Sequence[str]],  # hosts, port: see `launch.processes`
    directory: Path,  # shared directory with the files of `make_secrets`
    port: int,
    python: str = sys.executable,
    weights: bool = True,  # whether to download the weights of a hub model
    model: Path | str = "",  # what servers load; "": found on this machine
) -> tuple[Process, ...]:
    """Return the processes of a run, the trainer's first; UserError if they do not fit the hosts.

    Servers and trainer 0 need $RLX_FLEET_TOKEN. The caller writes the servers' addresses into
    `directory`/ADDRESSES before trainer 0 starts.
    """
    if (sleep := config.fleet.sleep) != SLEEPS[0]:
        problem = f"fleet.sleep={sleep} with servers that a scheduler places on other devices"
        raise UserError(f"{problem}; set it to off")
    parsed = allocation.parse(config.allocation_mode) if config.allocation_mode else None
    servers = 0 if config.fleet.addresses else config.fleet.num_servers
    if config.model.random_init:
        model = workdir / INITIAL
    elif not model:
        path = resolve(config.model.path, weights=weights).resolve()
        # Without weights here a server downloads them: a dry run's script can be submitted.
        model = path if weights or list(path.glob("*.safetensors")) else config.model.path
    server = {k: v for k, v in RunOptions.of(config).servers.items() if k not in _LOCAL_OPTIONS}
    certificate, key = directory / CERTIFICATE, directory / KEY
    server |= {"model": model, "tls_cert": certificate, "tls_key": key}
    changes: dict[str, object] = {"scheduler.type": "local", "scheduler.retries": 0}
    changes |= {"allocation_mode": "", **(allocation.settings(parsed) if parsed else {})}
    if servers:
        # Servers start before a trainer could choose the dtype.
        dtype = served_dtype(config, "bfloat16" if any(hosts.values()) else "float32")
        server["dtype"] = changes["model.publish_dtype"] = dtype
        changes |= {
            "fleet.addresses": (f"@{directory / ADDRESSES}",), "fleet.tls.ca": certificate,
            "fleet.connect_seconds": max(config.fleet.connect_seconds, _LOAD_SECONDS),
        }  # fmt: skip
        if config.observe.metrics_port:  # beyond loopback, whoever calls a server has a certificate
            server["tls_client_ca"] = changes["fleet.tls.cert"] = certificate
            changes["fleet.tls.key"] = key
        if config.fleet.publish == "path":
            if config.fleet.publish_dir == default().fleet.publish_dir:
                changes["fleet.publish"] = "stream"  # other hosts cannot read this one's memory
            else:
                server["weight_root"] = Path(config.fleet.publish_dir).absolute()
    settings = (f"--config.{name}={value}" for name, value in changes.items())
    options = (f"--{name.replace('_', '-')}={value}" for name, value in server.items())
    plan = processes(
        hosts, servers=servers, trainers=max(1, config.cluster.processes), library=config.trainer,
        allocation=parsed, tensor_parallel=config.fleet.tensor_parallel, port=port,
        seed=config.seed, metrics_port=config.observe.metrics_port,
        trainer=(python, "-m", "rlx.main", *flags, f"--workdir={workdir.absolute()}", *settings),
        server=(python, "-m", "rlx.serve", *options),
    )  # fmt: skip
    host, usual, listen = plan[0].host, default(), dict[str, object]()
    if config.online.host == usual.online.host and not config.online.tls_cert:
        listen = {"online.host": host, "online.tls_cert": certificate, "online.tls_key": key}
    if "tls_client_ca" in server and config.observe.metrics_host == usual.observe.metrics_host:
        listen["observe.metrics_host"] = host
    own_flags = [f"--config.{key}={value}" for key, value in listen.items()]
    return tuple(replace(p, argv=(*p.argv, *own_flags)) if p.role == "trainer" else p for p in plan)
