"""Compare the estimated memory and disk of a run with this machine's."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlx.cli.text import size
from rlx.doctor import machine, memory
from rlx.doctor.findings import Finding
from rlx.doctor.memory import RunSizes, listed
from rlx.engines.vllm.vllm_start import on_cpu
from rlx.system import available_memory
from rlx.system.available_memory import MemoryLimit

_TIGHT = 0.9  # share of the memory above which a row is a warning
_PROGRAM = {"trainer": 600 << 20, "jax": 400 << 20, "vllm": 1100 << 20}  # bytes besides arrays


def check(
    sizes: RunSizes, teacher: RunSizes | None, workdir: Path, devices: machine.Devices
) -> Iterator[Finding]:
    """Yield the rows of memory and disk, also of the `teacher` if the run starts its servers."""
    pieces = memory.trainer(sizes, devices)
    there = available_memory.memory()
    on_host = devices.platform == "cpu"
    yield judge_trainer(sizes, pieces, devices, there.free)
    host = _PROGRAM["trainer"] + (sum(pieces.values()) if on_host else 0)
    started = {"servers": (sizes, memory.server(sizes))}
    if teacher:
        started["teacher"] = teacher, memory.server(teacher) | {"new weights": 0}
    for name, (one, parts) in started.items():
        if one.num_servers:
            row, needed = _judge_servers(name, parts, one.num_servers, one.engine)
            yield row
            host += needed
    if sizes.has_fleet:
        in_shm = memory.in_publish_dir(sizes)
        yield machine.check_shared_memory(in_shm, sizes.publish_dir)
        host += memory.published(sizes) + in_shm
    yield judge_host(host, there, on_host)
    state = sum(memory.state(sizes).values())
    free = shutil.disk_usage(machine.existing(workdir)).free
    yield judge_disk(state, memory.exported(sizes), sizes.keep, free)


def _judge_servers(
    name: str, parts: dict[str, int], count: int, engine: str
) -> tuple[Finding, int]:
    """Return the row of `count` servers, and the bytes of the machine's memory that they need."""
    if engine == "vllm" and not on_cpu():
        what = f"each of {count} takes most of a GPU's memory, as JAX does of every GPU it sees"
        remedy = "start them on GPUs of their own (python -m rlx.serve) and give their addresses"
        return Finding("memory", name, "warning", what, remedy), 0
    parts = parts | {"program": _PROGRAM[engine]}
    each = sum(parts.values())
    what = f"{size(each)} each × {count}: {listed(parts)}"
    return Finding("memory", name, "ok", what), each * count


def judge_trainer(
    sizes: RunSizes, pieces: Mapping[str, int], devices: machine.Devices, available: int
) -> Finding:
    """Return the row that compares a train step's peak with the device's memory."""
    total = sum(pieces.values())
    there = available if devices.platform == "cpu" else devices.memory
    what = memory.estimate(pieces, sizes.train.mesh)
    what += f"; {size(there)} free" if there else ""
    if not there or total <= _TIGHT * there:
        return Finding("memory", "trainer", "ok", what)
    remedy = memory.remedy(sizes, devices)
    return Finding("memory", "trainer", "problem" if total > there else "warning", what, remedy)


def judge_host(needed: int, there: MemoryLimit, with_trainer: bool) -> Finding:
    """Return the row of host memory: servers, published files, and a trainer on a CPU."""
    parts = "trainer, servers and publishing" if with_trainer else "servers and publishing"
    what = f"{parts} need about {size(needed)}; {there}"
    if needed <= _TIGHT * there.free:
        return Finding("memory", "together", "ok", what)
    remedy = f"lower fleet.slots or fleet.num_servers, or {there.remedy}"
    level = "problem" if needed > there.free else "warning"
    return Finding("memory", "together", level, what, remedy)


def judge_disk(state: int, exported: int, keep: int, free: int) -> Finding:
    """Return the row of disk space for `keep` + 1 checkpoints and the HF export."""
    needed, what = memory.checkpoints(state, exported, keep)
    what = f"{what}; {size(free)} free"
    if needed <= free:
        return Finding("memory", "disk", "ok", what)
    remedy = "free some, give another --workdir, or lower checkpoint.keep"
    return Finding("memory", "disk", "problem", what, remedy)
