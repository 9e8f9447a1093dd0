"""Listening rollout server: port, token check and TLS in front of the service and its engine."""

import asyncio
import hmac
from collections.abc import Callable
from contextlib import nullcontext, suppress
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc

from rlx.base import UserError
from rlx.engines import server_metrics
from rlx.engines.engine import Engine
from rlx.engines.service import RolloutService
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet import tls as transport
from rlx.fleet import wire
from rlx.fleet.joining import announced

_CHECK_SECONDS = 0.25  # between two checks of the engine
QUIET_SECONDS = 3.0  # without a call: a connected client asks for the status every second
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers may share a port, and each sees half of the calls
    # A burst of admissions may wait; beyond these numbers (default 1000, 3000) gRPC cancels calls.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    # Anyone may connect, and each connection takes a descriptor. A client that is at work asks for
    # the status every second.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
)


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Answer UNAUTHENTICATED to calls without the bearer token, before anything is read."""

    def __init__(self, token: str):
        self._wanted = f"Bearer {token}".encode()

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        given = given.encode() if isinstance(given, str) else given
        if handler is None or hmac.compare_digest(given, self._wanted):
            return handler
        return grpc.unary_unary_rpc_method_handler(_unauthenticated)


async def _unauthenticated(request, context):
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing bearer token")


class Server:
    """A rollout server. Its port is bound at once, so a taken one is found before a model loads.

    Args:
      engine: makes the engine; called in `start`, when the port is ours.
      host, port: address; port 0: any free one. token: bearer token that callers must send.
      tls: certificate and key, and the CA of the callers' certificates when they must have one.
      metrics_host, metrics_port: address of the Prometheus listener; port 0: none.
      service: see RolloutService.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        tls: transport.Tls | None = None,
        metrics_host: str = "127.0.0.1",
        metrics_port: int = 0,
        **service: Any,
    ):
        transport.check_host(host, token, tls)
        if not 0 <= port < 1 << 16:
            raise UserError(f"port={port} is not in [0, 65535]; 0 takes any free one")
        credentials = transport.server_credentials(tls) if tls else None
        self.meters = server_metrics.Meters()
        self._listener: WSGIServer | None = None
        self._make_engine, self._service = engine, service
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
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials:
                self.port = self._grpc.add_secure_port(address, credentials)
            else:
                self.port = self._grpc.add_insecure_port(address)
        except RuntimeError:
            raise UserError(
                f"cannot listen on {address}: the port is in use or not ours; choose another, or "
                "port 0 for any"
            ) from None
        if metrics_port:
            self._listener = server_metrics.listen(self.meters, metrics_host, metrics_port, tls)

    async def start(self) -> None:
        """Start the engine, then answer calls."""
        self._engine = self._make_engine()
        await self._engine.start()
        self._rollouts = RolloutService(self._engine, meters=self.meters, **self._service)
        self.meters.watch(self._rollouts.look)
        rpc.add_RolloutServicer_to_server(self._rollouts, self._grpc)
        await self._grpc.start()

    def check(self) -> None:
        """Raise EngineStopped when the engine is broken."""
        if self._rollouts:
            self._rollouts.look()

    async def watch(self, end: asyncio.Event) -> None:
        """Return when `end` is set; raise EngineStopped when the engine breaks."""
        while not end.is_set():
            self.check()
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _CHECK_SECONDS)

    async def drain(self, now: asyncio.Event) -> None:
        """Return when its clients have let go of the server, or `now` is set."""
        assert self._rollouts
        while self._rollouts.quiet_seconds < QUIET_SECONDS and not now.is_set():
            self.check()
            with suppress(TimeoutError):
                await asyncio.wait_for(now.wait(), _CHECK_SECONDS)

    async def stop(self) -> None:
        """End the running calls and the engine."""
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
    join: str = "",
    drain_seconds: float = 0.0,
    **options: Any,
) -> None:
    """Serve until `stop` is set; call `on_ready(port)` once calls are answered.

    Args:
      join: directory in which a file tells runs of this server while it takes new requests. After
        `stop` it serves those it has for `drain_seconds` at most, or until `stop` is set again
        (whoever sets it finds it clear); their clients take elsewhere what is not done then.

    Raises:
      UserError: the port is taken, the host needs a token and TLS, or a certificate or the engine
        cannot work.
      EngineStopped: the engine broke; the process must end, to be started again.
    """
    server = Server(engine, **options)
    try:
        await server.start()
        told = announced(join, options.get("host", ""), server.port) if join else nullcontext()
        with told:
            on_ready(server.port)
            await server.watch(stop)
        if join:
            stop.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(server.drain(stop), drain_seconds)
    finally:
        await server.stop()
