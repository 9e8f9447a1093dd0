"""Build the trainer that `config.trainer` names, on all of a run's processes.

Who computes is imported when the run asks for it: neither trainer's library otherwise.
"""

import atexit
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any, Protocol

from ml_collections import ConfigDict

import rlx
from rlx.base import UserError
from rlx.cli.command import INTERRUPTED, say
from rlx.cli.user_code import words
from rlx.doctor.machine import Devices
from rlx.run.flags import leaves
from rlx.run.inputs import INITIAL, Inputs
from rlx.run.room_options import as_json
from rlx.system import exit_reason
from rlx.system.process_settings import end_with_parent
from rlx.system.signals import interrupts
from rlx.train import conductor
from rlx.train.contract import Update
from rlx.train.hosts import Cluster, Hosts, join, report_end

PARENT = "RLX_PARENT"  # the process that has started this one to join it; of the environment
_LAST_SECONDS = 10.0  # that processes have to end by themselves
TRAINERS = {"jax": "rlx.run.jax_trainer", "torch": "rlx.run.torch_trainer"}


class TrainerLibrary(Protocol):
    """What a module of TRAINERS has.

    Attributes:
      set_up: called before anything is computed; UserError where the library is not installed.
      join, leave: of a process among several of the trainer, `hosts`.
      devices: that this library sees.
      check_devices: raises UserError where they do not fit `train.mesh`.
      random_weights: writes an HF directory of random weights of `inputs`' model.
      make: the trainer, of the config and the HF directory of the run's first weights.
    """

    set_up: Callable[[], None]
    join: Callable[[ConfigDict, Hosts], None]
    leave: Callable[[], None]
    devices: Callable[[], Devices]
    check_devices: Callable[[ConfigDict], None]
    random_weights: Callable[[ConfigDict, Path, Inputs], None]
    make: Callable[[ConfigDict, str], Update]


def library(config: ConfigDict) -> TrainerLibrary:
    """Return the module of the run's trainer."""
    module: Any = import_module(TRAINERS[config.trainer])
    return module


def make(config: ConfigDict, hosts: Hosts, model_dir: Path) -> Update:
    """Return the run's trainer, whose calls all processes make; process 0 alone asks for it.

    Args:
      model_dir: HF directory of the run's first weights, which all processes see.
    """
    return conductor.driver(hosts, partial(library(config).make, config), path=str(model_dir))


def follow(config: ConfigDict, hosts: Hosts) -> tuple[int, bool]:
    """Repeat what process 0 does with its trainer; return the steps done, and whether it is all."""
    say(f"process {hosts.index} of {hosts.count} follows process 0; stop it there")
    signals = current_thread() is main_thread()
    with interrupts(hosts.stop) if signals else nullcontext():
        told = conductor.worker_loop(hosts, partial(library(config).make, config))
    return told["step"], told["complete"]


@contextmanager
def together(config: ConfigDict, stop: Event) -> Iterator[Hosts]:
    """Be one of the run's processes while the block lasts; in most runs there is one.

    Args:
      stop: set on process 0 when another one is asked to end.

    Raises:
      UserError: some do not come, or have another config or code; before anything is compiled.
    """
    hosts = join(Cluster.of(os.environ, **config.cluster), _identity(config))
    hosts.on_stop = stop.set
    try:
        if hosts.count > 1:
            library(config).join(config, hosts)
        yield hosts
    except BaseException as error:
        hosts.close(str(error) if isinstance(error, UserError) else words(error))
        if hosts.count > 1:  # else its library waits at exit for those that are gone
            atexit.register(_leave, INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2)
        raise
    hosts.close()
    if hosts.count > 1:
        library(config).leave()


@contextmanager
def others_of_this_host(config: ConfigDict) -> Iterator[ConfigDict]:
    """Start the command's other processes where no more than their number is given; then end them.

    Only for trainer=torch, whose processes have a GPU each; one of JAX's has all of a host. They
    end with this one, whatever ends it, and this one reports why a run has failed.
    """
    # Not torchrun: it ends with 1 for any status, adds a traceback of 40 lines, and leaves its
    # processes behind when it is killed.
    c = config.cluster
    if parent := os.environ.pop(PARENT, ""):
        end_with_parent(int(parent))
    told = c.coordinator or c.process >= 0 or Cluster.found(os.environ)
    if c.processes < 2 or told or config.trainer != "torch":
        yield config
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = config.copy_and_resolve_references()
    config.cluster.coordinator, config.cluster.process = address, 0
    flags = [*sys.orig_argv, f"--config.cluster.coordinator={address}"]
    environment, done = {**os.environ, PARENT: str(os.getpid())}, Event()
    others, heard = [], []
    for n in range(1, c.processes):
        command = [*flags, f"--config.cluster.process={n}"]
        other = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        name = f"process {n} of {c.processes}"
        thread = Thread(target=_hear, args=(other, name, address, done), daemon=True)
        thread.start()
        others.append(other)
        heard.append(thread)
    try:
        yield config
    finally:
        done.set()
        for other, thread in zip(others, heard, strict=True):
            try:
                other.wait(_LAST_SECONDS)
            except subprocess.TimeoutExpired:
                other.kill()
            thread.join(1.0)  # what it has started may keep its stderr open


def _hear(other: subprocess.Popen[bytes], name: str, address: str, done: Event) -> None:
    """Copy what a process that was started here writes; where it ends too early, say so."""
    last = ""
    assert other.stderr
    with other.stderr:
        for line in other.stderr:
            text = line.decode(errors="replace")
            last = text.strip() or last
            if not text.startswith("error: "):  # which process 0 says
                sys.stderr.write(text)
                sys.stderr.flush()
    if (status := other.wait()) and not done.is_set():
        why = f"{name} ended {exit_reason.words(status, 0)}"
        report_end(address, ": ".join(filter(None, (why, last.removeprefix("error: ")))), done)


def _identity(config: ConfigDict) -> dict[str, Any]:
    """Return what all processes of a run must have alike: its config and the code."""
    code, root = hashlib.blake2b(digest_size=8), Path(rlx.__file__).parent.parent
    for path in sorted([*root.glob("rlx/**/*.py"), *root.glob("rlx_torch/*.py")]):
        code.update(path.read_bytes())
    found = {f"config.{key}": value for key, value in leaves(as_json(config))}
    del found["config.cluster.process"]
    return {**found, "rlx's code": code.hexdigest(), config.trainer: version(config.trainer)}


def _leave(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)


def first_weights(config: ConfigDict, workdir: Path, inputs: Inputs) -> Path:
    """Return the HF directory of the run's first weights; write it where they are random."""
    if not config.model.random_init:
        return inputs.model_dir
    library(config).random_weights(config, workdir / INITIAL, inputs)
    return workdir / INITIAL
