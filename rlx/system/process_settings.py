"""Process settings: import path, die with the parent, keep memory private, keep freed memory."""

import ctypes
import mmap
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

HOME = str(Path(__file__).parents[2])  # the directory that contains rlx, maybe a clone's
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def python_path() -> str:
    """Return this environment's PYTHONPATH, after the directory that contains rlx."""
    return os.pathsep.join(filter(None, (HOME, os.environ.get("PYTHONPATH"))))


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, SIGKILL included."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def keep_private() -> None:
    """Keep other processes of this user from reading our memory and environment."""
    # Root still can. We lose /proc/self/mem, environ and io.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, in huge pages; return whether it does.

    Call it before threads start.
    """
    # A train step frees hundreds of megabytes at its end. By default the kernel zeroes and maps
    # these pages again in the next step. On a CPU that is a fifth of a small model's step, and a
    # third of a 135M-parameter model's.
    libc = ctypes.CDLL(None)
    mallopt = libc.mallopt
    # One arena, because threads' arenas cannot hold such blocks; no block has its own mapping;
    # never trimmed (the largest int would be a limit of 2 GiB, which real models exceed).
    keeps = all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)])
    if keeps:
        _ask_for_huge_pages(libc)
    return keeps


def _ask_for_huge_pages(libc: Any) -> None:
    """Ask the kernel for huge pages in the heap, where its addresses are not limited."""
    # In huge pages a small model's step takes 0.93 times the seconds. The kernel gives them where
    # a program asks for them, so the heap grows once, by addresses that have no memory yet.
    size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
    free = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    with suppress(OSError):  # 2: addresses count as used
        free &= Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(size)) if free else None
    if block:
        start = ctypes.c_void_p(block + -block % mmap.PAGESIZE)
        libc.madvise(start, ctypes.c_size_t(size - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))
