"""A sandbox for code that a model wrote: tools, rewards that execute answers, agents that ask.

    async with Sandbox(workers=8, preload=("math", "numpy")) as sandbox:
        outcome = await sandbox.run("print(2**100)", ProgramLimits(wall_seconds=5.0))

    Sandbox ── a socket a call ──▶ zygote (warm interpreter) ─fork▶ keeper ─fork▶ program
                                   └ zygote.py: confined         └ limits, cut  └ the code

The socket is a call's only tie: request in, answer out, and when it closes, because the caller was
cancelled or killed, the keeper ends the program and all that it started. `layers.py` says which
layers confine a program, and docs/security.md what each holds. What takes a Sandbox's place, a
remote one say, has the same three functions: `__aenter__`, `run`, `__aexit__`.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rlx.base import UserError, unknown
from rlx.cli import user_code
from rlx.sandbox.layers import LEVELS

Status = Literal["ok", "error", "timeout", "cpu", "memory", "output", "lost"]
_HOME = str(Path(__file__).parents[2])
_START_SECONDS = 120.0  # a zygote's start and imports; generous, for a loaded machine
_PATIENCE_SECONDS = 60.0  # for an answer, after a program's time is over
_ZYGOTE = "rlx.sandbox.zygote"
_BOOT = (  # rlx may be imported from a clone, which no program gets to see
    "import importlib, sys; sys.path.insert(0, sys.argv[1]); "
    "zygote = importlib.import_module(sys.argv[2]); del sys.path[0]; zygote.main(*sys.argv[3:])"
)


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """ProgramLimits of one call.

    Attributes:
      wall_seconds: from its start to its end, waiting for a free worker left out.
      cpu_seconds: of each of its processes; whole seconds, rounded up.
      memory_mb: MiB of address space of each process, beyond what the interpreter has.
      output_bytes: of standard output that are kept, first half and last half.
      output_mb: MiB printed, above which it is ended.
      processes: and threads, it and all that it starts; where its level lets it start any.
      open_files: descriptors of each process.
      file_mb: MiB of a file that it writes, and in namespaces of all its files together.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 512
    output_bytes: int = 1 << 16
    output_mb: int = 16
    processes: int = 16
    open_files: int = 64
    file_mb: int = 64


DEFAULT_LIMITS = ProgramLimits()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call.

    Attributes:
      status: "ok": it ended with exit status 0; "error": with another, or by a signal; "timeout",
        "cpu", "memory", "output": by that limit; "lost": the sandbox itself was killed.
      text: its standard output, and where something was cut, how much.
      error: the last line of its standard error, as `ValueError: no`; empty when "ok".
      seconds: wall time from its start to its end.
    """

    status: Status
    text: str
    error: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """The `sandbox` section of a config.

    Attributes:
      kind: "local", or FILE.py:Class, module:Class: made as Sandbox is, with workers and preload.
      require: of LEVELS; the weakest acceptable.
      workers: calls at once; 0: as many as there are cores.
    """

    kind: str = "local"
    require: str = "none"
    workers: int = 0

    def __post_init__(self):
        if self.require not in LEVELS:
            raise unknown("sandbox.require", self.require, LEVELS)

    def make(self, preload: Sequence[str] = ()) -> Any:
        """Return a sandbox that has not been entered; UserError where `kind` names nothing."""
        if self.kind == "local":
            return Sandbox(self.workers, preload, self.require)
        kind = user_code.find("sandbox.kind", self.kind, {"local": Sandbox})
        return kind(workers=self.workers, preload=preload)


class Sandbox:
    """Runs Python code in confined processes, each forked from a warm interpreter.

    Args:
      workers: calls at once; further ones wait. 0: as many as there are cores.
      preload: modules that every program finds imported; those that are not installed are left out.
      require: the weakest of LEVELS that is acceptable.
      strongest: the strongest of LEVELS that is tried.

    Attributes:
      level: that of LEVELS which holds once it is entered.
      notes: why each stronger one does not.
    """

    def __init__(
        self,
        workers: int = 0,
        preload: Sequence[str] = (),
        require: str = "none",
        strongest: str = LEVELS[-1],
    ):
        self._workers = workers or len(os.sched_getaffinity(0))
        self._preload, self._require, self._strongest = tuple(preload), require, strongest
        self.level = ""
        self.notes: Mapping[str, str] = {}

    async def __aenter__(self) -> Self:
        """Start the interpreter; UserError where the machine offers less than `require`."""
        self._turns, self._starting = asyncio.Semaphore(self._workers), asyncio.Lock()
        await asyncio.to_thread(self._start)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the interpreter, and with it every program."""
        await asyncio.to_thread(self._stop)

    async def run(self, code: str, limits: ProgramLimits = DEFAULT_LIMITS) -> Outcome:
        """Run `code` as a program of its own, from an empty directory; return what became of it.

        To cancel it ends the program.
        """
        async with self._turns:
            reply = await self._ask(code, limits)
            if not reply and self._process.poll() is not None:  # it may have died long ago
                reply = await self._ask(code, limits)
        if not reply:
            return Outcome("lost", "", "the sandbox's own process was killed", 0.0)
        return Outcome(**json.loads(reply))

    async def _ask(self, code: str, limits: ProgramLimits) -> bytes:
        """Return the keeper's answer, empty where it or the zygote died."""
        async with self._starting:
            if self._process.poll() is not None:
                await asyncio.to_thread(self._start)
        ours, theirs = socket.socketpair()
        request = json.dumps({"code": code, "limits": asdict(limits)}).encode()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                socket.send_fds(self._control, [b"call"], [theirs.fileno()])
            writer.write(len(request).to_bytes(8) + request)
            async with asyncio.timeout(limits.wall_seconds + _PATIENCE_SECONDS):
                return await reader.read()
        except (ConnectionError, TimeoutError):
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"preload": self._preload, "strongest": self._strongest}
        with theirs:
            # With an environment of ours alone, -sP isolates as -I does, and hashes can be fixed.
            python = [sys.executable, "-sPB", "-X", "utf8", "-c", _BOOT, _HOME, _ZYGOTE]
            self._process = subprocess.Popen(
                [*python, str(theirs.fileno()), json.dumps(options)], env=_environment(),
                pass_fds=(theirs.fileno(),), start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, cwd="/",
            )  # fmt: skip
        self._control.settimeout(_START_SECONDS)
        try:
            hello = json.loads(self._control.recv(1 << 16))
        except (TimeoutError, ConnectionError, ValueError):
            self._stop()
            raise UserError(
                "the sandbox's interpreter did not start; see the lines above"
            ) from None
        self.level, self.notes = hello["level"], hello["notes"]
        if LEVELS.index(self.level) < LEVELS.index(self._require):
            self._stop()
            raise UserError(refusal(self._require, self.level, self.notes))

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def refusal(require: str, level: str, notes: Mapping[str, str]) -> str:
    """Return the line that says why a machine's level is not enough, and what to do."""
    why = "; ".join(f"{name}: {note}" for name, note in notes.items())
    return (
        f"sandbox.require={require}, and this machine confines programs by {level!r} ({why}); "
        f"allow it what is missing, or accept less by sandbox.require={level}"
    )


def _environment() -> dict[str, str]:
    """Return all that the interpreter and its programs see."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
        "HOME": "/tmp", "TMPDIR": tempfile.gettempdir(), **threads, **kept,
    }  # fmt: skip
