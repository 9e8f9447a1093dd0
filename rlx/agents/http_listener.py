"""Listening socket that bounds an HTTP server's open connections. Imports aiohttp.

Anyone can open connections, and each one takes a file descriptor. Above the limit they wait in the
kernel, and late or idle ones are closed.
"""

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ssl import SSLContext

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlx.base import UserError

MALFORMED = (HttpProcessingError, web.RequestPayloadError)  # of requests, status 400
LOGGER = logging.getLogger("aiohttp.server.rlx")
_BACKLOG = 4096  # connections that may wait in the kernel
_HANDSHAKE_SECONDS = 10.0
# Seconds for a connection's first request, for a body, and between two requests.
_LIMITS, _LIMITS_WHEN_FULL = (10.0, 60.0, float("inf")), (1.0, 10.0, 1.0)
_LOOK_SECONDS = 0.25
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Drops errors of malformed requests.
LOGGER.addFilter(lambda record: not isinstance((record.exc_info or [0, 0])[1], MALFORMED))


class HttpListener:
    """Accepts connections for an aiohttp server, at most half the process's limit of open files."""

    def __init__(self) -> None:
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._requests: dict[web.RequestHandler, web.Request] = {}  # in progress
        self._since: dict[web.RequestHandler, tuple[bool, float]] = {}  # (authorized, idle since)
        self._opening, self._warned = set[asyncio.Task](), False

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record when a request's connection became idle and whether it was authorized.

        It must be the outermost middleware of the application.
        """
        connection, authorized = request.protocol, False
        self._requests[connection], self._since[connection] = request, (True, time.monotonic())
        try:
            response = await handler(request)
            authorized = response.status != 401
            return response
        finally:
            del self._requests[connection]
            self._since[connection] = authorized, time.monotonic()

    async def open(self, app: web.Application, host: str, port: int, tls: SSLContext | None) -> int:
        """Start serving an application; return the port, or raise UserError if it is taken."""
        # `handler_cancellation`: a disconnected client's request is cancelled down to the engine.
        self._runner = web.AppRunner(
            app, access_log=None, logger=LOGGER, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        assert self._runner.server is not None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            await self._runner.cleanup()
            problem = f"cannot listen at {host}:{port}: {error.strerror}"
            raise UserError(f"{problem}; choose another port") from None
        self._socket.setblocking(False)
        self._server, self._tls = self._runner.server, tls
        self._looking = asyncio.create_task(self._look())
        return self._socket.getsockname()[1]

    async def close(self) -> None:
        """Stop accepting, close all connections and cancel their requests."""
        self._looking.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        await asyncio.gather(self._looking, *self._opening, return_exceptions=True)
        self._socket.close()
        await self._runner.cleanup()

    async def _look(self) -> None:
        while True:
            self._close_late(*(_LIMITS if self._room() > 0 else _LIMITS_WHEN_FULL))
            asyncio.get_running_loop().add_reader(self._socket, self._accept)
            await asyncio.sleep(_LOOK_SECONDS)

    def _room(self) -> int:
        return self._most - len(self._server.connections) - len(self._opening)

    def _accept(self) -> None:
        """Accept waiting connections; above the limit, pause until the next look."""
        # asyncio's own servers accept the whole backlog at once, and log a traceback for each
        # connection without a descriptor.
        why = f"{self._most} connections are open"
        for _ in range(self._room()):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                why = str(error.strerror)
                break
            connection.setblocking(False)
            task = asyncio.create_task(self._begin(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        asyncio.get_running_loop().remove_reader(self._socket)
        if not self._warned:
            self._warned = True
            LOGGER.warning("%s, and others wait; raise the limit of open files (ulimit -n)", why)

    async def _begin(self, connection: socket.socket) -> None:
        seconds = _HANDSHAKE_SECONDS if self._tls else None
        with suppress(OSError):  # the handshake failed or timed out
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server, connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )

    def _close_late(self, first: float, body: float, idle: float) -> None:
        now = time.monotonic()
        self._since = {c: self._since.get(c, (False, now)) for c in self._server.connections}
        for connection, (authorized, since) in self._since.items():
            limit = idle if authorized else first
            if request := self._requests.get(connection):
                limit = float("inf") if request.content.is_eof() else body
            if now - since > limit:
                connection.force_close()
