"""Apply `allocation_mode`: a run's servers, trainer, mesh, and the GPUs that each process sees."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from rlx.base import UserError, refuse
from rlx.config import default
from rlx.doctor import machine
from rlx.engines.engine import SLEEPS
from rlx.launch import allocation
from rlx.system.jsonl import read_json
from rlx.train.hosts import Cluster
from rlx.train.train_options import AUTO

VISIBLE = "CUDA_VISIBLE_DEVICES"
_JAX_MEMORY, _JAX_ALLOCATOR = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"
OWN_MEMORY = 0.9  # of a GPU, of which JAX by itself takes 0.75; the rest is CUDA's and NCCL's


class GpuShares(NamedTuple):
    """Names of the GPUs of each server, and of the trainer."""

    servers: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]


def apply_allocation(
    config: ConfigDict, trains: bool = True, workdir: Path | None = None
) -> ConfigDict:
    """Return `config` with the keys that its `allocation_mode` sets; UserError if they clash.

    `auto` is what the run in `workdir` began with, or the fastest plan for the GPUs here.
    """
    if not (text := config.allocation_mode):
        return config
    config = config.copy_and_resolve_references()
    if text == AUTO:
        record = read_json(workdir / "config.json") if workdir else {}
        text = record.get("allocation_mode", "") if record else _choose(config, trains, workdir)
        config.allocation_mode = text
        return apply_allocation(config, trains)
    parsed, usual = allocation.parse(text), default()
    served = any(not part.trains for part in parsed.parts)
    refuse((
        (served and config.fleet.addresses,
         f"allocation_mode={text} starts servers and fleet.addresses names running ones; "
         "remove one of them"),
        (trains and not any(part.trains for part in parsed.parts),
         f"allocation_mode={text} has no trainer; add one, such as {parsed.parts[0]}+jax:f1, or "
         "evaluate with rlx.evaluate"),
    ))  # fmt: skip
    for key, value in allocation.settings(parsed).items():
        section, _, name = key.rpartition(".")
        place, before = (c[section] if section else c for c in (config, usual))
        if place[name] not in (before[name], value):
            what = f"{key}={place[name]!r} contradicts allocation_mode={text}, which sets {value!r}"
            raise UserError(f"{what}; remove one of them")
        place[name] = value
    if parsed.shared:
        config.fleet.gpu_memory = config.fleet.gpu_memory or allocation.SHARED_MEMORY
    config.allocation_mode = str(parsed)
    return config


def _choose(config: ConfigDict, trains: bool, workdir: Path | None) -> str:
    """Return the fastest allocation for the GPUs here, "" without any."""
    here, s = gpus(), config.scheduler
    refuse((
        (s.type != "local",
         f"allocation_mode=auto with scheduler.type={s.type}: the kind of the GPUs is not known "
         f"here; set what `rlx plan --gpus={s.nodes * s.gpus_per_node} --gpu=h100` prints"),
        (here and not trains,
         "allocation_mode=auto plans a training run; evaluate with allocation_mode="
         f"vllm:d{len(here)}+eval"),
    ))  # fmt: skip
    if not here:
        return ""
    from rlx.run import plan_run  # which imports this module

    return plan_run.choose(config, machine.gpu_kind(), len(here), workdir)


def share(config: ConfigDict, gpus: Sequence[str], num_trainers: int = 0) -> GpuShares | None:
    """Return each process's GPUs here, None if all see every one; UserError if they do not fit."""
    if not config.allocation_mode or not gpus:
        return None
    parsed = allocation.parse(config.allocation_mode)
    trainer_gpus = sum(part.gpus for part in parsed.parts if part.trains)
    count = trainer_gpus if config.trainer == "torch" else 1
    refuse((
        (num_trainers not in (0, count),  # processes that all see its GPUs; 0: unknown
         f"allocation_mode={config.allocation_mode} needs a trainer of {count} process"
         f"{'es' * (count != 1)}, and this one has {num_trainers}; set train.mesh and "
         "fleet.addresses instead"),
        (config.teacher.path and (config.teacher.engine or config.fleet.engine) == "vllm",
         f"allocation_mode={config.allocation_mode} has no GPU for the teacher's servers; start "
         "them with rlx.serve and set teacher.addresses"),
    ))  # fmt: skip
    placed = allocation.place(parsed, {"this machine": range(len(gpus))})
    names = [(part.trains, tuple(gpus[i] for _, i in ids)) for part, ids in placed]
    servers = tuple(ids for trains, ids in names if not trains)
    return GpuShares(servers, next((ids for trains, ids in names if trains), ()))


def gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use."""
    if (text := environment.get(VISIBLE)) is not None:
        return tuple(name for name in text.replace(" ", "").split(",") if name not in ("", "-1"))
    return tuple(map(str, range(machine.nvidia_gpus())))


def shares_gpus(config: ConfigDict) -> bool:
    """Return whether `allocation_mode` puts servers on the trainer's GPUs."""
    return bool(text := config.allocation_mode) and allocation.parse(text).shared


@contextmanager
def gpu_environment(config: ConfigDict) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Restrict this process to the trainer's GPUs; yield each server's, () if all see all."""
    count = Cluster.of(os.environ, **config.cluster).count if config.allocation_mode else 0
    shares, changed = share(config, gpus(), count), {}
    if shares:
        changed[VISIBLE] = ",".join(shares.trainer)
        if config.fleet.sleep != SLEEPS[0]:
            changed[_JAX_ALLOCATOR] = "platform"  # which gives freed memory back
        elif set(shares.trainer) & {gpu for ids in shares.servers for gpu in ids}:
            # The memory that servers leave, less a tenth.
            changed[_JAX_MEMORY] = f"{max(OWN_MEMORY - config.fleet.gpu_memory, 0.05):g}"
    if (config.allocation_mode or config.fleet.addresses) and not shares_gpus(config):
        changed.setdefault(_JAX_MEMORY, os.environ.get(_JAX_MEMORY, f"{OWN_MEMORY:g}"))
    with changed_environment(changed):  # before JAX or torch look for devices, which they do once
        yield shares.servers if shares else ()


@contextmanager
def changed_environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process during the block."""
    before = {name: os.environ[name] for name in changed if name in os.environ}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del os.environ[name]
        os.environ.update(before)
