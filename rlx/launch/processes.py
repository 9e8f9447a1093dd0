"""List a run's processes on several hosts: which GPUs each has, and how it is started there. Pure.

    allocation or counts ─┐
    host → its GPUs ──────┴▶ `processes` ─▶ steps of a Slurm job, actors of Ray, …

A trainer in JAX has one process on each of its hosts, with all the GPUs that it has there; one in
PyTorch has a process a GPU. Without GPUs the trainer's processes take a host each, in order, and
servers the hosts that are left, in turn; where none is left, all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlx.base import UserError
from rlx.launch.allocation import Allocation, Part, place


@dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
      role: server | trainer. index: among those of its role; trainer 0 has the run's records.
      host: by which the others reach it.
      gpus: their names on that host; empty: it computes on the CPU.
      port: on which a server listens, or trainer 0 waits for the others; 0 of other trainers.
      argv: the command. env: variables that it needs besides those that all have.
    """

    role: str
    index: int
    host: str
    gpus: tuple[str, ...]
    port: int
    argv: tuple[str, ...]
    env: Mapping[str, str]

    def __str__(self) -> str:
        gpus = f"GPU {', '.join(self.gpus)}" if self.gpus else "CPU"
        return f"{self.role} {self.index} on {self.host}: {gpus}"


@dataclass(frozen=True)
class Demand:
    """What a run wants: processes by counts, which an allocation overrides where hosts have GPUs.

    Attributes:
      servers, trainers: how many processes.
      trainer: jax | torch.
      allocation: None: each server has a GPU, and a process of the trainer all of its host.
    """

    servers: int
    trainers: int = 1
    trainer: str = "jax"
    allocation: Allocation | None = None


def processes(
    demand: Demand,
    hosts: Mapping[str, Sequence[str]],
    *,
    trainer: Sequence[str],
    server: Sequence[str] = (),
    port: int,
    seed: int = 0,
) -> tuple[Process, ...]:
    """Return every process of a run, the trainer's first; they fit the hosts, or nothing is.

    Args:
      hosts: name or address by which others reach it → names of its GPUs.
      trainer, server: commands of rlx.main and rlx.serve; what tells one process from another
        (`cluster.*`; host, port and seed) is added.
      port: of trainer 0; servers have those above it.
      seed: of server 0; the others have those above it.

    Raises:
      UserError: there are too few hosts or GPUs, with the arithmetic.
    """
    seats = _by_gpu(demand, hosts) if any(hosts.values()) else _by_count(demand, tuple(hosts))
    trainers = [(host, gpus) for role, host, gpus in seats if role == "trainer"]
    servers = [(host, gpus) for role, host, gpus in seats if role == "server"]
    count = f"--config.cluster.processes={len(trainers)}"
    found = []
    for index, (host, gpus) in enumerate(trainers):
        joins = (
            f"--config.cluster.coordinator={_address(trainers[0][0], port)}",
            f"--config.cluster.process={index}",
        )
        argv = (*trainer, count, *(joins if len(trainers) > 1 else ()))
        env = _sees(gpus, hosts[host])
        found.append(Process("trainer", index, host, gpus, 0 if index else port, argv, env))
    for index, (host, gpus) in enumerate(servers):
        own = port + 1 + index
        argv = (*server, f"--host={host}", f"--port={own}", f"--seed={seed + index}")
        env = {"JAX_PLATFORMS": "cuda" if gpus else "cpu", **_sees(gpus, hosts[host])}
        found.append(Process("server", index, host, gpus, own, argv, env))
    return tuple(found)


def addresses(plan: Sequence[Process]) -> tuple[str, ...]:
    """Return host:port of each server."""
    return tuple(_address(p.host, p.port) for p in plan if p.role == "server")


def table(plan: Sequence[Process]) -> str:
    """Return a line for each host: what runs there."""
    hosts = dict.fromkeys(process.host for process in plan)
    rows = [(h, [str(p).replace(f" on {h}", "") for p in plan if p.host == h]) for h in hosts]
    return "\n".join(f"{host}: {'; '.join(here)}" for host, here in rows)


def _by_gpu(demand: Demand, hosts: Mapping[str, Sequence[str]]) -> list:
    """Return (role, host, GPUs) of each process where hosts have GPUs."""
    allocation = demand.allocation or _whole_hosts(demand, hosts)
    if allocation.shared:
        raise UserError(
            f"allocation_mode={allocation} puts servers and trainer on the same GPUs, which they "
            "cannot share yet; write + for |"
        )
    seats = []
    for placed in place(allocation, {host: range(len(names)) for host, names in hosts.items()}):
        by_host = groupby(placed.gpus, lambda gpu: gpu[0])
        groups = [(host, tuple(i for _, i in gpus)) for host, gpus in by_host]
        if placed.part.trains and demand.trainer == "torch":
            groups = [(host, (i,)) for host, ids in groups for i in ids]
        role = "trainer" if placed.part.trains else "server"
        if role == "server" and len(groups) > 1:
            raise UserError(
                f"allocation_mode={allocation}: server {placed.index} would be on "
                f"{len(groups)} hosts ({', '.join(host for host, _ in groups)}), and a server is "
                "on one; use less t"
            )
        seats += [(role, h, tuple(hosts[h][i] for i in ids)) for h, ids in groups]
    return seats


def _whole_hosts(demand: Demand, hosts: Mapping[str, Sequence[str]]) -> Allocation:
    """Return the trainer on whole hosts, the first ones, and a GPU for each server."""
    first = sum(len(gpus) for gpus in list(hosts.values())[: demand.trainers])
    gpus = demand.trainers if demand.trainer == "torch" else first
    parts = [Part(demand.trainer, True, {"f": gpus}), Part("vllm", False, {"d": demand.servers})]
    return Allocation(tuple(part for part in parts if part.gpus))


def _by_count(demand: Demand, hosts: Sequence[str]) -> list:
    """Return (role, host, no GPUs) of each process where no host has a GPU."""
    if demand.trainers > len(hosts):
        raise UserError(
            f"cluster.processes={demand.trainers} of the trainer take a host each, and there are "
            f"{len(hosts)}; use fewer, or more hosts"
        )
    rest = hosts[demand.trainers :] or hosts
    return [
        *(("trainer", host, ()) for host in hosts[: demand.trainers]),
        *(("server", rest[i % len(rest)], ()) for i in range(demand.servers)),
    ]


def _sees(gpus: Sequence[str], there: Sequence[str]) -> dict[str, str]:
    """Return what lets a process see its GPUs alone, on a host that has some."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if there else {}


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
