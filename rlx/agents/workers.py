"""The processes that agents run in, as the gateway's event loop manages them.

run ─▶ the process with the fewest runs ─▶ value, or AgentError
             │ a run does not end when cancelled, or blocks for too long: the process is killed
             ▼ and another is started for the next run
  its other runs are Displaced: they did nothing wrong and are done again
"""

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rlx.base import UserError
from rlx.system.threads import in_thread
from rlx.workers.worker_process import (
    NO_LIMITS,
    StartWorker,
    WorkerHandle,
    WorkerLimits,
    exit_text,
    start_worker,
)

CANCEL_SECONDS = 10.0  # a cancelled run may take to end
_REPORT_SECONDS = 5.0  # a loop is blocked before its process says where
_END_SECONDS = 2.0  # a process may take to end after its input has
_LINE = 16 << 20  # bytes of the longest message of a process


class AgentError(RuntimeError):
    """An agent failed; the message has its reason, and its traceback if it raised."""


class Displaced(Exception):
    """A run's process was killed because of another run in it."""


class Workers:
    """The processes of one agent class; all methods are called on one event loop.

    Args:
      name: of the class, as `loading.load_class` takes it.
      kwargs: of its constructor, JSON.
      count: of processes, ≥ 1; more than one for agents that compute or block.
      block_seconds: how long an agent may keep its process's event loop from turning.
      limits: of each process. start: starts one, here or elsewhere.
      per_run: each run has a process that no other run was or will be in; at most `count` at once.
      no_proxy: the gateway's host, which agents never ask a proxy for.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        count: int = 1,
        *,
        block_seconds: float = 300.0,
        cancel_seconds: float = CANCEL_SECONDS,
        limits: WorkerLimits = NO_LIMITS,
        per_run: bool = False,
        no_proxy: str = "",
        start: StartWorker = start_worker,
    ):
        report = min(_REPORT_SECONDS, block_seconds / 2)
        self._first = {
            "class": name, "kwargs": dict(kwargs), "path": sys.path, "report": report,
            "no_proxy": no_proxy,
        }  # fmt: skip
        self._block_seconds, self._cancel_seconds = block_seconds, cancel_seconds
        self._limits, self._start = limits, start
        self._processes: list[_Process | None] = [None] * max(1, count)
        self._places = asyncio.Semaphore(max(1, count)) if per_run else None
        self._alone: set[_Process] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes and wait until the class is loaded in each.

        Raises:
          UserError: it cannot be loaded.
        """
        if self._places:
            async with self._own_process():
                return
        await asyncio.gather(*(self._process(i) for i in range(len(self._processes))))

    async def run(
        self, data: Mapping[str, Any], base_url: str, api_key: str, seconds: float | None = None
    ) -> Any:
        """Return what `run` of a new agent returns for `data`: a float or {completion id: float}.

        Cancelling it cancels the agent; after `seconds` it fails, at the line where it waits.

        Raises:
          AgentError: the agent raised, or its process died.
          Displaced: its process was killed because of another run.
          UserError: `data` cannot be sent.
        """
        number = secrets.token_hex(16)  # another run cannot report under it by counting
        message = {"id": number, "data": data, "base_url": base_url, "api_key": api_key}
        try:
            line = json.dumps({**message, "seconds": seconds})
        except (TypeError, ValueError) as error:
            raise UserError(
                f"a row cannot be given to an agent, {error}; rows are JSON: {str(data)[:120]}"
            ) from None
        if self._places:
            async with self._places, self._own_process() as process:
                return await process.run(number, line)
        index = min(range(len(self._processes)), key=self._load)
        process = await self._process(index)
        return await process.run(number, line)

    async def close(self) -> None:
        """End the processes, busy or not."""
        self._closed = True
        await asyncio.gather(*(p.close() for p in [*self._processes, *self._alone] if p))

    def _load(self, index: int) -> int:
        process = self._processes[index]
        return len(process.runs) if process else 0

    @contextlib.asynccontextmanager
    async def _own_process(self) -> AsyncIterator["_Process"]:
        """Provide a process for one run."""
        process = self._new()
        self._alone.add(process)
        try:
            await process.ready()
            yield process
        finally:
            await process.close()
            self._alone.discard(process)

    def _new(self) -> "_Process":
        if self._closed:
            raise AgentError("the agents' processes are closed")
        return _Process(
            self._first, self._block_seconds, self._cancel_seconds, self._limits, self._start
        )

    async def _process(self, index: int) -> "_Process":
        process = self._processes[index]
        if process is None or process.over:
            process = self._processes[index] = self._new()
        await process.ready()
        return process


class _Process:
    """One process and the runs in it."""

    def __init__(
        self, first: Mapping[str, Any], block_seconds: float, cancel_seconds: float,
        limits: WorkerLimits, start: StartWorker,
    ):  # fmt: skip
        self.runs: dict[str, asyncio.Future] = {}
        self.over = False
        self._block_seconds, self._cancel_seconds = block_seconds, cancel_seconds
        self._blocked = ""  # the line that its loop was last blocked at
        self._killed: Exception | None = None  # raised by its other runs
        self._limits, self._start = limits, start
        self._kept: WorkerHandle | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._live(first))

    async def ready(self) -> None:
        """Wait until it takes runs; raise why it does not."""
        await asyncio.shield(self._ready)

    async def run(self, number: str, line: str) -> Any:
        """Send a run and wait for its value."""
        if self.over:
            raise Displaced
        future = self.runs[number] = asyncio.get_running_loop().create_future()
        self._send(line)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                self._cancel(number)
            raise

    async def close(self) -> None:
        """End it, busy or not."""
        self._killed = self._killed or Displaced()
        if not self.over and self._writer and not self._writer.is_closing():
            self._writer.write_eof()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._main), _END_SECONDS)
        if not self._main.done():
            self._main.cancel()
        await asyncio.gather(self._main, return_exceptions=True)

    async def _live(self, first: Mapping[str, Any]) -> None:
        """Start the process, read its messages, and clean up however it ends."""
        code = None
        try:
            self._kept, own = self._start("rlx.agents.worker", self._limits)
            reader, self._writer = await asyncio.open_connection(sock=own, limit=_LINE)
            self._send(json.dumps(first))
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._hear(json.loads(line))
            code = await in_thread(self._kept.end, _END_SECONDS)
        except OSError as error:
            self._killed = AgentError(f"cannot start a process for agents: {error}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._killed = AgentError(f"the agent's process said what is no message: {error!r}")
        finally:
            self.over = True
            if self._kept:
                self._kept.stop()
            if self._writer:  # before whatever can be cancelled, and without what nobody reads
                self._writer.transport.abort()
            try:
                if self._kept:
                    await in_thread(self._kept.end)
            finally:
                self._end(code)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "ready" in message or "wrong" in message:
            if "wrong" in message and not self._ready.done():
                self._ready.set_exception(UserError(str(message["wrong"])))
            elif not self._ready.done():
                self._ready.set_result(None)
        elif "blocked" in message:
            self._blocked = message["blocked"]
            if message["seconds"] > self._block_seconds:
                self._kill(AgentError(
                    f"an agent blocked the event loop for {message['seconds']:.0f} s and its "
                    f"process was killed; it was at {self._blocked}"
                ))  # fmt: skip
        elif (future := self.runs.pop(message["id"], None)) and not future.done():
            if "value" in message:
                future.set_result(message["value"])
            else:
                trace = f"\n{message['traceback']}" if message["traceback"] else ""
                future.set_exception(AgentError(message["error"] + trace))

    def _cancel(self, number: str) -> None:
        self.runs[number].cancel()
        self._send(json.dumps({"cancel": number}))

        def late() -> None:
            if number in self.runs and not self.over:
                self._kill(Displaced())

        asyncio.get_running_loop().call_later(self._cancel_seconds, late)

    def _kill(self, reason: Exception) -> None:
        self._killed = self._killed or reason
        if self._kept:
            self._kept.stop()

    def _end(self, code: int | None) -> None:
        """Let every run that was in it raise why it ended."""
        where = f"; it was last blocked at {self._blocked}" if self._blocked else ""
        died = AgentError(f"the agent's process {exit_text(code, self._limits)}{where}")
        for future in [*self.runs.values(), self._ready]:
            if not future.done():
                future.set_exception(self._killed or died)
                future.exception()  # a run that was cancelled does not look
        self.runs.clear()

    def _send(self, line: str) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(line.encode() + b"\n")
