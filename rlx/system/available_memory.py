"""Memory available to this process: the tightest limit of machine, cgroup and `ulimit -v`."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LIMIT = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # cgroup v2 and v1
_USED = {"": "memory.current", "memory": "memory.usage_in_bytes"}

_MACHINE, _CONTAINER, _SHELL = "on this machine", "in its container (cgroup)", "under `ulimit -v`"
_REMEDIES = {
    _MACHINE: "end other programs, or use a machine with more",
    _CONTAINER: "give the container more",
    _SHELL: "raise that limit",
}


class MemoryLimit(NamedTuple):
    """A memory limit: total and free bytes, and what sets it."""

    total: int
    free: int
    where: str

    @property
    def remedy(self) -> str:
        return _REMEDIES[self.where]

    def __str__(self) -> str:
        return f"{self.free / 1e9:.1f} of {self.total / 1e9:.1f} GB free {self.where}"


def memory(root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest limit; `root` holds /proc and /sys."""
    return min((_machine(root), *_containers(root), *_shell_limit()), key=lambda each: each.free)


def _machine(root: Path) -> MemoryLimit:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    fields = {name: int(value) * 1024 for name, value, *_ in lines}
    free = fields.get("MemAvailable:", fields.get("MemFree:", 0))
    return MemoryLimit(fields["MemTotal:"], free, _MACHINE)


def _containers(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's cgroup and its ancestors, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        kind = "memory" if "memory" in controllers.split(",") else controllers
        top = root / "sys/fs/cgroup" / kind
        innermost = top / path.lstrip("/")
        for place in (innermost, *innermost.parents) if kind in _LIMIT else ():
            if place.is_relative_to(top) and (limit := _cgroup(place, kind)):
                yield limit


def _cgroup(place: Path, kind: str) -> MemoryLimit | None:
    try:
        limit = int((place / _LIMIT[kind]).read_text())
        used = int((place / _USED[kind]).read_text())
        stat = (place / "memory.stat").read_text().split()
    except (OSError, ValueError):  # no such cgroup, or "max"
        return None
    if limit >= 1 << 60:  # cgroup v1's unlimited
        return None
    # The kernel drops cached files first, so they count as free.
    fields = dict(zip(stat[::2], stat[1::2], strict=True))
    files = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return MemoryLimit(limit, max(limit - used + files, 0), _CONTAINER)


def _shell_limit() -> Iterator[MemoryLimit]:
    """Yield the limit of `ulimit -v`, which counts addresses rather than memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        yield MemoryLimit(limit, max(limit - used, 0), _SHELL)
