"""Let `allocation_mode` decide a run's servers, trainer and mesh, and the GPUs that each sees."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.config import default
from rlx.doctor import machine
from rlx.launch import allocation
from rlx.train.hosts import Cluster

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED_MEMORY = 0.4  # of a GPU, for a server that the trainer is beside
_JAX_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class GpuShares(NamedTuple):
    """Names of the GPUs that each server has, and of those the trainer has."""

    servers: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]


def allocated(config: ConfigDict, trains: bool = True) -> ConfigDict:
    """Return a config with what its `allocation_mode` decides.

    Args:
      trains: whether there must be a trainer.

    Raises:
      UserError: the allocation cannot be read or run, or a key says otherwise.
    """
    if not (text := config.allocation_mode):
        return config
    parsed, usual = allocation.parse(text), default()
    config = config.copy_and_resolve_references()
    served = any(not part.trains for part in parsed.parts)
    if served and config.fleet.addresses:
        raise UserError(
            f"allocation_mode={text} has servers to start and fleet.addresses names running ones; "
            "leave one of them out"
        )
    if trains and not any(part.trains for part in parsed.parts):
        raise UserError(
            f"allocation_mode={text} has no trainer; add one, as {parsed.parts[0]}+jax:f1, or "
            "evaluate by rlx.evaluate"
        )
    for key, value in allocation.settings(parsed).items():
        section, _, name = key.rpartition(".")
        place, before = (c[section] if section else c for c in (config, usual))
        if place[name] not in (before[name], value):
            raise UserError(
                f"{key}={place[name]!r} contradicts allocation_mode={text}, which says {value!r}; "
                "leave one of them out"
            )
        place[name] = value
    if parsed.shared:
        config.fleet.gpu_memory = config.fleet.gpu_memory or SHARED_MEMORY
    config.allocation_mode = str(parsed)
    return config


def share(config: ConfigDict, gpus: Sequence[str], processes: int = 0) -> GpuShares | None:
    """Return who has which GPUs of this machine; None where all see what there is.

    Args:
      gpus: names of those there are, as CUDA_VISIBLE_DEVICES has them.
      processes: of the trainer, all of which see its GPUs; 0: nobody has counted them.

    Raises:
      UserError: there are too few, or more than this machine's would have to be dealt.
    """
    if not config.allocation_mode or not gpus:
        return None
    parsed = allocation.parse(config.allocation_mode)
    own = sum(part.gpus for part in parsed.parts if part.trains)
    wanted = own if config.trainer == "torch" else 1
    if processes not in (0, wanted):
        raise UserError(
            f"allocation_mode={config.allocation_mode} deals GPUs to a trainer of {wanted} process"
            f"{'es' * (wanted != 1)}, and this one has {processes}; give train.mesh and "
            "fleet.addresses in its place"
        )
    if config.teacher.path and (config.teacher.engine or config.fleet.engine) == "vllm":
        raise UserError(
            f"allocation_mode={config.allocation_mode} has no GPU for the teacher's servers; start "
            "them by rlx.serve and give teacher.addresses"
        )
    placed = allocation.place(parsed, {"this machine": range(len(gpus))})
    names = [(one.part.trains, tuple(gpus[i] for _, i in one.gpus)) for one in placed]
    servers = tuple(ids for trains, ids in names if not trains)
    return GpuShares(servers, next((ids for trains, ids in names if trains), ()))


def gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use."""
    if (given := environment.get(VISIBLE)) is not None:
        return tuple(name for name in given.replace(" ", "").split(",") if name not in ("", "-1"))
    return tuple(map(str, range(machine.nvidia_gpus())))


@contextmanager
def dealt(config: ConfigDict) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Let this process see the trainer's GPUs alone; yield those of each server, () for no share.

    JAX takes what servers on the same GPUs leave, less a tenth. Entered before anything here looks
    for devices, which JAX and torch do once; raises as `share`.
    """
    count = Cluster.of(os.environ, **config.cluster).count if config.allocation_mode else 0
    shares, changed = share(config, gpus(), count), {}
    if shares:
        changed[VISIBLE] = ",".join(shares.trainer)
        if set(shares.trainer) & {gpu for ids in shares.servers for gpu in ids}:
            changed[_JAX_MEMORY] = f"{max(0.9 - config.fleet.gpu_memory, 0.05):g}"
    with changed_environment(changed):
        yield shares.servers if shares else ()


@contextmanager
def changed_environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Change variables of this process's environment while the block lasts."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
