"""Client side of one rollout server: connect, probe, reconnect.

    run:  ┌▶ connect ─▶ Status ─▶ current weights ─▶ live: probe every second ─┐
          └───────────────── back-off ◀─ channel closed, calls moved ◀─ lost ◀─┘

A live member has the current weights. If it is lost, its calls fail at once and the client
continues them on another server.
"""

import asyncio
import math
import sys
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rlx.base import UserError
from rlx.fleet import cast, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet import tls as transport
from rlx.fleet.publish import Delta, Weights, chunks
from rlx.fleet.relay import APART, Route
from rlx.fleet.requests import TRY_OUT, Chunk, Request, ScoreRequest, Scores, Timeouts
from rlx.fleet.silence import TokenWaits
from rlx.observe import traces
from rlx.system.host_port import split_address
from rlx.system.threads import in_thread

_Code = grpc.StatusCode
_BAD_REQUEST = (_Code.INVALID_ARGUMENT, _Code.OUT_OF_RANGE, _Code.UNIMPLEMENTED)
_GONE = (_Code.UNAVAILABLE, _Code.CANCELLED, _Code.DEADLINE_EXCEEDED)
_REFUSED = (_Code.FAILED_PRECONDITION, _Code.INVALID_ARGUMENT, _Code.PERMISSION_DENIED,
            _Code.NOT_FOUND, _Code.RESOURCE_EXHAUSTED, _Code.DATA_LOSS)  # fmt: skip
_MUTE = "it answers and sends no token, while others do"
_MAX_SPANS = 100_000
_RTT_FORGETTING = 1.02  # per probe, a clock estimate may be replaced by one this much worse


@dataclass(frozen=True)
class Delivery:
    """Record of one server's last successful publish."""

    method: str  # path | stream | delta | adapter | nccl | gloo; `stream` if that did not work
    sent_bytes: int  # by chunks, in all attempts; 0 if another server sent it
    paused_ns: int  # without decoding


class Lost(Exception):
    """The server died, hung or restarted during the call."""


class Failed(Exception):
    """The call failed on a live server."""


class Busy(Exception):
    """The server's queue is full; another server may have room."""


class Refused(Exception):
    """The server refused these weights."""


class Member:
    """One server of a fleet."""

    def __init__(
        self,
        address: str,  # host:port
        *,
        limits: Timeouts,
        wanted: Callable[[], Weights | None],  # weights for its first request; None: any
        changed: Callable[[], None],  # called whenever `live` changes
        say: Callable[[str], None],  # reports one line to the user
        token: str | None = None,
        tls: transport.Tls | None = None,
        kv: int = pb.SERVER_DEFAULT,
        # Level of sleep that it should have; None: nobody lets it sleep.
        sleep: Callable[[], int | None] = lambda: None,
        joined: bool = False,  # from a directory, where a wrong address is no error of the user's
        silent: Callable[["Member"], float] = lambda member: 0.0,  # seconds its next token is late
        # Ends a silent server of ours, which then starts again. Gets its address and the seconds
        # without an answer, infinity if it answers and sends no token.
        restart: Callable[[str, float], None] = lambda address, seconds: None,
        image: Callable[[str], bytes] | None = None,  # returns the file of an image by its name
        # Returns a server that has weights which this one needs, and can send them to it.
        peer: Callable[["Member", Weights], Any] | None = None,
    ):
        transport.check_address(address, token, tls)
        self.address, self.joined = address, joined
        self.live = False  # whether it may get requests
        self.fatal: UserError | None = None  # that no retry can fix
        self.foreign: UserError | None = None  # if another client published weights to it
        self.load, self.waits = 0, TokenWaits()  # samples and scores in flight; waits for tokens
        self.status = pb.StatusReply()  # its last answer to Status
        self.offset_ns = 0  # its CLOCK_MONOTONIC minus ours
        self.reason = "not connected yet"  # why it is not live
        self.refusal: tuple[Weights | None, str] = None, ""  # last refused, and why
        self.delivery: Delivery | None = None  # of the last successful publish
        self._sent = 0  # bytes of the publish that runs, by chunks
        self._limits, self._wanted, self._changed, self._say = limits, wanted, changed, say
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._kv, self._tls, self._sleep = kv, tls, sleep
        self.ca = b""  # of its certificate, for servers that send weights to it
        self._level: int | None = None  # its level of sleep, 0 if awake, None if unknown
        self._silent, self._restart = silent, restart
        self._mute = ""  # instance that sent no token
        self._unanswered = 0.0  # seconds since its last status, without pauses of this process
        self._has: Weights | None = None  # what it acknowledged; None: unknown, or nothing
        self._serves: tuple[int, int] | None = None  # version and checksum; None: unknown
        self._route: Route | None = None  # of the last publish, if it was relayed
        self._offer: pb.PublishCast | None = None  # of the publish that runs
        self._peer, self.passing = peer, 0  # servers that get their first weights from it
        self._apart = "", 0  # instance that gets no relayed publish below this version
        self._updating = asyncio.Lock()
        self._image, self._added = image, set[str]()  # images that it has, as far as we know
        self._rtt_ns = float("inf")
        self._spans: deque[tuple[str, int, int]] = deque(maxlen=_MAX_SPANS)
        self._queued = sys.maxsize  # shortest queue that a probe has found
        self._watcher: asyncio.Task | None = None

    async def run(self) -> None:
        """Keep the server connected until cancelled or a fatal error."""
        delay = 0.05
        while not self.fatal:
            start = time.monotonic()
            was_live = await self._live_once()
            delay = 0.05 if was_live else min(2 * delay, self._limits.backoff)
            await asyncio.sleep(delay)
            # Any longer, the server was live or this process was stopped.
            self._unanswered += min(time.monotonic() - start, self._limits.hang_seconds + delay)
            self._restart(self.address, self._unanswered)

    def fail(self, reason: str) -> None:
        """Stop using the server until it is connected again; its running calls raise Lost."""
        if self.live:
            self.live = False
            self.reason = reason
            if self._watcher:
                self._watcher.cancel()
            self._changed()

    def has(self, weights: Weights) -> bool:
        """Return whether it acknowledged `weights` and has not restarted, as far as we know."""
        return self._has is weights

    def reach(self, weights: Weights) -> tuple[transport.Tls | None, bool] | None:
        """Return what servers that send `weights` to each other have in common; None: it cannot."""
        apart = self._apart[0] == self.status.instance and weights.version < self._apart[1]
        near = transport.is_loopback(split_address(self.address)[0])
        return None if apart else (self._tls, near)

    def relays(self, weights: Weights) -> tuple[tuple, pb.RelayServer] | None:
        """Return it as one that servers of the same key relay `weights` to; None: none do."""
        reach = self.reach(weights)
        one_hop = weights.method in ("path", *cast.BACKENDS)
        if one_hop or not reach or not self._serves or self._serves == weights.identity:
            return None
        fits = bool(weights.delta and weights.delta.fits(self._has))
        return (*reach, fits), self._as_receiver(*self._serves)

    def _as_receiver(self, version: int, crc32: int) -> pb.RelayServer:
        instance = self.status.instance
        return pb.RelayServer(address=self.address, instance=instance, version=version, crc32=crc32)

    async def update(self, route: Route | None = None, offer: pb.PublishCast | None = None) -> None:
        """Publish the wanted weights to it, unless it has them; by `route` or `offer`, if it works.

        Refused (see `refusal`) if it serves its old ones; Lost if it may serve either.
        """
        async with self._updating:
            weights = old = served = None
            self._route, self._offer = route, offer
            try:
                while (weights := self._wanted()) is not None and self._has is not weights:
                    old, self._has = self._has, None  # until it answers
                    served, self._serves = self._serves, None
                    before = self.status.instance
                    self.delivery, replaced = await self._publish(weights, old)
                    # It may have had the new ones already, from another server. Before its first
                    # token, an update by this run's killed process may still have reached it.
                    expected = replaced in (served, weights.identity)
                    differs = not expected and self.waits.last > -math.inf
                    if differs:
                        await self.probe()
                    if self.status.instance != before:  # it may have its first weights
                        raise Lost("restarted")
                    if differs:
                        self._compare(served, replaced)
                    self._has, self._serves = weights, weights.identity
            except grpc.aio.AioRpcError as error:
                reason = wire.describe(error)
                if error.code() in _REFUSED:
                    self._has, self._serves, self.refusal = old, served, (weights, reason)
                    raise Refused(reason) from error
                self.fail(f"did not take the new weights ({reason})")
                raise Lost(reason) from error
            except asyncio.CancelledError:
                if _cancelled_by_caller():
                    raise
                raise Lost(self.reason) from None
            finally:
                if route and route.blamed and weights:
                    self._apart = route.server.instance, weights.version + APART
                if route and (route.relay or not self.live):
                    route.settle(f"{self.address} did not pass it on")
                self.waits = self.waits.updated(time.monotonic())

    async def sleep_or_wake(self) -> None:
        """Let the server sleep, or wake, as it should; one that does not is lost."""
        while (level := self._sleep()) not in (None, self._level):
            size = weights.work_bytes if (weights := self._wanted()) else 0
            how = {"timeout": self._limits.publish_seconds(size), "metadata": self._metadata}
            try:
                if level:
                    pause = pb.PauseRequest(freed=level)  # type: ignore[arg-type]
                    await self._stub.Pause(pause, **how)
                else:
                    await self._stub.Resume(pb.ResumeRequest(), **how)
                self._level = level
            except grpc.aio.AioRpcError as error:
                reason = f"does not {'sleep' if level else 'wake'} ({wire.describe(error)})"
                self._has = None  # it may have no weights
                self.fail(reason)
                raise Lost(reason) from error
            finally:
                self.waits = self.waits.updated(time.monotonic())

    async def generate(self, request: Request) -> AsyncGenerator[list[Chunk], None]:
        """Stream the chunks of `request`, one list per message.

        Lost asks to continue on another server, Failed to retry, Busy to use another server or to
        retry later; ValueError is for a wrong request.
        """
        message = wire.request_message(request)
        message.instance, call = self.status.instance, None
        how = {"timeout": self._limits.request, "metadata": self._call_metadata()}
        try:
            with self._in_flight(request.n):
                await self._add_images(request.images)
                call = self._stub.Generate(message, **how)
                async for reply in call:
                    self.waits = self.waits.token(time.monotonic())
                    yield wire.chunks_from(reply)
        finally:
            if call:
                call.cancel()

    async def _add_images(self, names: Sequence[str]) -> None:
        """Send the images that the server does not have."""
        for name in dict.fromkeys(names):
            if name in self._added:
                continue
            if not self._image:
                raise ValueError(f"the prompt has image {name}; give the fleet its files")
            file = pb.ImageFile(name=name, data=await in_thread(self._image, name))
            how = {"timeout": self._limits.request, "metadata": self._metadata}
            await self._stub.AddImage(file, **how)
            self._added.add(name)

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the scores of `request`; raise as `generate`."""
        message = wire.score_message(request)
        message.instance = self.status.instance
        with self._in_flight(1):
            await self._add_images(request.images)
            reply = await self._stub.Score(
                message, timeout=self._limits.request, metadata=self._call_metadata()
            )
            self.waits = self.waits.token(time.monotonic())
            return wire.scores_from(reply, request)

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that a rollout makes."""
        return (*self._metadata, *traces.metadata())

    @contextmanager
    def _in_flight(self, samples: int) -> Iterator[None]:
        """Count `samples` as load during a call, and translate gRPC's errors."""
        self.load, self.waits = self.load + samples, self.waits.began(time.monotonic())
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._call_error(error) from error
        except asyncio.CancelledError:
            if _cancelled_by_caller():
                raise
            raise Lost(self.reason) from None
        finally:
            self.load, self.waits = self.load - samples, self.waits.ended()

    def _call_error(self, error: grpc.aio.AioRpcError) -> Exception:
        code, text = error.code(), wire.describe(error)
        if code in _BAD_REQUEST:
            return ValueError(error.details())
        if code is _Code.UNAUTHENTICATED:
            return self._wrong_token()
        if code is _Code.FAILED_PRECONDITION:  # it has dropped an image
            self._added.clear()
        if code in _GONE:
            if code is not _Code.DEADLINE_EXCEEDED:  # a long queue; `_watch` finds what is dead
                self.fail(text)
            return Lost(text)
        if code is _Code.RESOURCE_EXHAUSTED and (error.details() or "").startswith(wire.QUEUE_FULL):
            return Busy(f"{self.address}: {text}")
        return Failed(f"{self.address}: {text}")

    def _compare(self, expected: tuple[int, int] | None, actual: tuple[int, int]) -> None:
        """Fail the server if it had other weights (version, checksum) than ours."""
        if expected and expected != actual:
            version, crc = actual
            self.foreign = UserError(
                f"{self.address} served version {version} (checksum {crc:08x}), which is not "
                f"this run's version {expected[0]} (checksum {expected[1]:08x}): something else "
                "publishes to it; give every run its own servers or its own token"
            )
            self.fail("something else publishes to it")

    def _wrong_token(self) -> UserError:
        return UserError(
            f"{self.address} refuses our bearer token; set {wire.TOKEN_VARIABLE} to the server's"
        )

    async def probe(self) -> pb.StatusReply:
        """Request its status; collect spans, compare weights, refine the clock estimate."""
        sent_ns, serves = time.monotonic_ns(), self._serves
        reply = await self._stub.Status(
            pb.StatusRequest(drain_spans=True),
            timeout=self._limits.hang_seconds,
            metadata=self._metadata,
        )
        rtt_ns, self._unanswered = time.monotonic_ns() - sent_ns, 0.0
        if reply.instance != self.status.instance:
            self._has = self._serves = None
            self._added.clear()
            self._rtt_ns = float("inf")
        elif self._has and serves is self._serves:  # no publish of ours meanwhile
            self._compare(serves, (reply.version, reply.weights_crc32))
        if rtt_ns <= self._rtt_ns * _RTT_FORGETTING:
            self._rtt_ns = rtt_ns
            self.offset_ns = reply.monotonic_ns - sent_ns - rtt_ns // 2
        else:
            self._rtt_ns *= _RTT_FORGETTING
        self._queued = min(self._queued, reply.queued)
        self._spans.extend(
            (s.name, s.start_ns - self.offset_ns, s.end_ns - self.offset_ns) for s in reply.spans
        )
        if (route := self._route) and reply.instance == route.server.instance:
            route.here = route.here or (reply.version, reply.weights_crc32) == route.goal
        restarted = self.live and reply.instance != self.status.instance
        self.status = reply
        if restarted:
            self.fail("restarted")
        return reply

    def drain_queue(self) -> int:
        """Return and forget the shortest queue of the probes since the last call, in samples."""
        shortest, self._queued = min(self._queued, self.status.queued), sys.maxsize
        return shortest

    def drain_spans(self) -> list[tuple[str, int, int]]:
        """Return and forget the spans (name, start_ns, end_ns), on our CLOCK_MONOTONIC."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    async def _live_once(self) -> bool:
        """Connect and watch until it is lost; return whether it was live meanwhile."""
        was_live = False
        try:
            channel = transport.channel(self.address, self._tls)
            self.ca = Path(self._tls.ca).read_bytes() if self._tls else b""
        except (UserError, OSError) as error:  # its files may be replaced just now
            self.reason = str(error)
            return False
        self._stub = rpc.RolloutStub(channel)
        try:
            await self.probe()
            if self._mute == self.status.instance:
                await self._try_out()
            self._level = None
            if self._sleep():  # before weights take memory
                await self.sleep_or_wake()
            while True:
                await self.update()
                await self.sleep_or_wake()
                if self._wanted() in (None, self._has):  # no others came while it woke
                    break
            was_live = self.live = True
            self._serves = self._serves or (self.status.version, self.status.weights_crc32)
            self._changed()
            self._watcher = asyncio.create_task(self._watch())
            await self._watcher
        except grpc.aio.AioRpcError as error:
            self.reason = wire.describe(error)
            if error.code() is _Code.DEADLINE_EXCEEDED:
                self.reason = f"hung, no answer to Status for {self._limits.hang_seconds:g} s"
            if error.code() is _Code.UNAUTHENTICATED:
                self.fatal = self._wrong_token()
            if error.code() is _Code.UNAVAILABLE:
                self.fatal = transport.refusal(self.address, error.details() or "")
                if "Socket closed" in self.reason and not was_live:
                    self.reason += transport.HUNG_UP
        except (Lost, Refused) as error:
            self.reason = str(error)
        except asyncio.CancelledError:  # by `fail` or by our caller
            if _cancelled_by_caller():
                raise
        finally:
            if self._watcher:
                self._watcher.cancel()
                self._watcher = None
            self.live = False
            if self._route:
                self._route.settle(f"{self.address} is lost")
            self._changed()
            await channel.close()
        if was_live:
            self._say(f"rollout server {self.address} is lost: {self.reason}")
        return was_live

    async def _watch(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(self._limits.probe_seconds)
            await self.probe()
            longest = self._limits.probe_seconds + self._limits.hang_seconds
            if (now := time.monotonic()) - start > longest:
                self.waits = self.waits.updated(now)  # this process was stopped meanwhile
            if not (self._updating.locked() or self._level) and (late := self._silent(self)):
                self._mute = self.status.instance
                self.fail(f"{_MUTE} for {late:.0f} s; it is not used until it sends one")
                self._restart(self.address, math.inf)

    async def _try_out(self) -> None:
        """Request one token; raise Lost if none comes."""
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                async for _ in self.generate(TRY_OUT):
                    return
        except ValueError:  # a reward model answers that it cannot generate
            return
        except (TimeoutError, Failed, Busy):
            pass
        raise Lost(_MUTE)

    async def _publish(
        self, weights: Weights, old: Weights | None
    ) -> tuple[Delivery, tuple[int, int]]:
        """Publish `weights`, by delta if it fits `old`; send damaged bytes again, once.

        Returns the delivery, and the version and checksum that the server had before.
        """
        delta = weights.delta if weights.delta and weights.delta.fits(old) else None
        self._sent, resent, route = 0, False, self._route
        if route and route.goal != weights.identity:
            route = None
        offer, self._offer = self._offer, None
        reply = await self._wait_for_relay(route) if route and not route.relay else None
        if self._peer and not (self.live or delta):
            reply = await self._get_from_peer(weights, await self._peer(self, weights))
            if not reply and self._wanted() is not weights:  # its file may be gone
                raise Lost(f"version {weights.version} is outdated")
        while True:
            try:
                reply = reply or await self._call(weights, delta, route, offer)
            except grpc.aio.AioRpcError as error:
                if route:
                    route.settle(f"{self.address} did not take it")
                    route = None
                if (delta or offer) and error.code() is _Code.ABORTED:
                    if offer:
                        text = f"{self.address} gets version {weights.version} as a file"
                        self._say(f"{text}: {wire.describe(error)}")
                    delta = offer = None
                elif not resent and error.code() is _Code.DATA_LOSS:
                    resent = True
                else:
                    raise
            else:
                is_file = weights.method == "delta" or (
                    weights.method in cast.BACKENDS and not offer
                )
                method = "stream" if is_file else weights.method
                delivery = Delivery("delta" if delta else method, self._sent, reply.paused_ns)
                return delivery, (reply.replaced_version, reply.replaced_crc32)

    async def _wait_for_relay(self, route: Route) -> pb.PublishReply | None:
        """Wait for the weights from another server; None: it needs them from here."""
        result = await route.result
        if not self.live or self.status.instance != route.server.instance:
            raise Lost(self.reason)
        if isinstance(result, pb.PublishReply):
            return result
        await self.probe()  # it may have them although no reply came
        if route.here:
            return route.assumed
        self._say(f"{self.address} gets version {route.goal[0]} from the trainer: {result}")
        return None

    async def _get_from_peer(
        self, weights: Weights, peer: "Member | None"
    ) -> pb.PublishReply | None:
        """Get the weights from `peer`; None: it needs them from here."""
        if not peer:
            return None
        to = self._as_receiver(self.status.version, self.status.weights_crc32)
        route = Route(to, weights.identity)
        route.relay = pb.PublishRelay(below=[to], fanout=1, ca=self.ca, kept=True)
        peer.passing += 1
        try:
            (result,) = (await peer._call(weights, None, route, None)).relayed
            if not result.error:
                return result.reply
            error = result.error
            self._apart = to.instance, weights.version + APART
        except grpc.aio.AioRpcError as caught:
            error = wire.describe(caught)
        except asyncio.CancelledError:
            if _cancelled_by_caller():
                raise
            error = f"{peer.address} is lost"
        finally:
            peer.passing -= 1
        self._say(f"{self.address} gets version {weights.version} from the trainer: {error}")
        return None

    async def _call(
        self, weights: Weights, delta: Delta | None, route: Route | None,
        offer: pb.PublishCast | None,
    ) -> pb.PublishReply:  # fmt: skip
        """Send the weights; with a route, return as soon as it has a result."""
        relay = route.relay if route else None
        seconds = self._limits.publish_seconds(weights.work_bytes)
        parts = self._parts(weights, delta, relay, offer)
        call = asyncio.ensure_future(
            self._stub.Publish(parts, timeout=seconds, metadata=self._metadata)
        )
        try:
            if route and relay:
                await asyncio.wait((call, route.result), return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    return route.result.result()
                route.settle(await call)
            return await call
        finally:
            call.cancel()

    async def _parts(
        self, weights: Weights, delta: Delta | None, relay: pb.PublishRelay | None,
        offer: pb.PublishCast | None,
    ) -> AsyncIterator[pb.PublishRequest]:  # fmt: skip
        by_path = weights.method == "path"
        header = pb.PublishHeader(
            version=weights.version,
            path=weights.path if by_path else "",
            num_bytes=weights.num_bytes,
            crc32=weights.crc32,
            kv=self._kv,  # type: ignore[arg-type]
            keep=weights.method == "delta",
            relay=relay,
            cast=offer,
        )
        if delta:
            for name in ("base_version", "base_crc32", "num_bytes", "crc32"):
                setattr(header.delta, name, getattr(delta, name))
        if weights.adapter:
            for name in ("base", "scale", "dtype"):
                setattr(header.adapter, name, getattr(weights.adapter, name))
        yield pb.PublishRequest(header=header)
        if by_path or offer or (relay and relay.kept):
            return
        parts = chunks(delta.path if delta else weights.path, wire.PUBLISH_CHUNK_BYTES)
        crc = 0 if relay and relay.below else None  # of all bytes up to the end of a chunk
        while part := await in_thread(next, parts, None):
            offset, data = part
            crc = crc if crc is None else await in_thread(zlib.crc32, data, crc)
            self._sent += len(data)
            yield pb.PublishRequest(chunk=pb.PublishChunk(offset=offset, data=data, crc32=crc))


def _cancelled_by_caller() -> bool:
    """Return whether the running task was cancelled, rather than the call it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
