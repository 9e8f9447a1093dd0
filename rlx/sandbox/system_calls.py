"""Filter a program's system calls by seccomp, with a BPF program.

The filter refuses sockets, memory that no limit counts, and parts of the kernel that no tool needs.
For a program that shares its user with others it also refuses signals, limits, priorities and
changes of files' rights.
"""

import ctypes
import errno
import os
import platform
import re
import struct
from collections.abc import Iterator

# System calls and their numbers on x86_64 and aarch64; 0: none.
_REFUSED = """
    socket 41 198; connect 42 203; bind 49 200; ptrace 101 117; process_vm_readv 310 270
    process_vm_writev 311 271; memfd_create 319 279; memfd_secret 447 447; shmget 29 194
    shmat 30 196; shmctl 31 195; semget 64 190; semop 65 193; semctl 66 191; semtimedop 220 192
    msgget 68 186; msgsnd 69 189; msgrcv 70 188; msgctl 71 187; mq_open 240 180; mount 165 40
    umount2 166 39; pivot_root 155 41; chroot 161 51; unshare 272 97; setns 308 268; bpf 321 280
    perf_event_open 298 241; userfaultfd 323 282; io_uring_setup 425 425; io_uring_enter 426 426
    io_uring_register 427 427; add_key 248 217; request_key 249 218; keyctl 250 219; syslog 103 116
    name_to_handle_at 303 264; open_by_handle_at 304 265; fanotify_init 300 262; kcmp 312 272
    pidfd_open 434 434; pidfd_getfd 438 438; pidfd_send_signal 424 424; process_madvise 440 440
    process_mrelease 448 448; move_pages 279 239; migrate_pages 256 238; open_tree 428 428
    move_mount 429 429; fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick 433 433
    mount_setattr 442 442; inotify_init 253 0; inotify_init1 294 26"""
_REFUSED_AMONG_OTHERS = """
    fork 57 0; vfork 58 0; tkill 200 130; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240
    setpriority 141 140; ioprio_set 251 30; chmod 90 0; fchmod 91 52; fchmodat 268 53
    fchmodat2 452 452; chown 92 0; fchown 93 55; lchown 94 0; fchownat 260 54; setxattr 188 5
    lsetxattr 189 6; fsetxattr 190 7; removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16
    setxattrat 463 463; removexattrat 466 466; utime 132 0; utimes 235 0; futimesat 261 0
    utimensat 280 88; truncate 76 45; file_setattr 469 469"""
_OF_ITSELF_AMONG_OTHERS = """
    kill 62 129; tgkill 234 131; prlimit64 302 261; sched_setaffinity 203 122
    sched_setscheduler 144 119; sched_setparam 142 118; sched_setattr 314 274"""
_CLONE, _CLONE3, _SOCKETPAIR, _FCNTL, _IOCTL = (56, 220), (435, 435), (53, 199), (72, 25), (16, 29)

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEW_NAMESPACES, _THREAD, _STREAM = 0x7E020080, 0x10000, 1  # flags of clone, a type of socket
_NO_FCNTLS = (8, 10, 15, 1024, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # others could change read-only files

_Code = tuple[int, int, int, int]  # BPF: code, jump if true, jump if false, constant
_LOAD, _AND, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = ((_LOAD, 0, 0, place) for place in (0, 4, 16, 24))
_ALLOW, _KILL = (_RETURN, 0, 0, 0x7FFF0000), (_RETURN, 0, 0, 0x80000000)
_REFUSE, _ABSENT = ((_RETURN, 0, 0, 0x00050000 | n) for n in (errno.EPERM, errno.ENOSYS))


def restrict(*, isolated: bool) -> None:
    """Filter the system calls of this process, which has PR_SET_NO_NEW_PRIVS; or raise OSError.

    An `isolated` one has its own users and processes; others cannot start processes.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(0, f"system calls of {platform.machine()} are unknown")
    code = b"".join(struct.pack("HBBI", *each) for each in _program(isolated))
    buffer = ctypes.create_string_buffer(code)  # kept until the kernel has read it
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0):  # PR_SET_SECCOMP, by a filter
        raise OSError(ctypes.get_errno(), "the kernel does not accept a filter")


def _program(isolated: bool) -> Iterator[_Code]:
    column, architecture = _ARCHITECTURES[platform.machine()]
    yield from (_ARCHITECTURE, (_EQUAL, 1, 0, architecture), _KILL)
    yield from (_NUMBER, (_ABOVE, 0, 1, 1 << 30), _KILL)  # the numbers of x32, on x86_64
    for numbers, rule in _rules(isolated):
        if numbers[column]:
            yield (_EQUAL, 0, len(rule), numbers[column])
            yield from rule
    yield _ALLOW


def _rules(isolated: bool) -> Iterator[tuple[tuple[int, ...], list[_Code]]]:
    """Yield the numbers of each restricted call and the code that decides."""
    self_only = [_FIRST, (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, os.getpid()), _REFUSE, _ALLOW]
    among_others = [(_REFUSED_AMONG_OTHERS, [_REFUSE]), (_OF_ITSELF_AMONG_OTHERS, self_only)]
    for text, rule in [(_REFUSED, [_REFUSE]), *(() if isolated else among_others)]:
        for pair in re.findall(r" (\d+) (\d+)", text):
            yield tuple(map(int, pair)), rule
    yield _CLONE3, [_ABSENT]  # its flags are in memory; C libraries then use clone
    bits = (_ANY_BIT, 0, 1, _NEW_NAMESPACES) if isolated else (_ANY_BIT, 1, 0, _THREAD)
    yield _CLONE, [_FIRST, bits, _REFUSE, _ALLOW]
    # A datagram socket could send to any address.
    stream = [(_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _STREAM)]
    yield _SOCKETPAIR, [_SECOND, *stream, _REFUSE, _ALLOW]
    tests = [code for value in _NO_FCNTLS for code in ((_EQUAL, 0, 1, value), _REFUSE)]
    yield _FCNTL, [_SECOND, *tests, _ALLOW]
    tests = [code for value in _IOCTLS for code in ((_EQUAL, 0, 1, value), _ALLOW)]
    yield _IOCTL, [_SECOND, *tests, _REFUSE]
