"""Listening socket of an HTTP server that strangers cannot exhaust. Imports aiohttp.

Opening a connection takes no key, and each one takes a descriptor of this process. So connections
wait in the kernel while there are too many, and those that are late or idle are closed.
"""

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

CLIENTS = (HttpProcessingError, web.RequestPayloadError)  # malformed requests: answered with 400
LOGGER = logging.getLogger("aiohttp.server.rlx")
_BACKLOG = 4096  # connections of a burst that may wait to be accepted
_HANDSHAKE_SECONDS = 10.0
# Seconds that a connection has for its first request, for a body, and between two requests.
_LIMITS, _LIMITS_WHEN_FULL = (10.0, 60.0, float("inf")), (1.0, 10.0, 1.0)
_LOOK_SECONDS = 0.25
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a logged error is the server's own, not a malformed request's."""
    return not (record.exc_info and isinstance(record.exc_info[1], CLIENTS))


LOGGER.addFilter(_is_ours)


class HttpListener:
    """Port of an aiohttp server; `watch` must be the outermost middleware of its application.

    At one time it has half as many connections as this process may open files.
    """

    def __init__(self) -> None:
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._requests: dict[web.RequestHandler, web.Request] = {}  # in a handler
        self._since: dict[web.RequestHandler, tuple[bool, float]] = {}  # had a right key; idle
        self._opening, self._warned = set[asyncio.Task](), False

    @web.middleware
    async def watch(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Record since when the connection of a request is idle, and whether its key was right."""
        own, right = request.protocol, False
        self._requests[own], self._since[own] = request, (True, time.monotonic())
        try:
            response = await handler(request)
            right = response.status != 401
            return response
        finally:
            del self._requests[own]
            self._since[own] = right, time.monotonic()

    def open(self, server: web.Server, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Begin to accept connections; return the port. Raises OSError if it cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._server, self._tls = server, tls
        self._looking = asyncio.create_task(self._look())
        return self._socket.getsockname()[1]

    async def close(self) -> None:
        """Accept no more; those that were accepted are connections of the server afterwards."""
        self._looking.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        await asyncio.gather(self._looking, *self._opening, return_exceptions=True)
        self._socket.close()

    async def _look(self) -> None:
        while True:
            self._close_late(*(_LIMITS if self._room() > 0 else _LIMITS_WHEN_FULL))
            asyncio.get_running_loop().add_reader(self._socket, self._accept)
            await asyncio.sleep(_LOOK_SECONDS)

    def _room(self) -> int:
        return self._most - len(self._server.connections) - len(self._opening)

    def _accept(self) -> None:
        """Accept what waits, or stop until the next look where no more can be."""
        # asyncio's own servers accept a whole backlog at once, and log a traceback for each
        # connection that finds no descriptor.
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
        with suppress(OSError):  # a handshake that failed or took too long
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server, connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )

    def _close_late(self, first: float, body: float, idle: float) -> None:
        now = time.monotonic()
        self._since = {c: self._since.get(c, (False, now)) for c in self._server.connections}
        for connection, (right, since) in self._since.items():
            limit = idle if right else first
            if request := self._requests.get(connection):
                limit = float("inf") if request.content.is_eof() else body
            if now - since > limit:
                connection.force_close()
