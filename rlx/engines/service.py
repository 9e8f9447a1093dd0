"""gRPC service around one engine: checks requests, stages weights, forwards the rest.

    Generate ─▶ request_from ─▶ engine.generate ─▶ several chunks per message ─▶ client
    Score    ─▶ score_from ─▶ engine.score ─▶ one message ─▶ client
    Publish  ─▶ staged (a delta: applied to the kept file; an adapter: added to the model
                directory) and checksummed while the engine runs ─▶ engine.load
             ─▶ or: the kept file to a server that joins (relay.py)

A bad request gets an error status and never reaches the engine.
"""

import asyncio
import errno
import math
import os
import secrets
import stat
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rlx.base import UserError
from rlx.engines.engine import Engine, EngineStopped, MissingImage
from rlx.engines.model_engine import MAX_SPANS
from rlx.engines.server_metrics import Meters
from rlx.fleet import adapter, delta, relay, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet.publish import WeightFile, Weights, check_room, checksum, sweep
from rlx.fleet.requests import Chunk, EngineStatus, Timeouts
from rlx.fleet.tls import Tls
from rlx.fleet.wire import RequestError
from rlx.observe import traces
from rlx.system import image_store

STALL_SECONDS = 30.0  # between messages of a publish
PAUSE_SECONDS = 60.0  # default lease of a pause
MAX_PAUSE_SECONDS = 3600.0
MAX_PATH = 4096  # bytes of a published path
_DRAIN_SECONDS = 5.0
_HOLD_SECONDS = 0.1  # tokens wait for others, as a message costs far more than its tokens
_UNWATCHED = 5  # × _HOLD_SECONDS for unwatched requests; a dead server's are sampled again
_Code = grpc.StatusCode
# A failed engine has the status of a server that died.
_CODES = {MissingImage: _Code.FAILED_PRECONDITION, EngineStopped: _Code.UNAVAILABLE}


@dataclass(eq=False)
class RolloutService(rpc.RolloutServicer):
    """Answers the seven calls of the protocol."""

    engine: Engine  # a started engine
    _: KW_ONLY
    # Directories with the files that a publish by path, or a request's adapter, may name.
    weight_roots: Sequence[str] = ()
    stage_dir: str = "/dev/shm"  # directory for weights received as chunks
    model_dir: str = ""  # HF directory that adapters are added to; "" refuses adapters
    max_queue: int = 16384  # samples and scores that may be running or waiting
    kv: str = "keep"  # default policy of an update for running requests, one of KV_POLICIES
    stall_seconds: float = STALL_SECONDS  # how long a publish may send nothing
    clock: Callable[[], int] = time.monotonic_ns  # returns ns, for spans; the engine's
    meters: Meters = field(default_factory=Meters)
    tracer: Any = None  # of `observe.traces.tracing`
    tls: Tls | None = None  # files for the connections to servers below in a relayed publish
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def __post_init__(self) -> None:
        self._roots = tuple(os.path.realpath(root) for root in self.weight_roots)
        self.here = self.answered = 0  # samples and scores that run or wait; calls that ended
        self._last_call = time.monotonic()
        self._crc32 = 0  # of the current weights; 0 before the first publish
        self._lease: asyncio.Task | None = None  # of a pause
        self._instance = secrets.token_hex(8)
        self._spans: deque[tuple[str, int, int]] = deque(maxlen=MAX_SPANS)
        self._changing = asyncio.Lock()  # one pause, load or resume at a time
        self._installs: set[asyncio.Task] = set()
        self._relayed: relay.Calls = {}  # publishes that other servers send
        self._kept = relay.KeptFile()  # of the current weights
        self._casting = False  # whether the engine takes part in a cast
        self._adapter_base = adapter.Base(self.model_dir) if self.model_dir else None
        self._closed = False
        sweep(self.stage_dir)

    def close(self) -> None:
        """End a pause's lease and remove the kept file."""
        self._closed = True
        self._end_lease()
        self._kept.replace(None)

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last call; 0 while samples are running."""
        return 0.0 if self.here else time.monotonic() - self._last_call

    def look(self) -> EngineStatus:
        """Return the engine's status, keep its spans; raise EngineStopped if it has failed."""
        self.seen = self.engine.status()
        self._spans.extend(self.seen.spans)
        return self.seen

    async def Generate(self, request, context):
        start = time.monotonic()

        def first() -> None:
            self.meters.first_token.observe(time.monotonic() - start)
            if span:
                span.add_event("first token")

        async with self._call(request, context) as span:
            query = wire.request_from(request)
            if query.sampling.adapter:
                self._allowed_path(query.sampling.adapter)
            with self._place(query.n):
                stream = self.engine.generate(query)
                hold = _HOLD_SECONDS * (_UNWATCHED if query.unwatched else 1)
                async with (
                    aclosing(stream),
                    aclosing(_in_batches(stream, query.n, hold, first)) as batches,
                ):
                    async for batch in batches:
                        await context.write(wire.reply_message(batch))

    async def AddImage(self, request, context):
        async with _refusing(context):
            if image_store.name_of(request.data) != request.name:
                raise ValueError(f"the bytes of image {request.name} are damaged; send it again")
            await self.engine.add_image(request.name, request.data)
            return pb.AddImageReply()

    async def Score(self, request, context):
        async with self._call(request, context):
            query = wire.score_from(request)
            if query.adapter:
                self._allowed_path(query.adapter)
            with self._place(1):
                return wire.score_reply(await self.engine.score(query))

    @asynccontextmanager
    async def _call(self, request, context) -> AsyncIterator[Any]:
        """Refuse a Generate or Score call as `_refusing`; yield its span, or None."""
        trace = traces.caller(self.tracer, context.invocation_metadata())
        async with _refusing(context):
            # Before a restart the server may have had other weights.
            if request.instance not in ("", self._instance):
                raise RequestError(_Code.UNAVAILABLE, "the server was restarted")
            with traces.span("engine", *trace, running=self.here) as span:
                yield span

    @contextmanager
    def _place(self, count: int) -> Iterator[None]:
        """Reserve `count` places of the queue; an empty server takes one call of any size."""
        if self.here and self.here + count > self.max_queue:
            raise RequestError(
                _Code.RESOURCE_EXHAUSTED,
                f"{wire.QUEUE_FULL}: {self.here} samples are here, {count} more would exceed "
                f"--max-queue={self.max_queue}",
            )
        self.here += count
        try:
            yield
        finally:
            self.here -= count
            self.answered += 1
            self._last_call = time.monotonic()

    async def Publish(self, request_iterator, context):
        left = context.time_remaining() or 0.0
        requests = _timely(aiter(request_iterator), self.stall_seconds, left)
        async with (
            _refusing(context, _Code.FAILED_PRECONDITION),
            aclosing(relay.Incoming(requests, context, self.tls)) as incoming,
        ):
            reply = await self._take_publish(incoming)
            if not reply.relayed:
                reply.relayed.extend(await incoming.results())
            return reply

    async def _take_publish(self, requests: relay.Incoming) -> pb.PublishReply:
        """Stage the weights of a publish and install them; or pass on the kept file."""
        path: str | bytes
        file = None
        try:
            header = await _header(requests)
            self._require_expected(header)
            if header.relay.kept:
                return await self._kept.pass_on(header, requests)
            requests.begin(header)
            way, num_bytes = "path", header.num_bytes
            if header.HasField("cast"):
                way, path = header.cast.backend, header.cast.SerializeToString()
                self._admit_cast(header.cast)
            elif header.path:
                path = await self._verified_path(header)
            else:
                await self._kept.end_outdated()
                file = self._stage_file(header.num_bytes)
                path = file.path
                relay.end(self._relayed)
                message = f"version {header.version} is overtaken by another publish"
                from_server = self._relayed if header.relay.to.instance else {}
                async with relay.ended_early(from_server, header.version, message):
                    if header.HasField("delta"):
                        way, num_bytes = "delta", header.delta.num_bytes
                        await self._apply(header, requests, path)
                    elif header.HasField("adapter"):
                        way = "adapter"
                        await self._add(header, requests, path)
                    else:
                        way = "stream"
                        await _receive(header, requests, path)
        except BaseException as error:
            if file:
                file.close()
            if isinstance(error, RequestError):
                # A grpc.aio client that still writes when the status comes may report INTERNAL.
                with suppress(TimeoutError, DecodeError):
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        async for _ in requests:
                            pass
            raise
        # Finish the update even if the caller disconnects.
        install = asyncio.create_task(self._install(header, path, file))
        self._installs.add(install)
        install.add_done_callback(self._installs.discard)
        reply = await asyncio.shield(install)
        self.meters.publish_bytes.labels(way).inc(num_bytes)
        return reply

    def _require_expected(self, header: pb.PublishHeader) -> None:
        """Raise RequestError if another server's publish is not for this one or came too late."""
        to, now = header.relay.to, (self.look().version, self._crc32)
        if to.instance and (to.instance, to.version, to.crc32) != (self._instance, *now):
            message = f"relayed version {header.version} is not for this server as it is now"
            raise RequestError(_Code.ABORTED, message)

    def _admit_cast(self, cast: pb.PublishCast) -> None:
        """Raise RequestError unless the engine can take part in this cast."""
        takes = getattr(self.engine, "casts", "")
        if self._casting or takes != cast.backend:
            state = "takes part in another one" if self._casting else f"takes {takes or 'none'}"
            raise RequestError(_Code.ABORTED, f"a cast by {cast.backend}: the server {state}")
        self._casting = True

    async def Pause(self, request, context):
        seconds = request.lease_seconds or PAUSE_SECONDS
        async with _refusing(context), self._changing:
            if not 0 < seconds <= MAX_PAUSE_SECONDS:
                raise ValueError(f"lease_seconds={seconds} is not in (0, {MAX_PAUSE_SECONDS:g}]")
            if request.freed not in pb.Freed.values():
                raise ValueError(f"freed={request.freed} is unknown; update the server's rlx")
            self._end_lease()
            if not request.freed:  # what was freed is in use by others, for as long as they need it
                self._lease = asyncio.create_task(self._resume_after(seconds))
            await self.engine.pause(request.freed)
            return pb.PauseReply()

    async def Resume(self, request, context):
        async with _refusing(context, _Code.FAILED_PRECONDITION), self._changing:
            self._end_lease()
            await self.engine.resume()
            return pb.ResumeReply()

    def _end_lease(self) -> None:
        if self._lease:
            self._lease.cancel()
            self._lease = None

    async def _resume_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._changing:
            with suppress(EngineStopped, ValueError):  # found by `Server.watch`; or no weights
                await self.engine.resume()
        self.say(f"paused for {seconds:g} s and not asked to resume; continuing")

    async def Status(self, request, context):
        self._last_call = time.monotonic()
        status = self.look()  # moves its spans to `_spans`
        state = {f.name: getattr(status, f.name) for f in fields(status) if f.name != "spans"}
        reply = pb.StatusReply(
            **state, instance=self._instance, pid=os.getpid(), weights_crc32=self._crc32,
            metrics_port=self.meters.port,
        )  # fmt: skip
        while request.drain_spans and self._spans:
            name, start_ns, end_ns = self._spans.popleft()
            reply.spans.add(name=name, start_ns=start_ns, end_ns=end_ns)
        reply.monotonic_ns = self.clock()
        return reply

    def _allowed_path(self, name: str) -> str:
        """Return the real path of a file or directory below the weight roots."""
        path = os.path.realpath(name)
        if not any(os.path.commonpath((path, root)) == root for root in self._roots):
            allowed = ", ".join(self._roots) or "none is"
            raise RequestError(
                _Code.PERMISSION_DENIED,
                f"{name} is outside the weight roots ({allowed} allowed); start the server "
                "with --weight-root, or publish by stream",
            )
        return path

    async def _verified_path(self, header: pb.PublishHeader) -> str:
        """Return the real path of the named file after comparing size and checksum."""
        path = self._allowed_path(header.path)
        start_ns, cancelled = self.clock(), threading.Event()
        try:
            info = os.stat(path)
            if not stat.S_ISREG(info.st_mode):  # opening a pipe would block
                raise OSError(errno.EINVAL, "it is not a regular file")
            _compare(header, info.st_size)
            crc = await asyncio.to_thread(checksum, path, cancelled.is_set)
        except OSError as error:
            raise RequestError(
                _Code.NOT_FOUND,
                f"cannot read {header.path}: {error.strerror}; where trainer and server share no "
                "file system, publish by stream",
            ) from error
        finally:
            cancelled.set()  # ends the thread's reading if this call was cancelled
        self._spans.append(("verify weights", start_ns, self.clock()))
        _compare(header, info.st_size, crc)
        return path

    async def _apply(self, header: pb.PublishHeader, requests: relay.Incoming, path: str) -> None:
        """Receive a delta; apply it to the kept file and write the result to `path`."""
        patch = header.delta
        base = self._kept.require(patch.base_version, header.num_bytes, patch.base_crc32)
        with closing(self._stage_file(patch.num_bytes)) as file:
            try:
                await _receive(patch, requests, file.path)
                start_ns = self.clock()
                crc = await asyncio.to_thread(delta.apply, base.path, file.path, path)
            except (ValueError, OSError) as error:
                raise RequestError(_Code.ABORTED, f"cannot apply the delta: {error}") from error
        self._spans.append(("apply delta", start_ns, self.clock()))
        if crc != header.crc32:
            message = f"the delta gives a file with checksum {crc:08x}, not {header.crc32:08x}"
            raise RequestError(_Code.ABORTED, message)

    async def _add(self, header: pb.PublishHeader, requests: relay.Incoming, path: str) -> None:
        """Receive an adapter; write the model directory's weights plus it to `path`."""
        spec, base, start_ns = header.adapter, self._adapter_base, self.clock()
        if not base:
            raise RequestError(_Code.FAILED_PRECONDITION, "no base for adapters; publish by stream")
        with closing(self._stage_file(header.num_bytes)) as file:
            try:
                await asyncio.to_thread(base.require, spec.base)
                await _receive(header, requests, file.path)
                await asyncio.to_thread(base.write, file.path, spec.scale, spec.dtype, path)
            except adapter.OtherBase as error:
                raise RequestError(_Code.FAILED_PRECONDITION, str(error)) from error
            except ValueError as error:
                raise RequestError(_Code.INVALID_ARGUMENT, str(error)) from error
            except (UserError, OSError) as error:
                raise RequestError(_Code.RESOURCE_EXHAUSTED, str(error)) from error
        self._spans.append(("add adapter", start_ns, self.clock()))

    def _stage_file(self, num_bytes: int) -> WeightFile:
        try:
            check_room(self.stage_dir, num_bytes)
            return WeightFile(self.stage_dir)
        except UserError as error:
            raise RequestError(_Code.RESOURCE_EXHAUSTED, str(error)) from error

    async def _install(
        self, header: pb.PublishHeader, path: str | bytes, file: WeightFile | None
    ) -> pb.PublishReply:
        """Load the weights at `path`; keep their `file` if the header asks for it, or remove it."""
        kv = wire.KV_NAMES.get(header.kv) or self.kv
        kept, cast = None, header.HasField("cast")
        try:
            async with self._changing:
                self._require_expected(header)
                start_ns, reply = self.clock(), pb.PublishReply(version=header.version)
                reply.replaced_version = self.look().version
                reply.replaced_crc32 = self._crc32
                reply.paused_ns = await self.engine.load(path, header.version, kv)
                self._crc32 = header.crc32
                self.meters.stall.observe(reply.paused_ns / 1e9)
                self._spans.append((f"load version {header.version}", start_ns, self.clock()))
                if file and header.keep and not self._closed:
                    kept = Weights(
                        header.version, file.path, header.num_bytes, header.crc32, "delta", file
                    )
                self._kept.replace(kept)
        except ValueError as error:
            if not cast:
                raise
            raise RequestError(_Code.ABORTED, str(error)) from error
        finally:
            self._casting = self._casting and not cast
            if file and not kept:
                file.close()
        return reply


async def _in_batches(
    stream: AsyncIterator[Chunk], n: int, hold_seconds: float, first: Callable[[], None]
) -> AsyncGenerator[list[Chunk], None]:
    """Yield the chunks of `stream` in batches, held for `hold_seconds` at most.

    The end of the last of `n` samples is not held. `first` is called when the first chunk comes.
    """
    pending: list[Chunk] = []
    some, ended = asyncio.Event(), asyncio.Event()

    async def pump() -> None:
        left, started = n, False
        try:
            async for chunk in stream:
                if not started:
                    first()
                started = True
                pending.append(chunk)
                some.set()
                left -= chunk.stop_reason is not None
                if not left:
                    ended.set()
        finally:
            some.set()
            ended.set()

    task = asyncio.create_task(pump())
    try:
        while not task.done() or pending:
            await some.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(hold_seconds):
                    await ended.wait()
            some.clear()
            batch = pending.copy()
            pending.clear()
            if batch:
                yield batch
        task.result()  # raises what ended the stream
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _timely(
    requests: AsyncIterator[pb.PublishRequest], stall_seconds: float, left: float
) -> AsyncIterator[pb.PublishRequest]:
    """Yield `requests`; RequestError if one, or all by their size and `left` seconds, is late."""
    start, most = time.monotonic(), math.inf
    while True:
        seconds = min(stall_seconds, start + most - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                request = await anext(requests, None)
        except TimeoutError:
            message = f"nothing came for {seconds:g} s"
            if seconds < stall_seconds:
                message = f"it took more than {most:g} s"
            raise RequestError(_Code.DEADLINE_EXCEEDED, f"publish given up: {message}") from None
        if request is None:
            return
        if request.WhichOneof("part") == "header":
            most = max(left, Timeouts().publish_seconds(request.header.num_bytes))
        yield request


async def _header(requests: relay.Incoming) -> pb.PublishHeader:
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("part") != "header":
        raise RequestError(_Code.INVALID_ARGUMENT, "a publish begins with its header")
    header = first.header
    if header.version < 0:
        raise RequestError(_Code.INVALID_ARGUMENT, f"version={header.version}; it must be ≥ 0")
    if len(header.path.encode()) > MAX_PATH:
        raise RequestError(_Code.INVALID_ARGUMENT, f"the path is longer than {MAX_PATH} bytes")
    if "\0" in header.path:
        raise RequestError(_Code.INVALID_ARGUMENT, "the path holds a NUL character")
    return header


async def _receive(
    header: pb.PublishHeader | pb.PublishDelta, requests: relay.Incoming, path: str
) -> None:
    """Write and pass on the chunks; RequestError unless complete, in order and undamaged."""
    size, crc = 0, 0

    def take(data: bytes) -> int:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]  # a nearly full disk takes a part
        return zlib.crc32(data, crc)

    with open(path, "wb", buffering=0) as file:
        async for request in requests:
            if request.WhichOneof("part") != "chunk":
                raise RequestError(_Code.INVALID_ARGUMENT, "only chunks may follow the header")
            chunk = request.chunk
            if chunk.offset != size:
                raise RequestError(
                    _Code.DATA_LOSS, f"chunk at offset {chunk.offset} where {size} was expected"
                )
            if not chunk.data:
                raise RequestError(_Code.INVALID_ARGUMENT, "a chunk is empty")
            size += len(chunk.data)
            if size > header.num_bytes:
                raise RequestError(
                    _Code.DATA_LOSS, f"more than the {header.num_bytes} bytes announced"
                )
            try:
                crc = await asyncio.to_thread(take, chunk.data)
            except OSError as error:
                message = f"cannot stage the weights: {error.strerror}"
                raise RequestError(_Code.RESOURCE_EXHAUSTED, message) from error
            if chunk.crc32 != crc and (requests.calls or chunk.HasField("crc32")):
                raise RequestError(_Code.DATA_LOSS, f"a chunk before byte {size} is damaged")
            requests.verified(path, size, crc)
    _compare(header, size, crc)


def _compare(
    header: pb.PublishHeader | pb.PublishDelta,
    size: int,
    crc: int | None = None,  # None: not known yet
) -> None:
    """Raise RequestError unless size and checksum are those announced."""
    if size != header.num_bytes:
        message = f"{size} bytes of weights where {header.num_bytes} were announced"
        raise RequestError(_Code.DATA_LOSS, message)
    if crc is not None and crc != header.crc32:
        message = f"checksum {crc:08x} of the weights where {header.crc32:08x} was announced"
        raise RequestError(_Code.DATA_LOSS, message)


@asynccontextmanager
async def _refusing(context, bad: grpc.StatusCode = _Code.INVALID_ARGUMENT) -> AsyncIterator[None]:
    """Answer errors of a call with a status, which is `bad` for a mistake of the caller."""
    try:
        yield
    except (RequestError, MissingImage, EngineStopped, ValueError, UserError) as error:
        code = error.code if isinstance(error, RequestError) else _CODES.get(type(error), bad)
        await context.abort(code, " ".join(str(error).split())[:2000])
