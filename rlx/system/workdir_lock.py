"""Lock a working directory for one process on any host, and say how the last one ended.

WORKDIR/running.json names the process and is locked while it lives: the kernel releases the lock
whatever ends the process, so that on one host nothing has to be guessed. Hosts that share a file
system may not share its locks: for them the process gives a sign of life, the file's time, every
BEAT_SECONDS. After SILENT_SECONDS without one it counts as dead. One that was only stopped finds
another process in the file when it continues, and ends.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.system.atomic_directory import try_lock
from rlx.system.exit_reason import oom_kills
from rlx.system.host_agent import begun as begun_at
from rlx.system.jsonl import read_json

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # the staleness limit, for other hosts
_NAME = "running.json"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Killed:
    """The process that was killed in this directory before.

    Attributes:
      for_memory: the kernel has killed a process for want of memory since it began.
    """

    pid: int
    for_memory: bool

    def __str__(self) -> str:
        why = (
            "and the kernel has killed for want of memory since it began"
            if self.for_memory
            else "by SIGKILL, or with its machine"
        )
        return f"the run before (process {self.pid}) was ended without a word, {why}"


def make_directory(path: Path, option: str = "--workdir") -> None:
    """Make a directory where there is none; raise UserError where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}; choose another {option}") from error


def fresh_workdir(config_file: str) -> Path:
    """Make and return `runs/<config>-<date>-<time>`, with a number appended when that exists.

    It is made at once, so that no other run that starts at the same moment gets it.
    """
    stem = Path(config_file.split(":", 1)[0]).stem
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in (base, *(Path(f"{base}-{n}") for n in range(1, 1000))):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise UserError(f"{base} and a thousand behind it exist; give a --workdir")


@contextmanager
def chosen_workdir(given: str, config_file: str, fresh: bool = True) -> Iterator[Path]:
    """Yield the directory given, or a fresh one, which goes again where nothing was begun in it.

    Args:
      fresh: whether one is made at all; else it is `runs`.
    """
    path = fresh_workdir(config_file) if fresh and not given else Path(given or "runs")
    try:
        yield path
    finally:
        if fresh and not given:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def occupied(
    directory: Path, option: str = "--workdir", beat: float = BEAT_SECONDS
) -> Iterator[Killed | None]:
    """Hold `directory`, which exists, for this process until the block ends.

    Args:
      option: by which a user gives another directory, for the error.
      beat: seconds between two updates of the file's time.

    Yields:
      How the last process in `directory` ended, where it was killed.

    Raises:
      UserError: another process runs in it.
    """
    path, pid = directory / _NAME, os.getpid()
    handle = _locked(path, option)
    try:
        before = _last(path, handle, option)
        record = json.dumps(
            {"pid": pid, "begun": begun_at(pid), "machine": _machine(), "oom_kills": oom_kills()}
        ).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, record, 0)
        ended = threading.Event()
        arguments = (path, handle, record, ended, beat)
        threading.Thread(target=_live, args=arguments, name="sign of life", daemon=True).start()
        try:
            yield before
        finally:
            ended.set()
            with suppress(OSError):
                if path.read_bytes() == record:
                    path.unlink()
    finally:
        os.close(handle)


def _locked(path: Path, option: str) -> int:
    """Return a locked descriptor of the file, which is made where there is none."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            free = try_lock(handle)
        except OSError as error:
            free = error.errno in _NO_LOCKS
            if not free:
                os.close(handle)
                raise
        if not free:
            os.close(handle)
            raise _taken(path, f"process {read_json(path).get('pid', '?')}", option)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # its owner has ended and removed it between the two calls


def _last(path: Path, handle: int, option: str) -> Killed | None:
    """Return how the process named in the file ended; raise UserError where it may live."""
    record = read_json(path)
    try:
        pid, begun, machine = int(record["pid"]), str(record["begun"]), str(record["machine"])
        kills = int(record.get("oom_kills", 0))
    except (ValueError, KeyError, TypeError):
        return None
    if _boot(machine) == _boot(_machine()):
        if begun_at(pid) == begun != "":  # where the file system has no locks
            raise _taken(path, f"process {pid}", option)
        return Killed(pid, oom_kills() > kills)
    silent = _silence(path, handle)
    if silent < SILENT_SECONDS:
        who = f"process {pid} of {machine.split(' ')[0]} (alive {silent:.0f} s ago)"
        raise _taken(path, who, option, f", or {SILENT_SECONDS:.0f} s where its host has died")
    return Killed(pid, False)


def _silence(path: Path, handle: int) -> float:
    """Return the seconds since the file was written, by the clock of its file system."""
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        probe.write_bytes(b"")
        return max(0.0, probe.stat().st_mtime - os.fstat(handle).st_mtime)
    finally:
        probe.unlink(missing_ok=True)


def _taken(path: Path, who: str, option: str, more: str = "") -> UserError:
    return UserError(
        f"{who} runs in {path.parent}; wait for its end{more}, end it, or give another {option}"
    )


def _live(path: Path, handle: int, record: bytes, ended: threading.Event, beat: float) -> None:
    """Update the file's time; end the process where another has taken the directory over."""
    last = time.monotonic()
    while not ended.wait(beat):
        try:
            found: bytes | None = path.read_bytes()
        except FileNotFoundError:  # of one who came and went; or a user has removed it
            found = b"{}" if time.monotonic() - last > SILENT_SECONDS else None
        except OSError:
            continue
        if found not in (None, record, b"") and not ended.is_set():
            print(
                f"error: {_who(found)} has taken {path.parent} over while this process gave no "
                "sign of life; it ends here, and leaves everything as it is",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(2)  # a word more on the disk would be written over the other's
        with suppress(OSError):
            os.utime(handle)
            last = time.monotonic()


def _who(record: bytes | None) -> str:
    with suppress(ValueError, KeyError, TypeError):
        other: dict[str, Any] = json.loads(record or b"")
        return f"process {other['pid']} of {str(other['machine']).split(' ')[0]}"
    return "another process"


def _machine() -> str:
    """Return the host's name and the id of its boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _boot(machine: str) -> str:
    """Return the boot id alone: hosts and containers may share a name, or change it."""
    return machine.rpartition(" ")[2] or machine
