"""Keep malformed requests of clients out of an HTTP server's log. Imports aiohttp."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

CLIENTS = (HttpProcessingError, web.RequestPayloadError)  # malformed requests: answered with 400
LOGGER = logging.getLogger("aiohttp.server.rlx")


def _ours(record: logging.LogRecord) -> bool:
    """Return whether an error is the server's own, not a malformed request's."""
    return not (record.exc_info and isinstance(record.exc_info[1], CLIENTS))


LOGGER.addFilter(_ours)
