"""The rollout server: port, token check and TLS around the service and its engine."""

import asyncio
import hmac
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc

from rlx.base import UserError
from rlx.cli.hangs import Sign, reported_here
from rlx.engines import server_metrics
from rlx.engines.engine import Engine
from rlx.engines.service import RolloutService
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet import tls as transport
from rlx.fleet import wire
from rlx.fleet.addresses import announced
from rlx.observe.traces import tracing
from rlx.system.host_port import bracketed

_CHECK_SECONDS = 0.25  # between checks of the engine
QUIET_SECONDS = 3.0  # without a call; a connected client calls Status every second
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers could share a port, and its calls
    # gRPC cancels calls beyond these numbers, by default 1000 and 3000.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    # Anyone may connect, and each connection takes a file descriptor.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
)


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without the bearer token, before reading the request."""

    def __init__(self, token: str):
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        token = dict(handler_call_details.invocation_metadata).get("authorization", "")
        token = token.encode() if isinstance(token, str) else token
        if handler is None or hmac.compare_digest(token, self._wanted):
            return handler
        return grpc.unary_unary_rpc_method_handler(_unauthenticated)


async def _unauthenticated(request, context):
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing bearer token")


class Server:
    """A rollout server; binds its port before it loads the model."""

    def __init__(
        self,
        engine: Callable[[], Engine],  # returns the engine; called in `start`
        *,
        port: int = 0,  # 0: any free one
        host: str = "127.0.0.1",
        token: str | None = None,  # bearer token that callers must send
        tls: transport.Tls | None = None,  # with a CA, callers must have certificates of it
        metrics_host: str = "127.0.0.1",  # address for Prometheus
        metrics_port: int = 0,  # 0: none
        asleep: bool = False,  # start without a cache, until the first Resume
        **service: Any,  # options of RolloutService
    ):
        transport.check_host(host, token, tls)
        if not 0 <= port < 1 << 16:
            raise UserError(f"port={port} is not in [0, 65535]; 0 is any free one")
        credentials = transport.server_credentials(tls) if tls else None
        self.meters = server_metrics.Meters()
        self._listener: WSGIServer | None = None
        self._tls = tls
        self._make_engine, self._service, self._asleep = engine, service, asleep
        self._engine: Engine | None = None
        self._rollouts: RolloutService | None = None
        self._grpc = grpc.aio.server(
            interceptors=(
                server_metrics.CallMeter(self.meters),
                *((_TokenCheck(token),) if token else ()),
            ),
            options=(
                *wire.OPTIONS,
                *_SERVER_OPTIONS,
                ("grpc.max_allowed_incoming_connections", getrlimit(RLIMIT_NOFILE)[0] // 2),
            ),
        )
        address = bracketed(host, port)
        try:
            if credentials:
                self.port = self._grpc.add_secure_port(address, credentials)
            else:
                self.port = self._grpc.add_insecure_port(address)
        except RuntimeError:
            raise UserError(
                f"cannot listen on {address}: port in use or not permitted; choose another, or 0 "
                "for any free one"
            ) from None
        if metrics_port:
            registry, near = self.meters.registry, transport.is_loopback(metrics_host)
            self._listener = server_metrics.listen(registry, metrics_host, metrics_port, tls)
            self.meters.port = metrics_port if near == transport.is_loopback(host) else 0

    async def start(self) -> None:
        """Start the engine and the service."""
        self._engine = self._make_engine()
        await self._engine.start()
        if self._asleep:
            await self._engine.pause(1)
        self._rollouts = RolloutService(
            self._engine, meters=self.meters, tls=self._tls, **self._service
        )
        self.meters.watch(self._rollouts.look)
        rpc.add_RolloutServicer_to_server(self._rollouts, self._grpc)
        await self._grpc.start()

    async def watch(self, end: asyncio.Event, quiet_seconds: float = math.inf) -> None:
        """Wait until `end` is set or no call came for `quiet_seconds`; EngineStopped on failure."""
        assert self._rollouts
        while not end.is_set() and self._rollouts.quiet_seconds < quiet_seconds:
            self._rollouts.look()
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _CHECK_SECONDS)

    def signs(self, woken: float) -> dict[str, Sign]:
        """Return the engine's sign of life: tokens and answers, while there are requests."""
        assert self._rollouts
        now, calls = self._rollouts.seen, self._rollouts
        mark = (now.tokens_generated, calls.answered) if calls.here and not now.paused else None
        words = f"{calls.here} samples asked for, {now.running} decoding, {now.queued} waiting"
        return {"engine": Sign(mark, lambda: f"the engine makes no token; {words}")}

    async def stop(self) -> None:
        """End running calls and the engine."""
        await self._grpc.stop(None)
        if self._listener:
            await asyncio.to_thread(self._listener.shutdown)
            self._listener.server_close()
        if self._rollouts:
            self._rollouts.close()
        if self._engine:
            await self._engine.close()


async def serve(
    engine: Callable[[], Engine],
    *,
    on_ready: Callable[[int], None],
    stop: asyncio.Event,
    join: str = "",  # directory to announce this server in; "": none
    drain_seconds: float = 0.0,
    traces: str = "",  # place of spans, as of `tracing`
    **options: Any,
) -> None:
    """Serve until `stop` is set; call `on_ready(port)` when the server answers calls.

    With `join`, the server finishes its requests after `stop`, for at most `drain_seconds` or until
    `stop`, cleared, is set again. UserError if the port is in use, the host needs a token and TLS,
    or a certificate or the engine is unusable. EngineStopped if the engine failed: restart the
    process.
    """
    with tracing(traces, "rlx-server") as tracer:
        server = Server(engine, tracer=tracer, **options)
        try:
            await server.start()
            host = options.get("host", "")
            with announced(join, host, server.port) if join else nullcontext():
                on_ready(server.port)
                with reported_here("the loop of all calls", server.signs):
                    await server.watch(stop)
            if join:
                stop.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(server.watch(stop, QUIET_SECONDS), drain_seconds)
        finally:
            await server.stop()
