"""Layers that confine a program, from limits alone to namespaces of its own."""

import resource
from collections.abc import Mapping
from typing import Any

LEVELS = (
    "none",
    "seccomp",
    "landlock",
    "bubblewrap",
    "namespaces",
)  # each holds more than the last
_MB = 1 << 20


def set_limits(limits: Mapping[str, Any], used: int) -> None:
    """Set this process's limits; `used` is the address space that it has, bytes."""
    memory, file = used + limits["memory_mb"] * _MB, limits["file_mb"] * _MB
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, max(1, -int(-limits["cpu_seconds"] // 1))),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
