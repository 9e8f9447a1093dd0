"""Build the trainer that `config.trainer` names, on all of a run's processes.

Only the library of that trainer (JAX or PyTorch) is imported.
"""

import atexit
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol, cast

from ml_collections import ConfigDict

import rlx
from rlx.base import UserError, leaves
from rlx.cli.command import INTERRUPTED, say
from rlx.cli.user_code import words
from rlx.doctor.machine import Devices
from rlx.doctor.memory import RunSizes
from rlx.run.inputs import Inputs
from rlx.run.room_options import RunOptions, as_json
from rlx.system import exit_reason
from rlx.system.process_settings import end_with_parent
from rlx.system.signals import interrupts
from rlx.train import conductor
from rlx.train.contract import Update
from rlx.train.hosts import Cluster, Hosts, join, report_end
from rlx.train.train_options import TrainOptions

PARENT = "RLX_PARENT"  # environment variable: pid of the process that spawned this one
_LAST_SECONDS = 10.0  # until processes that do not end are killed
TRAINERS = {"jax": "rlx.run.jax_trainer", "torch": "rlx.run.torch_trainer"}


class TrainerLibrary(Protocol):
    """The functions of a module in TRAINERS, described in rlx/run/jax_trainer.py."""

    set_up: Callable[[], None]
    join: Callable[[Hosts], None]
    leave: Callable[[], None]
    devices: Callable[[], Devices]
    planned: Callable[[RunSizes], float]
    product: Callable[[tuple[int, int, int], str], Callable[[], Any]]
    check_devices: Callable[[Inputs], None]
    random_weights: Callable[[Inputs, Path], None]
    make: Callable[..., Update]


def library(config: ConfigDict) -> TrainerLibrary:
    """Return the module of the run's trainer."""
    return cast(TrainerLibrary, import_module(TRAINERS[config.trainer]))


def follow(config: ConfigDict, hosts: Hosts) -> tuple[int, bool]:
    """Repeat the trainer's calls on process 0; return its steps and whether the run is complete."""
    say(f"process {hosts.index} of {hosts.count} follows process 0; stop it there")
    with interrupts(hosts.stop):
        options, context = TrainOptions.of(config), RunOptions.of(config).context
        end = conductor.worker_loop(hosts, partial(library(config).make, options, context))
    return end["step"], end["complete"]


@contextmanager
def join_processes(config: ConfigDict, stop: Event) -> Iterator[Hosts]:
    """Join the run's other processes during the block; UserError if they are missing or differ."""
    library(config).set_up()
    code, root = hashlib.blake2b(digest_size=8), Path(rlx.__file__).parent.parent
    for path in sorted([*root.glob("rlx/**/*.py"), *root.glob("rlx_torch/*.py")]):
        code.update(path.read_bytes())
    equal = {f"config.{key}": value for key, value in leaves(as_json(config))}
    del equal["config.cluster.process"]
    equal |= {"rlx's code": code.hexdigest(), config.trainer: version(config.trainer)}
    for key in ("loss", "advantage"):
        with suppress(OSError):  # not FILE.py:name
            path = Path(str(config.algorithm[key]).rpartition(":")[0])
            digest = hashlib.blake2b(path.read_bytes(), digest_size=8)
            equal[f"the file of algorithm.{key}"] = digest.hexdigest()
    hosts = join(Cluster.of(os.environ, **config.cluster), equal)
    hosts.on_stop = stop.set  # on process 0, when another process receives a signal
    try:
        if hosts.count > 1:
            library(config).join(hosts)
        yield hosts
    except BaseException as error:
        hosts.close(str(error) if isinstance(error, UserError) else words(error))
        if hosts.count > 1:  # the library would wait at exit for ended processes
            atexit.register(os._exit, INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2)
            atexit.register(sys.stdout.flush)  # called before it
        raise
    hosts.close()
    if hosts.count > 1:
        library(config).leave()


def end_with_spawner() -> None:
    """End this process with the one on this host that spawned it, if one did."""
    if parent := os.environ.pop(PARENT, ""):
        end_with_parent(int(parent))


@contextmanager
def spawn_local_ranks(config: ConfigDict) -> Iterator[ConfigDict]:
    """Start the other local processes of trainer=torch unless the cluster is described already.

    They end with the block and with this process, which reports their failures.
    """
    # Not torchrun: it hides exit statuses, adds a traceback of 40 lines, and leaves its processes
    # behind when it is killed.
    c = config.cluster
    end_with_spawner()
    described = c.coordinator or c.process >= 0 or Cluster.is_one_of_several(os.environ)
    if c.processes < 2 or described or config.trainer != "torch":
        yield config
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = config.copy_and_resolve_references()
    config.cluster.coordinator, config.cluster.process = address, 0
    flags = [*sys.orig_argv, f"--config.cluster.coordinator={address}"]
    environment, done = {**os.environ, PARENT: str(os.getpid())}, Event()
    others: dict[subprocess.Popen[bytes], Thread] = {}
    for n in range(1, c.processes):
        command = [*flags, f"--config.cluster.process={n}"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        args = (process, f"process {n} of {c.processes}", address, done)
        others[process] = Thread(target=_forward_stderr, args=args, daemon=True)
        others[process].start()
    try:
        yield config
    finally:
        done.set()
        for process, thread in others.items():
            try:
                process.wait(_LAST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            thread.join(1.0)  # a grandchild may keep stderr open


def _forward_stderr(process: subprocess.Popen[bytes], name: str, address: str, done: Event) -> None:
    """Copy a spawned process's stderr; report it if it ends before the run."""
    last = ""
    assert process.stderr
    with process.stderr:
        for line in (raw.decode(errors="replace") for raw in process.stderr):
            last = line.strip() or last
            if not line.startswith("error: "):  # process 0 reports it
                print(line, end="", file=sys.stderr, flush=True)
    if (status := process.wait()) and not done.is_set():
        why = f"{name} ended {exit_reason.words(status, 0)}"
        report_end(address, ": ".join(filter(None, (why, last.removeprefix("error: ")))), done)
