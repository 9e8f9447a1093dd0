"""A sandbox on other machines, over ssh: `far_end` there starts the local one, and forks as here.

    run ─▶ the least busy host ─▶ ssh (one for each host) ─▶ far_end ─▶ Sandbox ─▶ program

rlx has to be installed there. A connection's end is the end of all its programs.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rlx.base import Unavailable, UserError
from rlx.sandbox.far_end import LINE_BYTES
from rlx.sandbox.sandbox import DEFAULT_LIMITS, Outcome, ProgramLimits

# It asks for nothing, and takes a host that is silent for 15 s for dead.
_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none",
)  # fmt: skip
_START_SECONDS = 600.0  # to connect, and for each level tried there


class SshSandbox:
    """Runs Python code in sandboxes of other machines; like Sandbox but for where.

    Args:
      hosts: as ssh names them, `user@host`. workers: calls at once on each; 0: its cores.
      preload, require: as Sandbox, for each host.
      ssh: its command with options, as "ssh -F FILE". python: of the hosts; "": this one's path.
    """

    def __init__(
        self, hosts: Sequence[str], workers: int = 0, preload: Sequence[str] = (),
        require: str = "landlock", ssh: str = "ssh", python: str = "",
    ):  # fmt: skip
        options = {"workers": workers, "preload": [*preload], "require": require}
        self._hosts = [_Host(host, ssh, python or sys.executable, options) for host in hosts]

    @property
    def level(self) -> dict[str, str]:
        """Return the level that holds on each host."""
        return {host.name: host.level for host in self._hosts}

    async def __aenter__(self) -> Self:
        """Start the far ends; UserError where a host is not to be had, or offers too little."""
        try:
            async with asyncio.TaskGroup() as group:
                for host in self._hosts:
                    group.create_task(host.connected())
        except* UserError as errors:
            await self.__aexit__()
            raise errors.exceptions[0] from None
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections; what runs there ends."""
        for host in self._hosts:
            await host.close()

    async def run(self, code: str, limits: ProgramLimits = DEFAULT_LIMITS) -> Outcome:
        """Run `code` on a host; where its connection is lost, once more, there or elsewhere.

        To cancel it ends the program.

        Raises:
          Unavailable: no host is left.
        """
        hosts, errors = list(self._hosts), list[str]()
        while hosts:
            host = min(hosts, key=lambda host: (host.dead, host.busy / host.workers))
            hosts.remove(host)
            for _ in range(2):
                try:
                    return await host.run(code, limits)
                except ConnectionError:  # which is made anew, once
                    error = f"no sandbox on {host.name}: the connection was lost twice"
                except UserError as dead:
                    error = str(dead)
                    break
            errors.append(error)
        raise Unavailable(" | ".join(errors))


class _Host:
    """A host and the connection to it."""

    def __init__(self, name: str, ssh: str, python: str, options: dict[str, Any]):
        home = Path(__file__).parents[2]  # that rlx runs from
        far = ["env", f"PYTHONPATH={home}", python, "-P", "-m", "rlx.sandbox.far_end"]
        self._command = [*shlex.split(ssh), *_OPTIONS, name, "--", shlex.join(far)]
        self.name, self._ssh, self._options = name, ssh, options
        self.level, self.workers, self.busy, self.dead = "", 1, 0, False
        self._starting, self._numbers = asyncio.Lock(), itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._stdin: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task | None = None
        self._asked: dict[int, asyncio.Future] = {}

    async def run(self, code: str, limits: ProgramLimits) -> Outcome:
        """Run one program; ConnectionError where the connection is lost meanwhile."""
        self.busy += 1
        try:
            stdin, number = await self.connected(), next(self._numbers)
            answer = self._asked[number] = asyncio.get_running_loop().create_future()
            try:
                await _write(stdin, {"call": number, "code": code, "limits": asdict(limits)})
                return Outcome(**await answer)
            except asyncio.CancelledError:
                with contextlib.suppress(OSError):
                    stdin.write(json.dumps({"call": number}).encode() + b"\n")
                raise
            finally:
                self._asked.pop(number, None)
        finally:
            self.busy -= 1

    async def connected(self) -> asyncio.StreamWriter:
        """Return what the far end reads, which is started where it does not run."""
        async with self._starting:
            if self._process is None or self._reading is None or self._reading.done():
                await self.close()
                await self._connect()
        assert self._stdin
        return self._stdin

    async def _connect(self) -> None:
        try:
            self.dead = True
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, limit=LINE_BYTES,
                start_new_session=True,  # Ctrl-C is for us, not for ssh
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(f"there is no {self._command[0]} here; install it") from None
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        errors = asyncio.create_task(_last_line(stderr))
        found: dict[str, Any] = {}
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                await _write(stdin, self._options)
                # A shell may greet first.
                while not found and (line := await stdout.readline()):
                    if line.startswith(b'{"sandbox": '):
                        found = json.loads(line)["sandbox"]
        if "level" not in found:
            await self.close()
            said = found.get("error") or await errors or "no answer"
            raise UserError(
                f"no sandbox on {self.name}: {said}" if "error" in found else
                f"no sandbox on {self.name}: {said}; `{self._ssh} {self.name} true` must work "
                "without a password, and the Python of sandbox.python must have rlx there"
            )  # fmt: skip
        self.level, self.workers, self.dead = found["level"], found["workers"], False
        self._stdin, self._reading = stdin, asyncio.create_task(self._read(stdout, errors))

    async def _read(self, stdout: asyncio.StreamReader, errors: asyncio.Task) -> None:
        """Hand out answers until the connection ends, and then the loss to all that wait."""
        try:
            while line := await stdout.readline():
                found = json.loads(line)
                if (answer := self._asked.get(found["call"])) and not answer.done():
                    answer.set_result(found["outcome"])
        finally:
            errors.cancel()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError(self.name))

    async def close(self) -> None:
        """End the connection."""
        process, self._process = self._process, None
        if self._reading:
            self._reading.cancel()
        if process:
            if process.returncode is None:  # process.kill() may reap it before asyncio, which warns
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            await process.wait()


async def _write(stdin: asyncio.StreamWriter, what: Any) -> None:
    stdin.write(json.dumps(what).encode() + b"\n")
    await stdin.drain()


async def _last_line(stream: asyncio.StreamReader) -> str:
    """Return the last line of a stream, once it has ended."""
    last = b""
    async for line in stream:
        last = line.strip() or last
    return last.decode(errors="replace")
