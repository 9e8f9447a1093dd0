"""Create agents' `http_client`: one connection pool for all runs of a process."""

import importlib
import os
import ssl
from typing import Any


def spare(host: str) -> None:
    """Exclude a host from HTTP_PROXY, if one is set."""
    names = (f"{kind}_proxy" for kind in ("http", "https", "all"))
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in names):
        for name in ("NO_PROXY", "no_proxy"):
            known = os.environ.get(name, "").split(",")
            os.environ[name] = ",".join(filter(None, [*known, *({host} - set(known))]))


class HttpClients:
    """Creates clients of the HTTP library that the installed `openai` uses; None without `openai`.

    Closing a client, as `async with AsyncOpenAI(http_client=…)` does, keeps the pool open.
    """

    def __init__(self) -> None:
        try:
            base = importlib.import_module("openai").DefaultAsyncHttpxClient
        except (ImportError, AttributeError):
            self._library: Any = None
            return
        names = [c.__module__ for c in base.__mro__ if c.__name__ == "AsyncClient"]
        self._library = importlib.import_module(names[0].partition(".")[0])
        limits = self._library.Limits(max_connections=None, max_keepalive_connections=256)
        # On other nodes $SSL_CERT_FILE holds the certificate of the trainer's gateway.
        verify = ssl.create_default_context() if os.environ.get("SSL_CERT_FILE") else True
        self._pool = self._library.AsyncHTTPTransport(limits=limits, trust_env=False, verify=verify)
        pool = self._pool

        class SharedPool(self._library.AsyncBaseTransport):  # type: ignore[name-defined]
            async def handle_async_request(self, request: Any) -> Any:
                return await pool.handle_async_request(request)

        self._transport = SharedPool

    def new(self) -> Any:
        """Return a client for one run, which ignores proxies."""
        if self._library is None:
            return None
        return self._library.AsyncClient(
            transport=self._transport(), trust_env=False, follow_redirects=True, timeout=None
        )

    async def close(self) -> None:
        """Close the pool."""
        if self._library is not None:
            await self._pool.aclose()
