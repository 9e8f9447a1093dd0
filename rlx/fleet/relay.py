"""Relayed publishing: servers send verified weights to further servers while they receive.

    trainer ─▶ first servers ─▶ servers below each ─▶ …      `parts` says who sends to whom

A `Route` is the trainer's side for one server, `Incoming` the side of a server with others below.
Such a server reads its own file, so a slow receiver takes no memory and delays no other. A server
that joins later gets the file that another one has kept.
The trainer itself sends to a server that does not get the weights from another one.
"""

import asyncio
import os
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc

from rlx.base import UserError
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet import tls as transport
from rlx.fleet import wire
from rlx.fleet.publish import Weights
from rlx.system.threads import in_thread

APART = 10  # publishes by the trainer itself, after a server did not get one from another server
_SLACK_SECONDS, _POLL_SECONDS, _END_SECONDS = 2.0, 0.05, 0.01
_TOKEN = "authorization"

Calls = dict[asyncio.Timeout, Any]  # of running calls, and what each is about


def parts(servers: Any, fanout: int) -> list[Any]:
    """Cut a sequence of servers into at most `fanout` parts of nearly equal size.

    The sender sends to the first server of each part, which has to reach the others of its part.
    """
    count = min(fanout, len(servers))
    ends = [len(servers) * k // count for k in range(count + 1)] if count else []
    return [servers[start:end] for start, end in pairwise(ends)]


class Route:
    """The way of one publish to one server: from the trainer, or from another server."""

    def __init__(self, server: pb.RelayServer, goal: tuple[int, int]):
        self.server, self.goal = server, goal  # version and checksum of the weights
        self.relay: pb.PublishRelay | None = None  # of a first server: what it has to reach
        self.below: Sequence[Route] = ()
        # The server's reply; or why the trainer has to send to it. Of a first server only a reply.
        self.result: asyncio.Future[Any] = asyncio.Future()
        self.here = False  # whether the server has shown that it has the weights
        self.blamed = False  # whether it gets the next publishes from the trainer
        # Stands for the reply of a server that has them and did not reply.
        self.assumed = pb.PublishReply(version=goal[0], replaced_version=server.version)
        self.assumed.replaced_crc32 = server.crc32

    def settle(self, reply: pb.PublishReply | str) -> None:
        """Take the server's reply, or the reason for none, for it and for the servers below."""
        replies = {} if isinstance(reply, str) else {each.address: each for each in reply.relayed}
        if not self.result.done() and not (self.relay and isinstance(reply, str)):
            self.result.set_result(reply)
        for route in self.below:
            if not route.result.done():
                result = replies.get(route.server.address)
                route.blamed = result is not None and bool(result.error)
                reason = reply if isinstance(reply, str) else "it was not passed on"
                route.result.set_result((result.error or result.reply) if result else reason)

    def expire(self) -> None:
        """Do not wait for a reply any more, except for one that servers below still need."""
        if not self.here:
            self.blamed = True
            self.settle("it came too slowly")
        elif not self.relay or all(route.result.done() for route in self.below):
            self.result.set_result(self.assumed)


def routes(
    servers: Sequence[pb.RelayServer], fanout: int, goal: tuple[int, int], ca: bytes = b""
) -> list[Route]:
    """Return a route for each of `servers`, in order; a server stands before those below it."""
    plan = [Route(server, goal) for server in servers]
    spans = [range(len(plan))]
    for span in spans:  # which grows
        for head, *below in parts(span, fanout):
            plan[head].below = plan[head + 1 : head + 1 + len(below)]
            if span is spans[0]:
                receivers = [servers[k] for k in below]
                plan[head].relay = pb.PublishRelay(below=receivers, fanout=fanout, ca=ca)
            spans.append(range(head + 1, head + 1 + len(below)))
    return plan


async def hurry(plan: Sequence[Route]) -> None:
    """Let nobody wait for a server that takes over twice as long as the first one."""
    start = time.monotonic()
    while not any(route.here or route.result.done() for route in plan):
        await asyncio.sleep(_POLL_SECONDS)
    await asyncio.sleep(time.monotonic() - start + _SLACK_SECONDS)
    while True:  # until cancelled
        for route in plan:  # a server before those below it
            if not route.result.done():
                route.expire()
        await asyncio.sleep(_POLL_SECONDS)


class Incoming:
    """The messages of one publish; what is verified of them also goes to the servers below."""

    def __init__(self, requests: AsyncIterator, context: Any, tls: transport.Tls | None):
        self._requests, self._call, self._tls = requests, context, tls
        self.calls: list[asyncio.Task[list[pb.Relayed]]] = []  # to the servers below
        self._ends: list[tuple[int, int]] = []  # offset after each chunk, checksum up to there
        self._news, self._file = asyncio.Event(), -1

    def __aiter__(self) -> AsyncIterator[pb.PublishRequest]:
        return self._requests

    def begin(self, header: pb.PublishHeader) -> None:
        """Connect to the servers below."""
        relay = header.relay
        for to, *below in parts(relay.below, relay.fanout):
            copy = pb.PublishHeader()
            copy.CopyFrom(header)
            place = pb.PublishRelay(to=to, below=below, fanout=relay.fanout, ca=relay.ca)
            copy.relay.CopyFrom(place)
            self.calls.append(asyncio.create_task(self._send(copy)))

    def verified(self, path: str, end: int, crc32: int) -> None:
        """Send the bytes of `path` up to `end`, which have this checksum, as one more chunk."""
        if self.calls and self._file < 0:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._ends.append((end, crc32))
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def pass_on(self, header: pb.PublishHeader, path: str) -> pb.PublishReply:
        """Send a file that is on this disk, and was not sent here, to the servers below."""
        self._file, crc = os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0
        self.begin(header)
        for offset in range(0, header.num_bytes, wire.PUBLISH_CHUNK_BYTES):
            data = await in_thread(os.pread, self._file, wire.PUBLISH_CHUNK_BYTES, offset)
            crc = await in_thread(zlib.crc32, data, crc)
            self.verified(path, offset + len(data), crc)
        return pb.PublishReply(version=header.version, relayed=await self.results())

    async def results(self) -> list[pb.Relayed]:
        """Return the results of all servers below that are known about."""
        if self.calls:
            await asyncio.wait(self.calls)
        tasks = [task for task in self.calls if not task.cancelled() and not task.exception()]
        return [result for task in tasks for result in task.result()]

    async def aclose(self) -> None:
        """End the calls that are left."""
        for task in self.calls:
            task.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def _send(self, header: pb.PublishHeader) -> list[pb.Relayed]:
        address, ca = header.relay.to.address, header.relay.ca
        metadata = tuple(pair for pair in self._call.invocation_metadata() if pair[0] == _TOKEN)
        tls = (self._tls or transport.Tls()) if ca else None
        try:
            transport.check_address(address, metadata[0][1] if metadata else None, tls)
            async with transport.channel(address, tls, ca) as channel:
                reply = await rpc.RolloutStub(channel).Publish(
                    self._chunks(header), timeout=self._call.time_remaining(), metadata=metadata
                )
        except (grpc.aio.AioRpcError, UserError) as error:
            call = isinstance(error, grpc.aio.AioRpcError)
            return [pb.Relayed(address=address, error=wire.describe(error) if call else str(error))]
        below = [*reply.relayed]
        del reply.relayed[:]
        return [pb.Relayed(address=address, reply=reply), *below]

    async def _chunks(self, header: pb.PublishHeader) -> AsyncIterator[pb.PublishRequest]:
        yield pb.PublishRequest(header=header)
        offset = index = 0
        size = header.delta.num_bytes if header.HasField("delta") else header.num_bytes
        while offset < size:
            while index == len(self._ends):
                await self._news.wait()
            end, crc32 = self._ends[index]
            data = await in_thread(os.pread, self._file, end - offset, offset)
            yield pb.PublishRequest(chunk=pb.PublishChunk(offset=offset, data=data, crc32=crc32))
            offset, index = end, index + 1


@asynccontextmanager
async def ended_early(calls: Calls, what: Any, message: str) -> AsyncIterator[None]:
    """Enter the block in `calls`, about `what`; RequestError with `message` if `end` ends it."""
    try:
        async with asyncio.timeout(None) as limit:
            calls[limit] = what
            yield
    except TimeoutError:
        raise wire.RequestError(grpc.StatusCode.ABORTED, message) from None
    finally:
        del calls[limit]


def end(calls: Iterable[asyncio.Timeout]) -> None:
    """End running calls, unless they are ending already."""
    for limit in calls:
        if limit.when() is None:
            limit.reschedule(0)


class KeptFile:
    """A server's file of its weights, kept for the next delta and for servers that join."""

    def __init__(self) -> None:
        self.weights: Weights | None = None
        self.passing: Calls = {}  # with the weights that each sends

    def replace(self, weights: Weights | None) -> None:
        """Keep these weights, and remove the file of those before."""
        if self.weights:
            self.weights.close()
        self.weights = weights

    def require(self, *key: int) -> Weights:
        """Return the weights; RequestError if their version, size and checksum are others."""
        if (weights := self.weights) and (weights.version, weights.num_bytes, weights.crc32) == key:
            return weights
        message = f"this server does not have version {key[0]}"
        raise wire.RequestError(grpc.StatusCode.ABORTED, message)

    async def pass_on(self, header: pb.PublishHeader, requests: Incoming) -> pb.PublishReply:
        """Send the file to the servers below."""
        weights = self.require(header.version, header.num_bytes, header.crc32)
        message = f"version {header.version} is not kept any more"
        async with ended_early(self.passing, weights, message), aclosing(requests):
            return await requests.pass_on(header, weights.path)

    async def end_outdated(self) -> None:
        """End the sending of removed files, so that no more than two are in memory."""
        while old := [limit for limit, what in self.passing.items() if what is not self.weights]:
            end(old)
            await asyncio.sleep(_END_SECONDS)
