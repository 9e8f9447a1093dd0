"""A virtual clock, and gRPC calls between simulated processes over connections that fail.

Client and service are those of rlx. Only the transport, the clock and the engine are not:
Member ─▶ Channel, Call ─▶ Wire, a delay ─▶ RolloutService ─▶ Engine
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from rlx.engines.server_metrics import Meters
from rlx.engines.service import RolloutService
from rlx.fleet.requests import Chunk, EngineStatus, Request

_METERS = Meters()
_CHUNK = 3  # tokens


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """An event loop that jumps to the time of its next timer; threads run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.failures, self._turns, self._selector = 0.0, list[str](), 0, self
        self.set_exception_handler(self._failed)

    def _failed(self, _: Any, about: dict[str, Any]) -> None:
        """Note an exception that nobody awaits; the first one ends the simulation."""
        self.failures.append(repr(about.get("exception") or about))
        if len(self.failures) == 1:
            self.stop()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def select(self, timeout: float | None) -> tuple[()]:
        """Take the place of the loop's selector, which would wait for sockets."""
        assert timeout is not None, f"every task waits and no timer is set, at {self.now:.2f} s"
        self.now += timeout
        self._turns = 0 if timeout else self._turns + 1
        assert self._turns < 200, f"it does not end, at {self.now:.2f} s"
        return ()

    def _process_events(self, events: tuple[()]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: Any, function: Callable, *args: Any) -> asyncio.Future:
        """Call `function` now."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Wire:
    """One direction of a connection: delivers in order, late, and not while its link is held."""

    def __init__(self, link: "Link"):
        self._link, self.queue = link, deque[tuple]()

    def send(self, function: Callable, *args: Any) -> None:
        """Call `function` at the other end."""
        self.queue.append((self._link.loop.now + self._link.delay(), function, args))
        if len(self.queue) == 1:
            self._link.loop.call_at(self.queue[0][0], self._deliver)

    def _deliver(self) -> None:
        now = self._link.loop.now
        while self.queue and max(self.queue[0][0], self._link.held_until) <= now:
            _, function, args = self.queue.popleft()
            function(*args)
        if self.queue:
            self._link.loop.call_at(max(self.queue[0][0], self._link.held_until), self._deliver)


class Link:
    """A server and the way to it; `held_until` delays all that is sent, `slowness` multiplies."""

    def __init__(self, loop: VirtualLoop, draw: random.Random, directory: str):
        self.loop, self.draw, self._directory = loop, draw, directory
        self.slowness, self.held_until = 1.0, 0.0
        self.channels: dict[Channel, None] = {}  # in order
        self.service: RolloutService | None = None
        self.tasks: dict[asyncio.Task, None] = {}  # of the server's process
        self.start()

    def delay(self) -> float:
        """Return the seconds of one message on its way; a few take long."""
        seconds = self.draw.uniform(0.001, 0.02) * self.slowness
        return seconds * 20 if self.draw.random() < 0.02 else seconds

    def start(self) -> None:
        """Start the server with its first weights, unless it runs."""
        self.service = self.service or RolloutService(
            Engine(self), weight_roots=[self._directory], stage_dir=self._directory,
            meters=_METERS, clock=lambda: int(self.loop.now * 1e9), say=lambda text: None,
        )  # fmt: skip

    def kill(self) -> None:
        """End the server; no client hears of it before it sends something."""
        for task in (*self.tasks, *(self.service._installs if self.service else ())):
            task.cancel()
        self.service = None

    def cut(self) -> None:
        """Break every connection; the server notices later."""
        for call in [call for channel in self.channels for call in channel.calls]:
            call.fail(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class Channel:
    """A client's connection to a server, and its stub."""

    def __init__(self, link: Link):
        self.link, self.calls = link, dict[Call, None]()
        self.there, self.back = Wire(link), Wire(link)
        link.channels[self] = None

    def __getattr__(self, method: str) -> Callable:
        return lambda request, timeout, metadata: Call(self, method, request, timeout)

    async def close(self) -> None:
        """Cancel all calls."""
        self.link.channels.pop(self, None)
        for call in tuple(self.calls):
            call.cancel()


class Refusal(Exception):
    """A status other than OK."""


class Call:
    """A call in flight: for the client an awaitable or a stream, for the service its context."""

    def __init__(self, channel: Channel, method: str, request: Any, timeout: float):
        self._channel, self._method, self._request = channel, method, request
        self._loop, self._replies = channel.link.loop, asyncio.Queue[Any]()
        self._task: asyncio.Task | None = None  # at the server
        self.over = False
        late = grpc.StatusCode.DEADLINE_EXCEEDED, "late"
        self._timer = self._loop.call_later(timeout, self.fail, *late)
        channel.calls[self] = None
        channel.there.send(self._begin)

    def invocation_metadata(self) -> tuple:
        """Return no metadata, as of a client without traces."""
        return ()

    def time_remaining(self) -> float:
        return max(0.0, self._timer.when() - self._loop.time())

    def _begin(self) -> None:
        link = self._channel.link
        if not link.service:
            refused = grpc.StatusCode.UNAVAILABLE, "Connection refused"
            self._channel.back.send(self.fail, *refused)
        elif not self.over:
            self._task = self._loop.create_task(self._serve(link.service))
            link.tasks[self._task] = None
            self._task.add_done_callback(link.tasks.pop)

    async def _serve(self, service: RolloutService) -> None:
        try:
            reply = await getattr(service, self._method)(self._request, self)
            await self.write(StopAsyncIteration() if reply is None else reply)
        except Refusal as error:
            self._channel.back.send(self.fail, *error.args)

    async def write(self, reply: Any) -> None:
        """Send a reply to the client."""
        self._channel.back.send(self.receive, reply)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status."""
        raise Refusal(code, details)

    def receive(self, reply: Any) -> None:
        """Take a reply; gRPC drops one that comes after the end."""
        if not self.over:
            self._replies.put_nowait(reply)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status other than OK, as the client sees it."""
        nothing = grpc.aio.Metadata()
        self._end(grpc.aio.AioRpcError(code, nothing, nothing, details))

    def cancel(self) -> None:
        """End the call at the client's wish."""
        self._end(asyncio.CancelledError())

    def _end(self, error: BaseException) -> None:
        if not self.over:
            self.receive(error)
            self.over = True
            self._timer.cancel()
            self._channel.calls.pop(self, None)
            self._channel.there.send(lambda: self._task and self._task.cancel())

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        reply = await self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def _single(self) -> Any:
        try:
            return await anext(self)
        finally:
            self.cancel()

    def __await__(self) -> Any:
        return self._single().__await__()


def answer(seed: int, index: int) -> list[int]:
    """Return the tokens of a sample, 1 to 6."""
    return [(seed * 31 + index * 17 + k * 7) % 97 + 3 for k in range((seed // 7 + index) % 6 + 1)]


def logprob(weights: int) -> float:
    """Return the log-probability of each token under these weights."""
    return -(1 + weights) / 64


class Engine:
    """Each token is a function of (seed, index, position), each logprob of the weights."""

    def __init__(self, link: Link):
        self._draw, self._version, self._weights, self._running = link.draw, 0, 0, 0
        self._loading = asyncio.Lock()

    async def load(self, path: str, version: int, kv: str) -> int:
        """Take the weights of a path, for which no token is made meanwhile."""
        async with self._loading:
            await asyncio.sleep(self._draw.uniform(0.0, 0.1))
            self._weights, self._version = int(path), version
        return 0

    def status(self) -> EngineStatus:
        """Return its state."""
        return EngineStatus(self._version, self._running, 0, 8, 64, 0, self._loading.locked())

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield chunks until each sample has its length."""
        indices = range(request.first_index, request.first_index + request.n)
        left = {i: answer(request.sampling.seed or 0, i)[request.prefix_len :] for i in indices}
        self._running += request.n
        try:
            while left:
                await asyncio.sleep(self._draw.uniform(0.01, 0.15))
                async with self._loading:
                    pass
                for index, tokens in tuple(left.items()):
                    made, left[index] = tokens[:_CHUNK], tokens[_CHUNK:]
                    about = [logprob(self._weights)] * len(made), [self._version] * len(made)
                    yield Chunk(index, made, *about, None if left[index] else "stop")
                    if not left[index]:
                        del left[index]
        finally:
            self._running -= request.n
