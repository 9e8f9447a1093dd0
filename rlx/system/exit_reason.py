"""Describe how a process ended, and whether the kernel killed it because it ran out of memory."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rlx.system import available_memory

_LESS = "lower fleet.slots, fleet.max_model_len or fleet.num_servers"
_DYING_SECONDS = 15.0  # between the kernel's kill and the end of a process with much memory
_MEMORY = re.compile(  # in the last lines of an engine's log
    "out of memory|OutOfMemory|RESOURCE_EXHAUSTED|Cannot allocate memory|bad_alloc|MemoryError|"
    "illegal memory access|CPU swap space|KV cache",
    re.IGNORECASE,
)


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has OOM-killed since boot; 0 if unknown."""
    return _number(vmstat, "oom_kill ")


class OomKills:
    """Detects recent OOM kills by the kernel's count, as an OOM kill looks like any SIGKILL."""

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
        # Not the newest count: a process ends some seconds after its kill is counted.
        return self._count() > self._seen[0][1]


def peak_memory(pid: int) -> int:
    """Return the peak resident memory of a running process, bytes; 0 if unknown."""
    # The peak that `wait4` reports includes the memory of the process that forked it.
    return _number(Path(f"/proc/{pid}/status"), "VmHWM:") * 1024


def _number(path: Path, name: str) -> int:
    """Return the number after `name` in a file of /proc; 0 if unknown."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


def words(code: int, peak_bytes: int, *, killed_for_memory: bool = False) -> str:
    """Describe the end of a process by its code in subprocess: `with status 2`, `by SIGKILL …`."""
    if code >= 0:
        return f"with status {code}"
    name = signal.Signals(-code).name
    if -code != signal.SIGKILL:
        return f"by {name}"
    peak = f"{peak_bytes / 1e9:.2f} GB" if peak_bytes else "an unknown amount"
    if not killed_for_memory:
        return f"by {name} at a peak of {peak} of memory"
    limit = available_memory.memory()
    most = f"of {limit.total / 1e9:.1f} GB {limit.where}"
    return f"by {name}, because memory ran out: it had {peak} at its peak, {most}; {_LESS}"


# The ready line of a server, and lines of faulthandler's stacks.
_NOT_WORDS = ('{"port"', '  File "', "Thread 0x", "Current thread 0x", "Stack (most")


def last_words(lines: Sequence[str]) -> str:
    """Return the last line of an engine's log, and a remedy if its last lines mention memory."""
    lines = [x.strip() for x in lines if x.strip() and not x.startswith(_NOT_WORDS)]
    last = lines[-1].removeprefix("error: ") if lines else ""
    about_memory = next((x for x in reversed(lines[-40:]) if _MEMORY.search(x)), "")
    if not about_memory or any(word in last for word in ("fleet.slots", "fleet.max_model_len")):
        return last
    cause = last if about_memory == lines[-1] else f"{about_memory[:300]} … {last}"
    return f"{cause.rstrip('.')}; {_LESS}"
