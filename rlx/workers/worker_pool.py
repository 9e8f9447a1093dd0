"""Run jobs in worker processes that can be killed, from one event loop.

    job ─▶ the worker with the fewest jobs ─▶ progress …, then the job's last message
                │ a job takes too long, or does not end when it is cancelled: the worker is killed
                ▼ and another is started for the next job
      its other jobs raise Evicted: they did nothing wrong and can be done again

Both sides write lines of JSON.

    in    {"path": sys.path, …} first; then {"id", …} begins a job and {"cancel": id} stops one
    out   {"id": "", "ready": …} or {"id": "", "wrong": text} first; then of a job
          {"id", "progress": […]} and, last, {"id", …}; {"blocked": place, "seconds": s} while a job
          keeps the event loop from turning
"""

import asyncio
import contextlib
import json
import math
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.base import UserError
from rlx.system.process_supervisor import TOO_MANY
from rlx.system.threads import in_thread
from rlx.workers import worker_process
from rlx.workers.worker_process import NO_LIMITS, StartWorker, WorkerHandle, WorkerLimits

_END_SECONDS = 2.0  # a worker may take to end after its socket has
_LINE = 16 << 20  # bytes of the longest message of a worker
_Progress = Callable[..., None]
_Message = Mapping[str, Any]


class WorkerError(RuntimeError):
    """A worker process ended; the message says how."""


class Evicted(Exception):
    """A worker process was killed because of another job in it."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """The common properties of a pool's workers."""

    module: str  # each runs `python -m MODULE N`, which talks by a `WorkerEnd`
    first: _Message  # first message to each, with `sys.path` added
    limits: WorkerLimits = NO_LIMITS  # of each
    start: StartWorker = worker_process.start_worker  # starts one, here or on another machine
    block_seconds: float = math.inf  # how long a job may keep the worker's event loop from turning
    cancel_seconds: float = 10.0  # how long a cancelled job may take to end


class WorkerProcess:
    """One worker process from its start to its end, and the jobs in it."""

    def __init__(self, kind: WorkerKind):
        self.ended = False  # whether it takes no more jobs
        self._kind, self._blocked = kind, ""
        self._hello: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs: dict[str, tuple[asyncio.Future, _Progress]] = {}
        self._jobs[""] = self._hello, lambda *_: None
        self._reason: Exception | None = None  # why it was killed
        self._process: WorkerHandle | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._main = asyncio.create_task(self._live())

    async def ready(self) -> Any:
        """Return its first message's `ready`; UserError if the user's code cannot be loaded."""
        message = await asyncio.shield(self._hello)
        if "wrong" in message:
            self.kill()  # the next one may find a corrected file
            raise UserError(str(message["wrong"]))
        return message["ready"]

    async def run_job(self, job: _Message, progress: _Progress = lambda *_: None) -> _Message:
        """Return a job's last message, or raise WorkerError, Evicted; `progress` gets others."""
        if self.ended:
            raise Evicted("the worker process has ended")
        number = secrets.token_hex(16)  # another job cannot report under it by counting
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._jobs[number] = future, progress
        self._send({**job, "id": number})
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                future.cancel()
                self._send({"cancel": number})
                loop.call_later(self._kind.cancel_seconds, self._kill_if_left, number)
            raise

    def kill(self, reason: Exception | None = None) -> None:
        """Kill it with all that it started; its jobs raise `reason`, or else how it ended."""
        self._reason = self._reason or reason
        self.ended = True
        if self._process:
            self._process.stop()

    async def close(self, patience: float) -> None:
        """End it, busy or not, within about `patience` seconds."""
        try:
            if self._writer and not self.ended:
                self._writer.write_eof()
                await asyncio.wait([self._main], timeout=patience)
        finally:
            self.kill(WorkerError("the worker process was closed"))
        await asyncio.wait([self._main])

    def _kill_if_left(self, number: str) -> None:
        if number in self._jobs:
            self.kill(Evicted())

    async def _live(self) -> None:
        """Start the process, read its messages, and clean up however it ends."""
        code, kind = None, self._kind
        try:
            if self.ended:
                return
            self._process, sock = kind.start(kind.module, kind.limits)
            reader, self._writer = await asyncio.open_connection(sock=sock, limit=_LINE)
            self._send({**kind.first, "path": sys.path})
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._receive(json.loads(line))
            code = await in_thread(self._process.end, _END_SECONDS)
        except OSError as error:
            self.kill(WorkerError(f"cannot start a worker process: {error}"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.kill(WorkerError(f"the worker process sent a wrong message: {error!r}"))
        finally:
            self.kill()
            if self._writer:  # before whatever can be cancelled, and without what nobody reads
                self._writer.transport.abort()
            try:
                if self._process:
                    await in_thread(self._process.end)
            finally:
                self._end(code)

    def _receive(self, message: _Message) -> None:
        if "blocked" in message:
            self._blocked = message["blocked"]
            if message["seconds"] > self._kind.block_seconds:
                self.kill(WorkerError(
                    "the worker process was killed: a job blocked the event loop for "
                    f"{message['seconds']:.0f} s; it was at {self._blocked}"
                ))  # fmt: skip
        elif "progress" in message:
            self._jobs[message["id"]][1](*message["progress"])
        elif message["id"] in self._jobs:
            future, _ = self._jobs.pop(message["id"])
            if not future.done():
                future.set_result(message)

    def _end(self, code: int | None) -> None:
        """Let all jobs that are left raise why the process ended."""
        died, most = f"died (exit code {code})", self._kind.limits.max_processes
        if code == TOO_MANY and most:
            died = f"was ended: it had more than max_processes={most}"
        elif self._blocked:
            died += f"; it was last blocked at {self._blocked}"
        reason = self._reason or WorkerError(f"the worker process {died}")
        for future, _ in self._jobs.values():
            if not future.done():
                future.set_exception(reason)
                future.exception()  # so that asyncio does not log it
        self._jobs.clear()

    def _send(self, message: _Message) -> None:
        if self._writer and not self.ended:
            self._writer.write(json.dumps(message).encode() + b"\n")


class WorkerPool:
    """Processes of one kind, `count` ≥ 1; a dead one is replaced when the next job comes."""

    def __init__(
        self, kind: WorkerKind, count: int, *,
        exclusive: bool = False,  # a job's process has no other job at that time
        single_job: bool = False,  # a job's process never has another job
        patience: float = _END_SECONDS,  # for busy processes, in `close`
    ):  # fmt: skip
        self._kind, self._single_job, self._patience = kind, single_job, patience
        self._workers: list[WorkerProcess | None] = [None] * max(1, count)
        self._loads = [0] * len(self._workers)
        self._places = asyncio.Semaphore(len(self._workers)) if exclusive or single_job else None
        self._closed = False

    async def start(self) -> None:
        """Start all processes, or one where each job has its own; wait, and raise, as `ready`."""
        if self._single_job:
            async with self.worker() as worker:
                await worker.ready()
        else:
            workers = [self._worker(i) for i in range(len(self._workers))]
            await asyncio.gather(*(worker.ready() for worker in workers))

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[WorkerProcess]:
        """Provide the process with the fewest jobs, which may not be ready yet."""
        async with self._places or contextlib.nullcontext():
            index = self._loads.index(min(self._loads))
            worker = self._worker(index)
            self._loads[index] += 1
            try:
                yield worker
            finally:
                try:
                    if self._single_job:
                        await worker.close(self._patience)
                finally:
                    self._loads[index] -= 1

    async def close(self) -> None:
        """End the processes, busy or not."""
        self._closed = True
        await asyncio.gather(*(w.close(self._patience) for w in self._workers if w))

    def _worker(self, index: int) -> WorkerProcess:
        """Return the process at a place, a new one where the last has ended."""
        if self._closed:
            raise WorkerError("the worker process was closed")
        worker = self._workers[index]
        if worker is None or worker.ended:
            worker = self._workers[index] = WorkerProcess(self._kind)
        return worker
