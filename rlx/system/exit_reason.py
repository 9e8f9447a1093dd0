"""Say how a process ended, and whether the kernel killed it because memory ran out.

An OOM kill is a SIGKILL like any other; the kernel's own count of them tells it apart.
"""

import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlx.system import available_memory

_VMSTAT = Path("/proc/vmstat")
_LESS = "lower fleet.slots, fleet.max_model_len or fleet.num_servers"
_DYING_SECONDS = 15.0  # between the kernel's kill and the end of a process with much memory
_MEMORY = re.compile(  # how an engine's last lines say it
    "out of memory|OutOfMemory|RESOURCE_EXHAUSTED|Cannot allocate memory|bad_alloc|MemoryError|"
    "illegal memory access|CPU swap space|KV cache",
    re.IGNORECASE,
)


def oom_kills(vmstat: Path = _VMSTAT) -> int:
    """Return how many processes the kernel has OOM-killed since boot; 0 if unknown."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class OomKills:
    """Watches the kernel's count of OOM kills, to tell whether one was recent.

    A process lives for a moment after the kernel has counted its kill, so its end is compared with
    counts of some seconds ago.
    """

    def __init__(
        self, count: Callable[[], int] = oom_kills, clock: Callable[[], float] = time.monotonic
    ):
        self._count, self._clock = count, clock
        self._seen = [(clock(), count())]

    def look(self) -> None:
        """Record the count; call it about every second."""
        now = self._clock()
        if now - self._seen[-1][0] < 1:
            return
        self._seen.append((now, self._count()))
        while len(self._seen) > 1 and now - self._seen[1][0] >= _DYING_SECONDS:
            self._seen.pop(0)

    def lately(self) -> bool:
        """Return whether there was an OOM kill since the oldest count kept."""
        return self._count() > self._seen[0][1]


def peak_memory(pid: int) -> int:
    """Return the peak resident memory of a running process, bytes; 0 if unknown.

    `wait4` does not do: its peak includes the memory of the process that forked it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def words(code: int, peak_bytes: int, *, killed_for_memory: bool = False) -> str:
    """Return `with status 2`, `by SIGTERM`, and for a SIGKILL the process's peak memory.

    Args:
      code: of subprocess: negative is a signal.
      peak_bytes: its peak resident memory; 0 if unknown.
      killed_for_memory: the kernel OOM-killed a process while this one ended.
    """
    if code >= 0:
        return f"with status {code}"
    name = signal.Signals(-code).name
    if -code != signal.SIGKILL:
        return f"by {name}"
    peak = f"{peak_bytes / 1e9:.2f} GB" if peak_bytes else "nobody knows how much"
    if not killed_for_memory:
        return f"by {name} at a peak of {peak} of memory"
    there = available_memory.memory()
    return (
        f"by {name}, because memory ran out: it had {peak} at its peak, of "
        f"{there.total / 1e9:.1f} GB {there.where}; {_LESS}"
    )


def last_words(lines: Sequence[str]) -> str:
    """Return what an engine wrote last, and what to change where its lines mention memory.

    Args:
      lines: of its log; empty ones and the ready line are skipped.
    """
    said = [x.strip() for x in lines if x.strip() and not x.startswith('{"port"')]
    if not said:
        return ""
    last = said[-1].removeprefix("error: ")
    short = next((x for x in reversed(said[-40:]) if _MEMORY.search(x)), "")
    if not short or any(word in last for word in ("fleet.slots", "fleet.max_model_len")):
        return last
    cause = last if short == said[-1] else f"{short[:300]} … {last}"
    return f"{cause.rstrip('.')}; {_LESS}"
