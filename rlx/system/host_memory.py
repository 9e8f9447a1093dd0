"""Keep freed memory in the process.

A train step allocates one arena of temporaries, hundreds of megabytes, and frees it at the end.
By default glibc hands it back to the kernel, which zeroes and maps every page again in the next
step: a fifth of a small model's step on a CPU, a third of a model's of 135M parameters.
"""

import ctypes

# glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation; call before threads start.

    Returns:
      False where the C library is not glibc; nothing is changed then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One arena, because the arenas of threads cannot hold such blocks; none of them mapped one by
    # one; never trimmed (the largest int would be a limit of 2 GiB, which real models are above).
    done = [mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)]
    return all(done)
