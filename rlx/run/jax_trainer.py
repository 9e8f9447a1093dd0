"""The JAX trainer: the functions of `rlx.run.trainers.TrainerLibrary`."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rlx.doctor import gpu_cards, memory
from rlx.doctor.machine import Devices
from rlx.launch import xla_flags
from rlx.model import compile_cache, hf, mesh, ops
from rlx.model import params as parameters
from rlx.run.inputs import Inputs
from rlx.train import device_programs
from rlx.train.contract import Update
from rlx.train.hosts import Hosts
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


def set_up() -> None:
    """Set XLA's flags and JAX's compilation cache, before the checks compile."""
    xla_flags.add(os.environ)
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)


def join(hosts: Hosts) -> None:
    """Connect JAX to the devices of all processes."""
    # The preemption service and heartbeats of JAX abort a process without a message.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        hosts.service, hosts.count, hosts.index, coordinator_bind_address=hosts.service,
        cluster_detection_method="deactivate", heartbeat_timeout_seconds=1_000_000,
        initialization_timeout=int(hosts.cluster.join) + 1,
        shutdown_timeout_seconds=int(hosts.cluster.timeout) + 1,
    )  # fmt: skip
    jax.devices()


leave = jax.distributed.shutdown


def devices() -> Devices:
    """Return the devices of all processes."""
    first, platform = jax.devices()[0], jax.default_backend()
    capability = str(getattr(first, "compute_capability", ""))
    limit = (first.memory_stats() or {}).get("bytes_limit", 0)
    if not limit and (card := gpu_cards.card_of(first.device_kind)):  # an allocator without one
        limit = int(gpu_cards.LARGEST_SHARE * card.memory)
    return Devices(platform, first.device_kind, jax.device_count(), limit, capability)


def planned(sizes: memory.RunSizes, devices: Sequence[jax.Device] = ()) -> float:
    """Return the bytes that an update needs on each device, by what XLA compiles for them."""
    _, program, beside = next(programs(sizes, devices or jax.devices())[1])
    # All processes of a run would share the work of timing products; this one compiles by itself.
    alone = {"xla_gpu_shard_autotuning": False} if jax.process_count() > 1 else None
    try:
        plan = program.compile(compiler_options=alone).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return math.inf
        raise
    return device_programs.planned_bytes(plan) + beside


def programs(
    sizes: memory.RunSizes, devices: Sequence[jax.Device]
) -> tuple[device_programs.ShapesUpdate, Iterator[device_programs.Lowered]]:
    """Return a trainer without arrays for some devices, and the programs of its train batch."""
    trainer = device_programs.ShapesUpdate(sizes.model, sizes.train, list(devices))
    tokens = memory.whole_minibatch(sizes, mesh.mesh_axes(sizes.train.mesh, len(devices)))
    return trainer, trainer.lowered(sizes.row_length, accumulates=tokens > sizes.train.token_budget)


def product(shape: tuple[int, int, int], dtype: str) -> Callable[[], Any]:
    """Return a function that multiplies [T, D] by [D, F] as the decoder does, and waits."""
    args, multiply = (jnp.ones(shape[:2], dtype), jnp.ones(shape[1:], dtype)), jax.jit(ops.matmul)
    return lambda: multiply(*args).block_until_ready()


def check_devices(inputs: Inputs) -> None:
    """Raise UserError if `train.mesh` does not match the number of devices."""
    mesh.check_devices(inputs.train.mesh, jax.device_count())


def random_weights(inputs: Inputs, directory: Path) -> None:
    """Write an HF directory with random weights."""
    model, train = inputs.model_config, inputs.train
    weights = parameters.init(model, jax.random.key(train.seed), train.dtype)
    hf.save(directory, model, weights, train.publish_dtype, source=inputs.model_dir)


def make(options: TrainOptions, context: int, path: str, **decided: Any) -> Update:
    """Return a trainer that starts from the weights of an HF directory."""
    options = replace(options, **decided)  # by process 0; see `Parts.decided`
    if options.compile:  # JAX would fail to store these programs, with a warning for each
        jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)

    # `context` is what a server takes, tokens of prompt and answer.
    model = hf.load_config(path).within(context)
    return JaxUpdate(
        model, options, source=lambda places: hf.load(path, options.dtype, places)[1],
        programs=None if options.compile else jax.config.values["jax_compilation_cache_dir"],
    )  # fmt: skip
