"""How a process ended, in words. A SIGKILL that nobody sent on purpose is often the kernel's, when
memory has run out: its own count of such kills says so."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlx.launch import available_memory

_VMSTAT = Path("/proc/vmstat")
_LESS = "lower fleet.slots, fleet.max_model_len or fleet.num_servers"
_DYING_SECONDS = 15.0  # between the kernel's kill and the end of a process with much memory
_MEMORY = re.compile(  # how an engine's last lines say it
    "out of memory|OutOfMemory|RESOURCE_EXHAUSTED|Cannot allocate memory|bad_alloc|MemoryError|"
    "illegal memory access|CPU swap space|KV cache",
    re.IGNORECASE,
)


def oom_kills(vmstat: Path = _VMSTAT) -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 if unknown."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class OomKills:
    """Whether the kernel has killed for want of memory lately.

    A process goes on for a moment after the kernel has counted its kill, so counts of some seconds
    ago are what its end is compared with.
    """

    def __init__(
        self, count: Callable[[], int] = oom_kills, clock: Callable[[], float] = time.monotonic
    ):
        self._count, self._clock = count, clock
        self._seen = [(clock(), count())]

    def look(self) -> None:
        """Takes note of the count; to be called now and then."""
        now = self._clock()
        if now - self._seen[-1][0] < 1:
            return
        self._seen.append((now, self._count()))
        while len(self._seen) > 1 and now - self._seen[1][0] >= _DYING_SECONDS:
            self._seen.pop(0)

    def lately(self) -> bool:
        """Whether there was one since the oldest count kept."""
        return self._count() > self._seen[0][1]


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
    there = available_memory.memory()
    return (
        f"by {name}, because memory ran out: it had {peak} at its peak, of "
        f"{there.total / 1e9:.1f} GB {there.where}; {_LESS}"
    )


def last_words(lines: Sequence[str]) -> str:
    """What an engine wrote last, and what to change where its lines speak of memory.

    Args:
      lines: of its log; empty ones and the line that said it was ready are passed over.
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
