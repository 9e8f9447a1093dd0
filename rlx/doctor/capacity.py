"""Memory and disk: what a run needs by estimate against what there is."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.text import size
from rlx.doctor import machine, memory
from rlx.doctor.findings import Finding
from rlx.doctor.memory import listed
from rlx.engines.vllm.vllm_start import on_cpu
from rlx.launch import available_memory, teacher
from rlx.launch.available_memory import Allowance
from rlx.model import hf
from rlx.model.model_config import ModelConfig
from rlx.run.inputs import has_servers

_TIGHT = 0.9  # of the memory there is
_PROGRAM = {"trainer": 600 << 20, "jax": 400 << 20, "vllm": 1100 << 20}  # beside its arrays, here


def check(
    config: ConfigDict, model: ModelConfig, workdir: Path, devices: machine.Devices
) -> Iterator[Finding]:
    """The rows of memory and disk."""
    try:
        pieces = memory.trainer(config, model, devices.platform, devices.count)
    except UserError:
        return  # a name that the inputs' rows have complained about
    there = available_memory.memory()
    on_host = devices.platform == "cpu"
    row = judge_trainer(config, model, pieces, devices, there.free)
    yield row
    host = 0
    for row, needed in _servers(config, model):
        yield row
        host += needed
    copies = memory.published(config, model)
    if has_servers(config):
        delta = config.fleet.publish == "delta"
        in_shm = copies * (2 if delta else 1) * 2  # the old file stays until the new one is taken
        yield machine.check_shared_memory(in_shm, config.fleet.publish_dir)
        host += copies + in_shm
    host += _PROGRAM["trainer"] + (sum(pieces.values()) if on_host else 0)
    yield judge_host(host, there, on_host)
    place = machine.existing(workdir)
    state = sum(memory.state(config, model).values())
    exported = memory.exported(config, model)
    yield judge_disk(state, exported, config.checkpoint.keep, shutil.disk_usage(place).free)


def _servers(config: ConfigDict, model: ModelConfig) -> Iterator[tuple[Finding, int]]:
    """The row of the servers that the run starts, and of its teacher's, with the bytes of all."""
    if has_servers(config) and not config.fleet.addresses:
        parts, count = memory.server(config, model), config.fleet.num_servers
        yield _judge_servers("servers", parts, count, config.fleet.engine)
    if count := teacher.TeacherOptions.of(config).num_local:
        engine = config.teacher.engine or config.fleet.engine
        other = memory.with_value(config, "fleet.engine", engine)
        other = memory.with_value(other, "fleet.slots", 1 if engine == "jax" else other.fleet.slots)
        try:
            parts = memory.server(other, hf.load_config(hf.resolve(config.teacher.path)))
        except UserError:
            return
        yield _judge_servers("teacher", parts | {"new weights": 0}, count, engine)


def _judge_servers(
    name: str, parts: dict[str, int], count: int, engine: str
) -> tuple[Finding, int]:
    """The row of `count` servers, and what they take of the machine's memory."""
    if engine == "vllm" and not on_cpu():
        what = f"each of {count} takes most of a GPU's memory, as JAX does of every GPU it sees"
        remedy = "start them on GPUs of their own (python -m rlx.serve) and give their addresses"
        return Finding("memory", name, "warning", what, remedy), 0
    parts = parts | {"program": _PROGRAM[engine]}
    each = sum(parts.values())
    what = f"{size(each)} each × {count}: {listed(parts)}"
    return Finding("memory", name, "ok", what), each * count


def judge_trainer(
    config: ConfigDict,
    model: ModelConfig,
    pieces: dict[str, int],
    devices: machine.Devices,
    available: int,
) -> Finding:
    """The row of a train step's peak, against the device's memory or the machine's."""
    total = sum(pieces.values())
    there = available if devices.platform == "cpu" else devices.memory
    what = f"a step is estimated at {size(total)}: {listed(pieces)}"
    if not there or total <= _TIGHT * there:
        of = f"; {size(there)} free" if there else ""
        return Finding("memory", "trainer", "ok", what + of)
    remedy = memory.remedy(config, model, devices.platform, devices.count, int(_TIGHT * there))
    level = "problem" if total > there else "warning"
    return Finding("memory", "trainer", level, f"{what}; {size(there)} free", remedy)


def judge_host(needed: int, there: Allowance, with_trainer: bool) -> Finding:
    """The row of this machine's memory: servers, published files and, on a CPU, the trainer."""
    whose = "trainer, servers and publishing" if with_trainer else "servers and publishing"
    what = f"{whose} need about {size(needed)}; {there}"
    remedy = f"lower fleet.slots or fleet.num_servers, or {there.remedy}"
    if needed > there.free:
        return Finding("memory", "together", "problem", what, remedy)
    if needed > _TIGHT * there.free:
        return Finding("memory", "together", "warning", what, remedy)
    return Finding("memory", "together", "ok", what)


def judge_disk(state: int, exported: int, keep: int, free: int) -> Finding:
    """The row of checkpoints: `keep` of them, one more while it is written, and the HF export."""
    needed, what = memory.checkpoints(state, exported, keep)
    what = f"{what}; {size(free)} free"
    if needed > free:
        return Finding("memory", "disk", "problem", what,
                       "free some, give another --workdir, or lower checkpoint.keep")  # fmt: skip
    return Finding("memory", "disk", "ok", what)
