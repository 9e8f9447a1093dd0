"""Build the trainer that `config.trainer` names, on all of a run's processes.

The one file here that knows JAX.
"""

import atexit
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import jax
from ml_collections import ConfigDict

import rlx
from rlx.base import UserError, install
from rlx.cli.command import say
from rlx.cli.flags import leaves
from rlx.cli.signals import interrupts
from rlx.cli.user_code import words
from rlx.launch import xla_flags
from rlx.model import compile_cache, hf, mesh
from rlx.model import params as parameters
from rlx.run.inputs import INITIAL, Inputs, as_json
from rlx.train import conductor
from rlx.train.contract import Update
from rlx.train.hosts import Cluster, Hosts, join
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


def make(config: ConfigDict, hosts: Hosts, model_dir: Path) -> Update:
    """Return the run's trainer, whose calls all processes make; process 0 alone asks for it.

    Args:
      model_dir: HF directory of the run's first weights, which all processes see.
    """
    return conductor.conduct(hosts, partial(TRAINERS[config.trainer], config), path=str(model_dir))


def follow(config: ConfigDict, hosts: Hosts) -> tuple[int, bool]:
    """Repeat what process 0 does with its trainer; return the steps done, and whether it is all."""
    say(f"process {hosts.index} of {hosts.count} follows process 0; stop it there")
    signals = current_thread() is main_thread()
    with interrupts(hosts.stop) if signals else nullcontext():
        told = conductor.follow(hosts, partial(TRAINERS[config.trainer], config))
    return told["step"], told["complete"]


@contextmanager
def together(config: ConfigDict, stop: Event) -> Iterator[Hosts]:
    """Be one of the run's processes while the block lasts; in most runs there is one.

    Args:
      stop: set on process 0 when another one is asked to end.

    Raises:
      UserError: some do not come, or have another config or code; before anything is compiled.
    """
    cluster = Cluster.of(os.environ, **config.cluster)
    if cluster.count > 1 and config.trainer != "jax":
        raise UserError(
            f"trainer={config.trainer} runs in one process and this is {cluster}; set "
            "cluster.processes=1, or trainer=jax"
        )
    hosts = join(cluster, _identity(config))
    hosts.on_stop = stop.set
    try:
        if hosts.count > 1:
            _join_jax(config, hosts)
        yield hosts
    except BaseException as error:
        hosts.close(str(error) if isinstance(error, UserError) else words(error))
        if hosts.count > 1:  # else JAX waits at exit for those that are gone, and aborts
            atexit.register(_leave, 130 if isinstance(error, KeyboardInterrupt) else 2)
        raise
    hosts.close()
    if hosts.count > 1:
        jax.distributed.shutdown()


def _identity(config: ConfigDict) -> dict[str, Any]:
    """Return what all processes of a run must have alike: its config and the code."""
    code, package = hashlib.blake2b(digest_size=8), Path(rlx.__file__).parent
    for path in sorted(package.rglob("*.py")):
        code.update(path.read_bytes())
    found = {f"config.{key}": value for key, value in leaves(as_json(config))}
    del found["config.cluster.process"]
    return {**found, "rlx's code": code.hexdigest(), "jax": jax.__version__}


def _join_jax(config: ConfigDict, hosts: Hosts) -> None:
    """Let JAX see the devices of all processes; its own watch over them would abort ours."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        hosts.service,
        hosts.count,
        hosts.index,
        cluster_detection_method="deactivate",
        initialization_timeout=int(config.cluster.join_seconds) + 1,
        heartbeat_timeout_seconds=1_000_000,
        shutdown_timeout_seconds=int(config.cluster.timeout_seconds) + 1,
    )
    jax.devices()


def _leave(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)


def check_devices(config: ConfigDict) -> None:
    """Raise UserError where `train.mesh` does not have as many places as JAX sees devices."""
    mesh.check_devices(config.train.mesh, jax.device_count())


def first_weights(config: ConfigDict, workdir: Path, inputs: Inputs) -> Path:
    """Return the HF directory of the run's first weights; write it where they are random."""
    if not config.model.random_init:
        return inputs.model_dir
    directory, model = workdir / INITIAL, inputs.model_config
    weights = parameters.init(model, jax.random.key(config.seed), config.model.dtype)
    hf.save(directory, model, weights, config.model.publish_dtype, source=inputs.model_dir)
    return directory


def set_up_jax() -> None:
    """Set XLA's flags, and let JAX keep what it compiles; the checks before a run compile too."""
    xla_flags.add(os.environ)
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)


def _jax(config: ConfigDict, path: str) -> Update:
    options = TrainOptions.of(config)

    def first(places: parameters.Params) -> parameters.Params:
        return hf.load(path, options.dtype, places)[1]

    return JaxUpdate(hf.load_config(path), options, source=first)


def _torch(config: ConfigDict, path: str) -> Update:
    try:
        from rlx_torch.update import TorchUpdate
    except ImportError as error:
        raise UserError(f"trainer=torch needs PyTorch ({error}); {install('torch')}") from None
    return TorchUpdate(hf.load_config(path), TrainOptions.of(config), Path(path))


# Of the config and the path of the first weights.
TRAINERS: dict[str, Callable[..., Update]] = {"jax": _jax, "torch": _torch}
