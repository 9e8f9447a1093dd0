"""Plan a run's processes on several hosts: their GPUs and commands. Pure.

    allocation or counts ─┐
    host → its GPUs ──────┴▶ `processes` ─▶ steps of a Slurm job, actors of Ray, …

A JAX trainer has one process per host, with all its GPUs there; a PyTorch trainer has one per GPU.
Without GPUs, each trainer process takes a host in order, and servers share the other hosts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlx.base import UserError
from rlx.launch.allocation import Allocation, Part, place
from rlx.system.host_port import bracketed


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    role: str  # server | trainer
    index: int  # within its role; trainer 0 writes the run's records
    host: str  # name or address for the other processes
    gpus: tuple[str, ...]  # their names on that host; empty: it runs on the CPU
    port: int  # of a server or of trainer 0; 0 for other trainers
    argv: tuple[str, ...]
    env: Mapping[str, str]  # its own environment variables

    def __str__(self) -> str:
        gpus = f"GPU {', '.join(self.gpus)}" if self.gpus else "CPU"
        return f"{self.role} {self.index} on {self.host}: {gpus}"


def processes(
    hosts: Mapping[str, Sequence[str]],  # name or address → names of GPUs
    *,
    servers: int,  # number; on GPUs `allocation` overrides it
    trainers: int = 1,  # likewise
    library: str = "jax",  # of the trainer: jax | torch
    allocation: Allocation | None = None,  # None: whole hosts for the trainer
    tensor_parallel: int = 1,  # GPUs of a server, without an allocation
    trainer: Sequence[str],  # command of rlx.main, which gets `cluster.*`
    server: Sequence[str] = (),  # command of rlx.serve, which gets host, port and seed
    port: int,  # of trainer 0; servers have those above it
    seed: int = 0,  # of server 0; the others have those above it
    metrics_port: int = 0,  # of trainer 0's Prometheus listener; servers' are above it; 0: none
) -> tuple[Process, ...]:
    """Return every process of a run, the trainer's first; UserError if they do not fit."""
    if any(hosts.values()):
        if allocation is None:
            first = sum(len(gpus) for gpus in list(hosts.values())[:trainers])
            trains = Part(library, True, {"f": trainers if library == "torch" else first})
            parts = trains, Part("vllm", False, {"d": servers, "t": tensor_parallel})
            allocation = Allocation(tuple(part for part in parts if part.gpus))
        seats = _by_gpu(allocation, hosts)
    else:
        seats = _by_count(servers, trainers, tuple(hosts))
    trainer_seats = [(host, gpus) for role, host, gpus in seats if role == "trainer"]
    server_seats = [(host, gpus) for role, host, gpus in seats if role == "server"]
    plan = []
    for index, (host, gpus) in enumerate(trainer_seats):
        argv = (*trainer, f"--config.cluster.processes={len(trainer_seats)}")
        if len(trainer_seats) > 1:
            argv += (f"--config.cluster.coordinator={bracketed(trainer_seats[0][0], port)}",
                     f"--config.cluster.process={index}")  # fmt: skip
        env = _sees(gpus, hosts[host])
        plan.append(Process("trainer", index, host, gpus, 0 if index else port, argv, env))
    for index, (host, gpus) in enumerate(server_seats):
        server_port = port + 1 + index
        argv = (*server, f"--host={host}", f"--port={server_port}", f"--seed={seed + index}")
        if metrics_port:
            argv += (f"--metrics-host={host}", f"--metrics-port={metrics_port + 1 + index}")
        env = {"JAX_PLATFORMS": "cuda" if gpus else "cpu", **_sees(gpus, hosts[host])}
        plan.append(Process("server", index, host, gpus, server_port, argv, env))
    return tuple(plan)


def addresses(plan: Sequence[Process]) -> tuple[str, ...]:
    """Return host:port of each server."""
    return tuple(bracketed(p.host, p.port) for p in plan if p.role == "server")


def table(plan: Sequence[Process]) -> str:
    """Return a line for each host with its processes."""
    by_host: dict[str, list[str]] = {}
    for process in plan:
        by_host.setdefault(process.host, []).append(str(process).replace(f" on {process.host}", ""))
    return "\n".join(f"{host}: {'; '.join(here)}" for host, here in by_host.items())


def _by_gpu(allocation: Allocation, hosts: Mapping[str, Sequence[str]]) -> list:
    """Return (role, host, GPUs) of each process on hosts with GPUs."""
    if allocation.shared:
        problem = f"allocation_mode={allocation} puts servers and trainer on the same GPUs"
        raise UserError(f"{problem}, which they cannot share yet; write + for |")
    seats = []
    for part, taken in place(allocation, {h: range(len(names)) for h, names in hosts.items()}):
        by_host = groupby(taken, lambda gpu: gpu[0])
        groups = [(host, tuple(hosts[host][i] for _, i in gpus)) for host, gpus in by_host]
        if part.trains and part.backend == "torch":
            groups = [(host, (gpu,)) for host, gpus in groups for gpu in gpus]
        if not part.trains and len(groups) > 1:
            where = f"{len(groups)} hosts ({', '.join(host for host, _ in groups)})"
            problem = f"a server of {part} would be on {where}, but it needs one"
            raise UserError(f"allocation_mode={allocation}: {problem}; use a smaller t")
        seats += [("trainer" if part.trains else "server", *group) for group in groups]
    return seats


def _by_count(servers: int, trainers: int, hosts: Sequence[str]) -> list:
    """Return (role, host, no GPUs) of each process on hosts without GPUs."""
    if trainers > len(hosts):
        problem = f"cluster.processes={trainers} needs a host for each"
        raise UserError(f"{problem}, and there are {len(hosts)}; use fewer, or more hosts")
    rest = hosts[trainers:] or hosts
    seats = [("trainer", host, ()) for host in hosts[:trainers]]
    return seats + [("server", rest[i % len(rest)], ()) for i in range(servers)]


def _sees(gpus: Sequence[str], host_gpus: Sequence[str]) -> dict[str, str]:
    """Return the variable that limits a process to its GPUs; none on a host without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if host_gpus else {}
