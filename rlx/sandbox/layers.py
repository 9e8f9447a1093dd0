"""Layers that confine a program; docs/security.md describes each level.

none         limits, own environment and directory
seccomp      + system calls; landlock: + files; bubblewrap: + bwrap's namespaces, shared
namespaces   read-only root and no network; own users, processes and mounts per program; seccomp
"""

import contextlib
import ctypes
import itertools
import math
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from rlx.sandbox import system_calls

LEVELS = ("none", "seccomp", "landlock", "bubblewrap", "namespaces")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/ld.so.cache",
    "/etc/localtime", "/etc/alternatives",
)  # fmt: skip
_MB, _INODES, _NOBODY, _FILES_AT_ONCE = 1 << 20, 4096, 65534, 1000
_END_WITH_PARENT, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 36, 38  # of prctl
_NEW_USER, _NEW_PID, _NEW_MOUNTS, _NEW_OTHERS = 1 << 28, 1 << 29, 1 << 17, 0x4C000000  # of unshare
_NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18  # of mount
_MOUNT_SETATTR, _CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 442, 444, 445, 446  # system calls
# Landlock's rights: execute, read and list; write and read; all for files; make devices.
_READ, _WRITE, _OF_FILES, _MAKE_DEVICES = 0b1101, 0b0110, 0b0111 | 0b11 << 14, 1 << 6 | 1 << 11
_libc = ctypes.CDLL(None, use_errno=True)


def readable() -> list[str]:
    """Return paths that a program may read."""
    places = {*_SYSTEM, sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)} - {"/"}
    return sorted(filter(os.path.exists, places))


class Layers:
    """One of LEVELS: the zygote makes it, keepers `enter` it, programs are in `confine`.

    Each step raises OSError, with a reason, if this machine does not support the level.
    """

    def __init__(self, level: str):
        self._level, self._landlock = level, 0
        if level == "seccomp" and os.geteuid() == 0:
            raise OSError(0, "it does not protect files, which root can all access")
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        if level in ("landlock", "bubblewrap"):
            version = _libc.syscall(_CREATE_RULESET, None, 0, 1)
            self._landlock = _checked("the kernel has no Landlock", version)
        if level == "namespaces":
            self._enter_namespaces()

    def enter(self, limits: Mapping[str, Any]) -> str:
        """Enter the layers of keeper and program; return the program's directory."""
        _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
        with open(os.open("self/statm", os.O_RDONLY, dir_fd=self._proc)) as file:
            self._used = int(file.read().split()[0]) * resource.getpagesize()  # address space
        if self._level != "namespaces":
            return tempfile.mkdtemp(prefix="rlx-sandbox-")
        users, groups = [os.geteuid()], [os.getegid()]
        _checked("unshare", _libc.unshare(_NEW_USER | _NEW_PID | _NEW_MOUNTS))
        self._map("self", users, groups)
        size = f"size={limits['file_mb']}m,nr_inodes={_INODES},mode=700"
        _mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, size)
        return "/tmp"

    def leave(self, directory: str) -> None:
        """Remove the program's directory."""
        if self._level == "namespaces":  # it ended with the last process
            return
        with contextlib.suppress(OSError):
            for entry in itertools.islice(os.scandir(directory), _FILES_AT_ONCE):
                os.unlink(entry)
            return os.rmdir(directory)
        # In the background, because directories may be thousands deep, or without rights.
        command = 'chmod -R u+rwX -- "$0"; exec rm -rf -- "$0"'
        subprocess.Popen(["sh", "-c", command, directory], start_new_session=True)

    def confine(self, limits: Mapping[str, Any], directory: str) -> None:
        """Confine this process, the program, permanently."""
        isolated = self._level == "namespaces"
        values = {
            resource.RLIMIT_AS: self._used + limits["memory_mb"] * _MB, resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: max(1, math.ceil(limits["cpu_seconds"])),
            resource.RLIMIT_FSIZE: limits["file_mb"] * _MB, resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_NOFILE: limits["open_files"],
        }  # fmt: skip
        if isolated:  # the keeper counts too; without namespaces, all the user's processes would
            values[resource.RLIMIT_NPROC] = limits["processes"] + 1
        for name, value in values.items():
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))
        _libc.prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        # No capabilities, of root or in its namespaces; version 3 of the call.
        _checked("capset", _libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
        if self._landlock:
            _restrict_files(self._landlock, directory)
        if self._level != "none":
            system_calls.restrict(isolated=isolated)

    def _map(self, process: str, users: Iterable[int], groups: Iterable[int]) -> None:
        """Map users and groups of a process's new namespace to the same ones outside."""
        lines = ["".join(f"{n} {n} 1\n" for n in numbers) for numbers in (users, groups)]
        for name, text in zip(("setgroups", "uid_map", "gid_map"), ("deny", *lines), strict=True):
            with open(os.open(f"{process}/{name}", os.O_WRONLY, dir_fd=self._proc), "w") as file:
                file.write(text)

    def _enter_namespaces(self) -> None:
        """Move this process to its own namespaces and root; user root becomes nobody."""
        users, groups = {os.geteuid()}, {os.getegid()}
        if root := 0 in users:  # limits do not count root's processes
            os.setgroups([])
            users, groups = {0, _NOBODY}, groups | {_NOBODY}
        ready, go = os.pipe()
        process, status = os.getpid(), 1
        if (child := os.fork()) == 0:  # only a process outside can map two users
            try:
                os.close(go)
                os.read(ready, 1)
                self._map(str(process), users, groups)
                status = 0
            finally:
                os._exit(status)
        result = _libc.unshare(_NEW_USER | _NEW_MOUNTS | _NEW_OTHERS)
        os.close(go)
        _checked("unshare", result)
        if os.waitpid(child, 0)[1]:
            raise OSError(0, "users cannot be mapped")
        _make_root()
        if root:
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            _libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # else only root could write the keepers' maps


def _checked(what: str, result: int) -> int:
    """Return a system call's result; raise OSError if it failed."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() for word in (source, target, kind)]
    _checked(f"mount {target}", _libc.mount(*words, ctypes.c_ulong(flags), options.encode()))


def _make_root() -> None:
    """Move to a root with only the readable files, four devices and /tmp."""
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    root = "/tmp"
    opened = {place: os.open(place, os.O_PATH) for place in (*readable(), *_DEVICES)}
    _mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755")  # hides the opened files
    for place, descriptor in opened.items():
        directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        os.makedirs(root + (place if directory else os.path.dirname(place)), exist_ok=True)
        if not directory:
            os.close(os.open(root + place, os.O_CREAT, 0o644))
        if place not in _DEVICES:
            _mount(f"/proc/self/fd/{descriptor}", root + place, "", _BIND | _RECURSIVE)
    os.symlink("/tmp", f"{root}/dev/shm")  # of semaphores
    os.makedirs(f"{root}/tmp", exist_ok=True)
    # Read-only, no setuid, no devices; `root` at AT_FDCWD, with AT_RECURSIVE.
    changes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
    result = _libc.syscall(_MOUNT_SETATTR, -100, root.encode(), 0x8000, changes, len(changes))
    _checked("mount_setattr", result)
    for place in _DEVICES:
        _mount(f"/proc/self/fd/{opened[place]}", root + place, "", _BIND)
    for descriptor in opened.values():
        os.close(descriptor)
    os.chdir(root)
    _checked("pivot_root", _libc.pivot_root(b".", b"."))
    _checked("umount", _libc.umount2(b".", 2))  # MNT_DETACH
    os.chdir("/")


def _restrict_files(version: int, directory: str) -> None:
    """Restrict this process by Landlock to reading `readable()` and writing `directory`."""
    rights = (1 << 13) - 1 | (version > 1) << 13 | (version > 2) << 14 | (version > 4) << 15
    # TCP from version 4 on, signals and abstract sockets from version 6 on: none of them.
    attributes = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    _checked("landlock_create_ruleset", ruleset)
    allowed = dict.fromkeys(readable(), _READ) | dict.fromkeys(_DEVICES, _WRITE)
    for place, access in (allowed | {directory: rights & ~_MAKE_DEVICES}).items():
        parent = os.open(place, os.O_PATH)
        access &= rights if stat.S_ISDIR(os.fstat(parent).st_mode) else rights & _OF_FILES
        rule = struct.pack("=Qi", access, parent)
        _checked("landlock_add_rule", _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
        os.close(parent)  # the number of open files is limited
    _checked("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, ruleset, 0))
