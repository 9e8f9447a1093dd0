"""Lock a working directory for one process on any host, and report how the last one ended.

WORKDIR/running.json names the process and is locked while the process lives. Hosts that share a
file system may not share its locks. So the process also updates the file's time every BEAT_SECONDS,
and counts as dead after SILENT_SECONDS without an update. A process that was stopped for longer
ends when it finds another one in the file.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.base import UserError, explained
from rlx.system.atomic_directory import try_lock
from rlx.system.exit_reason import oom_kills
from rlx.system.host_agent import start_ticks
from rlx.system.jsonl import read_json

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
_NAME = "running.json"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Killed:
    """The last process in this directory, which was killed."""

    pid: int
    for_memory: bool  # whether the kernel OOM-killed a process since it began

    def __str__(self) -> str:
        why = "probably out of memory" if self.for_memory else "by SIGKILL, or with its machine"
        return f"the last run here (process {self.pid}) was killed, {why}"


def holder(directory: Path) -> tuple[int, bool] | None:
    """Return the last process in a directory that has not left it, and whether it lives."""
    record = read_json(path := directory / _NAME)
    with suppress(OSError, ValueError, KeyError, TypeError):
        pid, start = int(record["pid"]), str(record["begun"])
        if str(record["machine"]) == _machine():
            return pid, start_ticks(pid) == start != ""
        return pid, time.time() - path.stat().st_mtime < SILENT_SECONDS
    return None


def make_directory(path: Path, option: str = "--workdir") -> None:
    """Make a directory unless it exists; raise UserError if that fails."""
    with explained(f"cannot make {path}", f"choose another {option}"):
        path.mkdir(parents=True, exist_ok=True)


def existing(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def fresh_workdir(config_file: str) -> Path:
    """Make and return `runs/<config>-<date>-<time>`, with a number appended if it exists."""
    stem = Path(config_file.split(":", 1)[0]).stem
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in (base, *(Path(f"{base}-{n}") for n in range(1, 1000))):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise UserError(f"{base} and 999 numbered ones exist; give a --workdir")


@contextmanager
def chosen_workdir(workdir: str, config_file: str, fresh: bool = True) -> Iterator[Path]:
    """Yield the directory `workdir`, or a fresh one, which is removed if it stays empty.

    Without `fresh`, for all processes of a run but the first, nothing is made or removed.
    """
    path = fresh_workdir(config_file) if fresh and not workdir else Path(workdir or "runs")
    try:
        yield path
    finally:
        if fresh and not workdir:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def lock_workdir(directory: Path, option: str = "--workdir") -> Iterator[Killed | None]:
    """Lock `directory` for this process, or UserError; yield the last process if it was killed.

    It is made where it is missing, and then removed again if it stays empty. The message of an
    error names the `option` for another directory.
    """
    path, pid, is_new = directory / _NAME, os.getpid(), not directory.exists()
    make_directory(directory, option)
    handle = _locked_file(path, option)
    with ExitStack() as stack:
        stack.callback(os.close, handle)
        before, over = _last(path, handle, option), threading.Event()
        about = {"pid": pid, "begun": start_ticks(pid), "machine": _machine()}
        record = json.dumps({**about, "oom_kills": oom_kills()}).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, record, 0)
        args = (path, handle, record, over)
        threading.Thread(target=_live, args=args, name="heartbeat", daemon=True).start()
        try:
            yield before
        finally:
            over.set()
            with suppress(OSError):
                if path.read_bytes() == record:
                    path.unlink()
                if is_new:
                    directory.rmdir()


def _locked_file(path: Path, option: str) -> int:
    """Return a locked descriptor of the file; make it if it is missing."""
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
            raise _taken_error(path, f"process {read_json(path).get('pid', '?')}", option)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # its owner has ended and removed it between the two calls


def _last(path: Path, handle: int, option: str) -> Killed | None:
    """Return the process named in the file, if any; raise UserError if it may be alive."""
    record = read_json(path)
    try:
        pid, start, machine = int(record["pid"]), str(record["begun"]), str(record["machine"])
        kills = int(record.get("oom_kills", 0))
    except (ValueError, KeyError, TypeError):
        return None
    if _boot(machine) == _boot(_machine()):
        if start_ticks(pid) == start != "":  # the file system may have no locks
            raise _taken_error(path, f"process {pid}", option)
        return Killed(pid, oom_kills() > kills)
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:  # by the clock of the file system
        probe.write_bytes(b"")
        silent = max(0.0, probe.stat().st_mtime - os.fstat(handle).st_mtime)
    finally:
        probe.unlink(missing_ok=True)
    if silent < SILENT_SECONDS:
        who = f"process {pid} of {machine.split(' ')[0]} (alive {silent:.0f} s ago)"
        raise _taken_error(path, who, option, f" ({SILENT_SECONDS:.0f} s if its host has died)")
    return Killed(pid, False)


def _taken_error(path: Path, who: str, option: str, more: str = "") -> UserError:
    remedy = f"wait for its end{more}, end it, or give another {option}"
    return UserError(f"{who} runs in {path.parent}; {remedy}")


def _live(path: Path, handle: int, record: bytes, over: threading.Event) -> None:
    """Update the file's time; end this process if another has taken over the directory."""
    last = time.monotonic()
    while not over.wait(BEAT_SECONDS):
        try:
            content: bytes | None = path.read_bytes()
        except FileNotFoundError:  # another process came and ended, or a user removed it
            content = b"{}" if time.monotonic() - last > SILENT_SECONDS else None
        except OSError:
            continue
        if content not in (None, record, b"") and not over.is_set():
            who, end = "another process", "it ends here and writes nothing more"
            with suppress(ValueError, KeyError, TypeError):
                owner: dict[str, Any] = json.loads(content or b"")
                who = f"process {owner['pid']} of {str(owner['machine']).split(' ')[0]}"
            what = f"{who} has taken over {path.parent} while this process was silent"
            print(f"error: {what}; {end}", file=sys.stderr, flush=True)
            os._exit(2)  # anything else written would overwrite the other process's files
        with suppress(OSError):
            os.utime(handle)
            last = time.monotonic()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _boot(machine: str) -> str:
    """Return the boot id only: hosts and containers may share a name, or change it."""
    return machine.rpartition(" ")[2] or machine
