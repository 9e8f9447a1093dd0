"""Who runs in a directory: a file there says so while a process does, and nothing else removes it.

So two runs cannot write over one another, and a run that goes on can say that the one before was
killed: what ends a process with SIGKILL leaves it no time for a word.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.launch.endings import oom_kills
from rlx.observe.jsonl import write_atomically

_NAME = "running.json"


@dataclass(frozen=True, slots=True)
class Killed:
    """How the process that was here before ended; `for_memory`: the kernel has killed since then,
    for want of memory."""

    pid: int
    for_memory: bool

    def __str__(self) -> str:
        why = (
            "and the kernel has killed for want of memory since it began"
            if self.for_memory
            else "by SIGKILL, or with its machine"
        )
        return f"the run before (process {self.pid}) was ended without a word, {why}"


def require_free(directory: Path) -> Killed | None:
    """How the last process in `directory` ended, where it was killed.

    Raises:
      UserError: a process of this machine still runs in it.
    """
    try:
        record = json.loads((directory / _NAME).read_text())
        pid, begun = int(record["pid"]), record["begun"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    here = record.get("machine") == _machine()
    if here and _begun(pid) == begun != "":
        raise UserError(
            f"process {pid} runs in {directory}; wait for its end, end it, or give another "
            "--workdir"
        )
    return Killed(pid, here and oom_kills() > record.get("oom_kills", 0))


@contextmanager
def occupied(directory: Path) -> Iterator[Killed | None]:
    """This process runs in `directory`, which exists, until the block ends, however it does.

    Yields what `require_free` returns, and raises what it raises.
    """
    before = require_free(directory)
    pid = os.getpid()
    record: dict[str, Any] = {
        "pid": pid, "begun": _begun(pid), "machine": _machine(), "oom_kills": oom_kills(),
    }  # fmt: skip
    write_atomically(directory / _NAME, json.dumps(record).encode())
    try:
        yield before
    finally:
        (directory / _NAME).unlink(missing_ok=True)


def _machine() -> str:
    """This host, since it was last started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _begun(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its id, what it is known by; empty where
    there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
