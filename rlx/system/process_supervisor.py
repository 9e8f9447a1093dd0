"""A program that runs one command and, when either ends, kills all processes the command started.

    process_supervisor.py PARENT MEMORY_BYTES MAX_PROCESSES COMMAND…    stdin: a pipe from PARENT

    PARENT ── stdin ──▶ supervisor (subreaper) ──▶ command (own session) ──▶ children, daemons, …
                             ▲                                                   │ orphaned
                             └───────────────────────────────────────────────────┘

The kernel gives all orphaned descendants to the supervisor. When the command ends, stdin closes, or
PARENT is gone, the supervisor kills the rest. It ends with the command's status or signal, and with
TOO_MANY if the command had more than MAX_PROCESSES processes. To start in milliseconds, it imports
the standard library only.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterable

TOO_MANY = 97
_PDEATHSIG, _CAPBSET_DROP, _SUBREAPER = 1, 24, 36  # of prctl
# CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON: with any of them root reads other processes' memory.
_TRACING = (19, 21, 38)
_POLL_SECONDS = 0.25
_END_SECONDS = 5.0  # then give up on processes that cannot be killed


def main(parent: int, memory: int, most: int, *command: str) -> int:
    """Run `command` until it or this program must end; return its wait status."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        _become(libc, supervisor, memory, command)
    for fd in map(int, os.listdir("/proc/self/fd")):  # the command has its own copies
        if fd > 2 and fd not in (wake, woken):
            with contextlib.suppress(OSError):  # already closed: that of the listing
                os.close(fd)
    reaped: dict[int, int] = {}
    while child not in reaped and not signals and os.getppid() == parent:
        ready, _, _ = select.select([0, wake], [], [], _POLL_SECONDS)
        if 0 in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
        _reap(reaped, child)
        if most and child not in reaped and len(descendants(supervisor)) > most:
            reaped[child] = TOO_MANY << 8
    _end_all(supervisor, reaped, child)
    return reaped.get(child, signal.SIGKILL)


def _become(libc: ctypes.CDLL, supervisor: int, memory: int, command: tuple[str, ...]) -> None:
    """Replace this forked process by the command; never return."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for capability in _TRACING:
            libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        if os.getppid() == supervisor:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
    finally:
        os._exit(127)


def _reap(reaped: dict[int, int], child: int) -> bool:
    """Reap ended processes, recording the child's status; return whether any process is left."""
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            if result[0] == child:
                reaped.setdefault(*result)
        return True
    return False


def _end_all(supervisor: int, reaped: dict[int, int], child: int) -> None:
    """Kill every descendant, repeatedly, because they may fork meanwhile."""
    end = time.monotonic() + _END_SECONDS
    while _reap(reaped, child) and time.monotonic() < end:
        for pid in descendants(supervisor):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all descendants of process `ancestor`, children first."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    pids = list(children.get(ancestor, []))
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def ask_for_stacks(pids: Iterable[int]) -> None:
    """Have those processes that catch SIGUSR1 write the stacks of their threads to stderr."""
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
            if int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                os.kill(pid, signal.SIGUSR1)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL's effect cannot be changed
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
