"""Compare the estimated memory and disk of a run with this machine's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from rlx.cli.text import size
from rlx.doctor import machine, memory
from rlx.doctor.findings import Finding
from rlx.doctor.memory import RunSizes
from rlx.system import available_memory

_TIGHT = 0.9  # share of the memory above which a row is a warning


def check(sizes: RunSizes, workdir: Path, devices: machine.Devices) -> Iterator[Finding]:
    """Yield the rows of a train step's memory, of published weights, and of checkpoints."""
    pieces = memory.trainer(sizes, devices)
    needed, there = sum(pieces.values()), devices.memory  # 0: unknown
    if devices.platform == "cpu":
        there = available_memory.memory().free
    what = memory.estimate(pieces, sizes.train.mesh) + f"; {size(there)} free" * bool(there)
    level, remedy = "ok", ""
    if there and needed > _TIGHT * there:
        level, remedy = "warning", memory.remedy(sizes, devices)
        level = "problem" if needed > there else level
    yield Finding("memory", "trainer", level, what, remedy)
    if sizes.has_fleet:
        yield machine.check_publish_dir(sizes.publish_dir, memory.in_publish_dir(sizes))
    free = shutil.disk_usage(machine.existing(workdir)).free
    state, exported = sum(memory.state(sizes).values()), memory.exported(sizes)
    yield judge_disk(state, exported, sizes.keep, free)


def judge_disk(state: int, exported: int, keep: int, free: int) -> Finding:
    """Return the row of disk space for `keep` + 1 checkpoints and the HF export."""
    needed, what = memory.checkpoints(state, exported, keep)
    what = f"{what}; {size(free)} free"
    if needed <= free:
        return Finding("memory", "disk", "ok", what)
    remedy = "free some, give another --workdir, or lower checkpoint.keep"
    return Finding("memory", "disk", "problem", what, remedy)
