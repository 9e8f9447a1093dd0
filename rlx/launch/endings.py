"""How a process ended, in words. A SIGKILL that nobody sent on purpose is often the kernel's, when
memory has run out: its own count of such kills says so."""

import os
import signal
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
_LESS = "lower fleet.slots, fleet.max_model_len or fleet.num_servers"


def oom_kills(vmstat: Path = _VMSTAT) -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 if unknown."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def peak_memory(pid: int) -> int:
    """Bytes of the most resident memory that a running process has had; 0 if unknown.

    Not what `wait4` says: that begins with the memory of whoever forked it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def words(code: int, peak_bytes: int, *, killed_for_memory: bool = False) -> str:
    """`with status 2`, `by SIGTERM`, and of a SIGKILL the most memory that the process had.

    Args:
      code: as subprocess has it: negative is a signal.
      peak_bytes: its peak resident memory; 0 if unknown.
      killed_for_memory: the kernel ended a process for want of memory while this one ended.
    """
    if code >= 0:
        return f"with status {code}"
    name = signal.Signals(-code).name
    if -code != signal.SIGKILL:
        return f"by {name}"
    peak = f"{peak_bytes / 1e9:.2f} GB" if peak_bytes else "nobody knows how much"
    if not killed_for_memory:
        return f"by {name} at a peak of {peak} of memory"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return (
        f"by {name}, because the machine ran out of memory: it had {peak} of {total:.1f} GB at its "
        f"peak; {_LESS}"
    )
