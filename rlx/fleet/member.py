"""One rollout server as its client sees it: joined, watched, lost, joined again.

    run:  ┌▶ connect ─▶ Status ─▶ current weights ─▶ live: probe every second ─┐
          └───────────────── back-off ◀─ channel closed, calls moved ◀─ lost ◀─┘

A live member has the current weights. Losing one ends its calls at once, so that the client can
continue them elsewhere.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from rlx.base import UserError
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet import tls as transport
from rlx.fleet import wire
from rlx.fleet.publish import Delta, Weights, chunks
from rlx.fleet.requests import Request, ScoreRequest, Scores

_Code = grpc.StatusCode
_BAD_REQUEST = (_Code.INVALID_ARGUMENT, _Code.OUT_OF_RANGE, _Code.UNIMPLEMENTED)
_GONE = (_Code.UNAVAILABLE, _Code.CANCELLED, _Code.DEADLINE_EXCEEDED)
_REFUSED = (_Code.FAILED_PRECONDITION, _Code.INVALID_ARGUMENT, _Code.PERMISSION_DENIED,
            _Code.NOT_FOUND, _Code.RESOURCE_EXHAUSTED, _Code.DATA_LOSS)  # fmt: skip
_MAX_SPANS = 100_000
_RTT_FORGETTING = 1.02  # per probe: an old clock estimate gives way to one a little worse

_CHANNEL_OPTIONS = (
    *wire.OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds.

    Attributes:
      connect: for the servers to be there, at the start.
      request: deadline of one Generate call.
      publish: deadline of one Publish call to one server.
      probe: a server that does not answer Status for so long is hung, and treated as dead.
      probe_every: between two probes.
      outage: how long requests wait while no server is alive.
      backoff: the longest pause between two attempts to join a lost server.
    """

    connect: float = 60.0
    request: float = 600.0
    publish: float = 120.0
    probe: float = 5.0
    probe_every: float = 1.0
    outage: float = 300.0
    backoff: float = 2.0

    @classmethod
    def of(cls, fleet: Mapping[str, Any], request: float) -> "Limits":
        """Return those of a config's `fleet`, with this deadline of a request."""
        return cls(
            connect=fleet["connect_seconds"],
            request=request,
            publish=fleet["publish_timeout_seconds"],
            probe=fleet["hang_seconds"],
            probe_every=fleet["probe_seconds"],
            outage=fleet["outage_seconds"],
        )


@dataclass(frozen=True)
class Delivery:
    """How a server got its weights.

    Attributes:
      method: what it took in the end: path | stream | delta | adapter.
      sent_bytes: that went to it as chunks, in all attempts.
      paused_ns: no token was decoded there.
    """

    method: str
    sent_bytes: int
    paused_ns: int


class Lost(Exception):
    """The server died, hung or restarted during the call."""


class Failed(Exception):
    """The call failed on a server that lives."""


class Busy(Exception):
    """The server has too much to do for the call; another one may not."""


class Refused(Exception):
    """The server does not take these weights."""


class Member:
    """One server.

    Args:
      address: host:port.
      wanted: gives the weights it must have before its first request; None: those it has.
      changed: called whenever `live` changes.
      say: takes one line for the user.

    Attributes:
      live: it may get requests.
      fatal: why it can never be live with these options.
      foreign: why it is not ours alone: it had weights that we did not publish.
      load: samples and scores on their way.
      status: its last answer.
      offset_ns: its CLOCK_MONOTONIC minus ours.
      refusal: the last weights it refused, and why.
      delivery: how it got the last weights it took.
    """

    def __init__(
        self,
        address: str,
        *,
        limits: Limits,
        wanted: Callable[[], Weights | None],
        changed: Callable[[], None],
        say: Callable[[str], None],
        token: str | None = None,
        tls: transport.Tls | None = None,
        kv: int = pb.SERVER_DEFAULT,
    ):
        transport.check_address(address, token, tls)
        self.address = address
        self.live = False
        self.fatal: UserError | None = None
        self.foreign: UserError | None = None
        self.load = 0
        self.status = pb.StatusReply()
        self.offset_ns = 0
        self.reason = "not connected yet"
        self.refusal: tuple[Weights | None, str] = None, ""
        self.delivery: Delivery | None = None
        self._sent = 0
        self._limits, self._wanted, self._changed, self._say = limits, wanted, changed, say
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._kv, self._tls = kv, tls
        self._has: Weights | None = None
        self._serves: tuple[int, int] | None = None  # version and checksum, unless in doubt
        self._updating = asyncio.Lock()
        self._rtt_ns = float("inf")
        self._spans: deque[tuple[str, int, int]] = deque(maxlen=_MAX_SPANS)
        self._watcher: asyncio.Task | None = None

    async def run(self) -> None:
        """Keeps the server joined; ends only when cancelled, or on a fatal answer."""
        delay = 0.05
        while not self.fatal:
            was_live = await self._live_once()
            delay = 0.05 if was_live else min(2 * delay, self._limits.backoff)
            await asyncio.sleep(delay)

    def fail(self, reason: str) -> None:
        """No more requests until it has joined again; its running calls end as Lost."""
        if self.live:
            self.live = False
            self.reason = reason
            if self._watcher:
                self._watcher.cancel()
            self._changed()

    def has(self, weights: Weights) -> bool:
        """Whether it acknowledged `weights`, and has not restarted since as far as we know."""
        return self._has is weights

    async def update(self) -> None:
        """Brings it to the wanted weights.

        Raises:
          Refused: it answered that it does not take them (see `refusal`), and serves its old ones.
          Lost: no answer, or one that leaves open what it serves; it is failed.
        """
        async with self._updating:
            weights = had = served = None
            try:
                while (weights := self._wanted()) is not None and self._has is not weights:
                    had, self._has = self._has, None  # until it says so, who knows
                    served, self._serves = self._serves, None
                    self.delivery, replaced = await self._publish(weights, had)
                    self._compare(served, replaced)
                    self._has, self._serves = weights, (weights.version, weights.crc32)
            except grpc.aio.AioRpcError as error:
                reason = wire.describe(error)
                if error.code() in _REFUSED:
                    self._has, self._serves, self.refusal = had, served, (weights, reason)
                    raise Refused(reason) from error
                self.fail(f"did not take the new weights ({reason})")
                raise Lost(reason) from error
            except asyncio.CancelledError:
                if _cancelled_by_caller():
                    raise
                raise Lost(self.reason) from None

    async def generate(self, request: Request) -> AsyncGenerator[list[wire.Piece], None]:
        """Streams the pieces of `request` as they come.

        Raises:
          Lost: continue elsewhere. Failed: try again. Busy: elsewhere, or later. ValueError: the
            request is wrong.
        """
        message = wire.request_message(request)
        message.instance = self.status.instance
        call = self._stub.Generate(message, timeout=self._limits.request, metadata=self._metadata)
        self.load += request.n
        got_any = False
        try:
            async for reply in call:
                got_any = True
                yield wire.pieces(reply)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error, got_any) from error
        except asyncio.CancelledError:
            if _cancelled_by_caller():
                raise
            raise Lost(self.reason) from None
        finally:
            self.load -= request.n
            call.cancel()

    async def score(self, request: ScoreRequest) -> Scores:
        """The scores of `request`; raises as `generate`."""
        message = wire.score_message(request)
        message.instance = self.status.instance
        self.load += 1
        try:
            reply = await self._stub.Score(
                message, timeout=self._limits.request, metadata=self._metadata
            )
            return wire.scores_from(reply, request)
        except grpc.aio.AioRpcError as error:
            raise self._explained(error, got_any=False) from error
        except asyncio.CancelledError:
            if _cancelled_by_caller():
                raise
            raise Lost(self.reason) from None
        finally:
            self.load -= 1

    def _explained(self, error: grpc.aio.AioRpcError, got_any: bool) -> Exception:
        code, text = error.code(), wire.describe(error)
        if code in _BAD_REQUEST:
            return ValueError(error.details())
        if code is _Code.UNAUTHENTICATED:
            return self._wrong_token()
        if code in _GONE:
            if code is not _Code.DEADLINE_EXCEEDED or not got_any:  # slow is not dead
                self.fail(text)
            return Lost(text)
        if code is _Code.RESOURCE_EXHAUSTED and (error.details() or "").startswith(wire.QUEUE_FULL):
            return Busy(f"{self.address}: {text}")
        return Failed(f"{self.address}: {text}")

    def _compare(self, wanted: tuple[int, int] | None, found: tuple[int, int]) -> None:
        """Takes note when the server had other weights than ours."""
        if wanted and wanted != found:
            version, crc = found
            self.foreign = UserError(
                f"{self.address} served version {version} (checksum {crc:08x}), which is not "
                f"this run's version {wanted[0]} (checksum {wanted[1]:08x}): something else "
                "publishes to it; give every run its own servers or its own token"
            )
            self.fail("something else publishes to it")

    def _wrong_token(self) -> UserError:
        return UserError(
            f"{self.address} refuses our bearer token; set {wire.TOKEN_VARIABLE} to the server's"
        )

    async def probe(self) -> pb.StatusReply:
        """Asks for the status, collects spans, compares weights, refines the clock estimate."""
        sent_ns, serves = time.monotonic_ns(), self._serves
        reply = await self._stub.Status(
            pb.StatusRequest(drain_spans=True), timeout=self._limits.probe, metadata=self._metadata
        )
        rtt_ns = time.monotonic_ns() - sent_ns
        if reply.instance != self.status.instance:
            self._has = self._serves = None
            self._rtt_ns = float("inf")
        elif self._has and serves is self._serves:  # no publish of ours came between
            self._compare(serves, (reply.version, reply.weights_crc32))
        if rtt_ns <= self._rtt_ns * _RTT_FORGETTING:
            self._rtt_ns = rtt_ns
            self.offset_ns = reply.monotonic_ns - sent_ns - rtt_ns // 2
        else:
            self._rtt_ns *= _RTT_FORGETTING
        self._spans.extend(
            (s.name, s.start_ns - self.offset_ns, s.end_ns - self.offset_ns) for s in reply.spans
        )
        restarted = self.live and reply.instance != self.status.instance
        self.status = reply
        if restarted:
            self.fail("restarted")
        return reply

    def drain_spans(self) -> list[tuple[str, int, int]]:
        """The spans collected so far, (name, start_ns, end_ns) on our CLOCK_MONOTONIC."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    async def _live_once(self) -> bool:
        """From connecting to losing it; returns whether it was live in between."""
        was_live = False
        channel = transport.channel(self.address, self._tls, _CHANNEL_OPTIONS)
        self._stub = rpc.RolloutStub(channel)
        try:
            await self.probe()
            await self.update()
            was_live = self.live = True
            self._serves = self._serves or (self.status.version, self.status.weights_crc32)
            self._changed()
            self._watcher = asyncio.create_task(self._watch())
            await self._watcher
        except grpc.aio.AioRpcError as error:
            self.reason = wire.describe(error)
            if error.code() is _Code.DEADLINE_EXCEEDED:
                self.reason = f"hung, no answer to Status for {self._limits.probe:g} s"
            if error.code() is _Code.UNAUTHENTICATED:
                self.fatal = self._wrong_token()
            if error.code() is _Code.UNAVAILABLE:
                self.fatal = await transport.why_refused(self.address, self._tls)
        except (Lost, Refused) as error:
            self.reason = str(error)
        except asyncio.CancelledError:  # by fail(), which has given the reason; or we are closed
            if _cancelled_by_caller():
                raise
        finally:
            if self._watcher:
                self._watcher.cancel()
                self._watcher = None
            self.live = False
            self._changed()
            await channel.close()
        if was_live:
            self._say(f"rollout server {self.address} is lost: {self.reason}")
        return was_live

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._limits.probe_every)
            await self.probe()

    async def _publish(
        self, weights: Weights, had: Weights | None
    ) -> tuple[Delivery, tuple[int, int]]:
        """A Publish call; bytes damaged on the way are sent once more.

        A server that had the delta's base gets the delta, and the file if it cannot apply it.

        Returns:
          how it went, and the version and checksum that it served until then.
        """
        delta = weights.delta if weights.delta and weights.delta.fits(had) else None
        self._sent, again = 0, False
        while True:
            try:
                reply = await self._stub.Publish(
                    self._parts(weights, delta),
                    timeout=self._limits.publish,
                    metadata=self._metadata,
                )
            except grpc.aio.AioRpcError as error:
                if delta and error.code() is _Code.ABORTED:
                    delta = None
                elif not again and error.code() is _Code.DATA_LOSS:
                    again = True
                else:
                    raise
            else:
                whole = "stream" if weights.method == "delta" else weights.method
                way = Delivery("delta" if delta else whole, self._sent, reply.paused_ns)
                return way, (reply.replaced_version, reply.replaced_crc32)

    async def _parts(
        self, weights: Weights, delta: Delta | None
    ) -> AsyncIterator[pb.PublishRequest]:
        """The messages of one Publish call."""
        by_path = weights.method == "path"
        header = pb.PublishHeader(
            version=weights.version,
            path=weights.path if by_path else "",
            num_bytes=weights.num_bytes,
            crc32=weights.crc32,
            kv=self._kv,  # type: ignore[arg-type]
            keep=weights.method == "delta",
        )
        if delta:
            header.delta.base_version, header.delta.base_crc32 = (
                delta.base_version,
                delta.base_crc32,
            )
            header.delta.num_bytes, header.delta.crc32 = delta.num_bytes, delta.crc32
        if weights.adapter:
            header.adapter.base, header.adapter.scale = weights.adapter.base, weights.adapter.scale
            header.adapter.dtype = weights.adapter.dtype
        yield pb.PublishRequest(header=header)
        if by_path:
            return
        parts = chunks(delta.path if delta else weights.path, wire.PUBLISH_CHUNK_BYTES)
        while part := await asyncio.to_thread(next, parts, None):
            self._sent += len(part[1])
            yield pb.PublishRequest(chunk=pb.PublishChunk(offset=part[0], data=part[1]))


def _cancelled_by_caller() -> bool:
    """Whether the running task itself was cancelled, and not a call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
