"""The trainer in JAX, as rlx/run/trainers.py has it."""

import os
from pathlib import Path

import jax
from ml_collections import ConfigDict

from rlx.doctor.machine import Devices
from rlx.launch import xla_flags
from rlx.model import compile_cache, hf, mesh
from rlx.model import params as parameters
from rlx.run.inputs import Inputs
from rlx.run.room_options import context_of
from rlx.train.contract import Update
from rlx.train.hosts import Hosts
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


def set_up() -> None:
    """Set XLA's flags, and let JAX keep what it compiles; the checks before a run compile too."""
    xla_flags.add(os.environ)
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)


def join(config: ConfigDict, hosts: Hosts) -> None:
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


def leave() -> None:
    """End what `join` began."""
    jax.distributed.shutdown()


def devices() -> Devices:
    """Return the devices of all processes."""
    return Devices(jax.default_backend(), count=jax.device_count())


def check_devices(config: ConfigDict) -> None:
    """Raise UserError where `train.mesh` does not have as many places as JAX sees devices."""
    mesh.check_devices(config.train.mesh, jax.device_count())


def random_weights(config: ConfigDict, directory: Path, inputs: Inputs) -> None:
    """Write an HF directory of random weights of the run's model."""
    model = inputs.model_config
    weights = parameters.init(model, jax.random.key(config.seed), config.model.dtype)
    hf.save(directory, model, weights, config.model.publish_dtype, source=inputs.model_dir)


def make(config: ConfigDict, path: str) -> Update:
    """Return the trainer of a run that begins with the weights of an HF directory."""
    options = TrainOptions.of(config)

    def first(places: parameters.Params) -> parameters.Params:
        return hf.load(path, options.dtype, places)[1]

    return JaxUpdate(hf.load_config(path).within(context_of(config)), options, source=first)
