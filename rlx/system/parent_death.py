"""Process settings of servers and workers: die with the parent, keep memory private.

Imported before anything heavy.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, SIGKILL included.

    Args:
      parent_pid: of the process that started us; if it is gone already, we exit at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def keep_private() -> None:
    """Keep other processes of this user from reading our memory and environment.

    Root still can, and we ourselves read all of /proc/self but `mem`, `environ` and `io`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
