"""Sandbox for code that a model wrote: tools, rewards that execute answers, agents.

    async with Sandbox(workers=8, preload=("math", "numpy")) as sandbox:
        outcome = await sandbox.run("print(2**100)", ProgramLimits(wall_seconds=5.0))

    Sandbox ── a socket a call ──▶ zygote (warm interpreter) ─fork▶ keeper ─fork▶ program
                                   └ zygote.py: confined         └ limits, cut  └ the code

If a call's socket closes, because the caller is cancelled or killed, the keeper ends the program
and its processes. A user's own sandbox class has `__aenter__`, `run` and `__aexit__`.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rlx.base import UserError, unknown
from rlx.cli import user_code
from rlx.option import option
from rlx.sandbox.layers import LEVELS, readable
from rlx.system.threads import in_thread

Status = Literal["ok", "error", "timeout", "cpu", "memory", "output", "lost"]
_ROOM = Path(__file__).parent
_START_SECONDS = 120.0  # for a zygote's imports on a loaded machine
_PATIENCE_SECONDS = 60.0  # for an answer after a program's time limit
_END_SECONDS = 1.0  # a killed process closes its sockets before it has ended


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one call, MiB and seconds."""

    wall_seconds: float = 10.0  # from the program's start
    cpu_seconds: float = 10.0  # of each process; rounded up to full seconds
    memory_mb: int = 512  # address space of each process, in addition to the interpreter's
    output_bytes: int = 1 << 16  # standard output kept: the first and the last half
    output_mb: int = 16  # a program that prints more is ended
    processes: int = 16  # and threads; level namespaces only, others allow threads only
    open_files: int = 64  # of each process
    file_mb: int = 64  # of each file it writes; in namespaces, of all its files


DEFAULT_LIMITS = ProgramLimits()


class SandboxLost(ConnectionError):
    """A sandbox cannot run programs now, which says nothing about them: the attempt fails."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one call."""

    # "ok": exit status 0; "error": another status, or a signal; "timeout", "cpu", "memory" or
    # "output": a limit; "lost", which `run` raises: the sandbox could not run it, or was killed.
    status: Status
    text: str  # standard output; says how much was cut
    error: str  # last line of standard error, such as `ValueError: no`; "" if ok
    seconds: float  # wall time


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """The `sandbox` section of a config."""

    kind: str = option("local", "or FILE.py:Class, module:Class: your own")
    require: str = option("landlock", "weakest one accepted: see docs/security.md", LEVELS)
    workers: int = option(0, "programs at once in each process with a sandbox; 0: its cores", "0")

    def __post_init__(self):
        if self.require not in LEVELS:
            raise unknown("sandbox.require", self.require, LEVELS)

    def make(self, preload: Sequence[str] = ()) -> Any:
        """Return a sandbox, not yet entered; raise UserError if there is no class `kind`."""
        kind = user_code.find("sandbox.kind", self.kind, {"local": Sandbox})
        options: dict[str, Any] = {"require": self.require} if kind is Sandbox else {}
        return kind(workers=self.workers, preload=preload, **options)


class Sandbox:
    """Runs Python code in confined processes, each forked from a warm interpreter."""

    def __init__(
        self,
        workers: int = 0,  # concurrent calls; 0: number of cores
        preload: Sequence[str] = (),  # modules that every program has imported, if installed
        require: str = "landlock",  # weakest acceptable one of LEVELS
        strongest: str = LEVELS[-1],  # strongest one tried
    ):
        self._workers = workers or len(os.sched_getaffinity(0))
        self._preload, self._require, self._strongest = tuple(preload), require, strongest
        self.level = ""  # the current one of LEVELS, once entered
        self.notes = dict[str, str]()  # stronger level → why it is not available

    async def __aenter__(self) -> Self:
        """Start the interpreter; raise UserError if the machine does not support `require`."""
        self._turns, self._starting = asyncio.Semaphore(self._workers), asyncio.Lock()
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop()

    async def run(self, code: str, limits: ProgramLimits = DEFAULT_LIMITS) -> Outcome:
        """Run `code` in an empty directory, or raise SandboxLost; cancelling this ends it."""
        async with self._turns:
            process, outcome = self._process, await self._ask(code, limits)
            if outcome.status == "lost":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await in_thread(process.wait, _END_SECONDS)
                async with self._starting:
                    if self._process is process and process.poll() is not None:
                        self._stop()
                        with contextlib.suppress(UserError):  # the next call tries again
                            await self._start()
                outcome = await self._ask(code, limits)
        if outcome.status == "lost":
            raise SandboxLost(f"the sandbox could not run a program: {outcome.error}")
        return outcome

    async def _ask(self, code: str, limits: ProgramLimits) -> Outcome:
        ours, theirs = socket.socketpair()
        request = json.dumps({"code": code, "limits": asdict(limits)}).encode()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        reply = b""
        try:
            with contextlib.suppress(OSError):  # its process was killed, or is starting
                with theirs:
                    socket.send_fds(self._control, [b"call"], [theirs.fileno()])
                writer.write(request)
                writer.write_eof()
                async with asyncio.timeout(limits.wall_seconds + _PATIENCE_SECONDS):
                    reply = await reader.read()
        finally:
            writer.close()
        with contextlib.suppress(ValueError):  # for a reply that is empty or cut
            return Outcome(**json.loads(reply))
        return Outcome("lost", "", "its own process was killed", 0.0)

    async def _start(self) -> None:
        """Start a zygote of the strongest level that works."""
        self.notes, weakest = {}, LEVELS.index(self._require)
        for level in reversed(LEVELS[weakest : LEVELS.index(self._strongest) + 1]):
            try:
                await in_thread(self._launch, level)
                trial = await self._ask("", ProgramLimits(wall_seconds=_START_SECONDS))
                if trial.status == "ok":
                    self.level = level
                    return
                self._stop()
                self.notes[level] = trial.error
            except FileNotFoundError as error:
                self._control.close()
                self.notes[level] = f"{error.filename} is not installed"
        problem = f"sandbox.require={self._require} is not available here: {self.notes}"
        remedy = f"allow what is missing, or require less of {', '.join(LEVELS)}"
        raise UserError(f"{problem}; {remedy}")

    def _launch(self, level: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P, -s and our own environment isolate as -I does, but keep PYTHONHASHSEED.
        command = [sys.executable, "-sPB", "-m", "rlx.sandbox.zygote", str(theirs.fileno()), level]
        with theirs:
            self._process = subprocess.Popen(
                [*(_box() if level == "bubblewrap" else []), *command, ",".join(self._preload)],
                env=_environment(), pass_fds=(theirs.fileno(),), start_new_session=True, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def _stop(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def _box() -> list[str]:
    """Return the arguments that start a zygote's command in bwrap."""
    places = [*readable(), str(_ROOM), str(_ROOM.parent / "__init__.py")]
    binds = [word for place in places for word in ("--ro-bind", place, place)]
    options = "--unshare-all --new-session --cap-drop ALL --setenv TMPDIR /tmp --tmpfs /tmp"
    return ["bwrap", *options.split(), *binds, "--dev", "/dev", "--proc", "/proc"]


def _environment() -> dict[str, str]:
    """Return the environment of the interpreter and, without PYTHONPATH, of its programs."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": tempfile.gettempdir(),
        "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONPATH": str(_ROOM.parents[1]),
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), **threads,
    }  # fmt: skip
