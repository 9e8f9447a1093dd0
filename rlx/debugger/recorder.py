"""A proxy between agents and a model server: forwards every request and records it.

    ANY http://127.0.0.1:PORT/SECRET/RUN/…      → the server, at …

It runs in a thread of its own, so that a blocked loop does not hold calls up. Imports aiohttp.
"""

import contextlib
import json
import re
import secrets
import time
import urllib.parse

import aiohttp
import yarl
from aiohttp import web

from rlx.agents import http_clients, http_errors
from rlx.agents.http_listener import HttpListener
from rlx.debugger.model_call import ModelCall
from rlx.system.loop_thread import LoopThread

_HOST = "127.0.0.1"
_PER_CONNECTION = {  # headers that are not for the other side, or are set anew
    "host", "content-length", "accept-encoding", "content-encoding", "connection", "keep-alive",
    "te", "upgrade", "transfer-encoding", "proxy-authorization", "expect",
}  # fmt: skip
_STOPS = re.compile(rb'"(finish|stop)_reason": ?"|response\.completed')
_KEYS = ("authorization", "x-api-key", "api-key")


class Recorder:
    """A context manager in which the proxy runs.

    Args:
      base_url: of the server, `http://host:port/v1`.
      api_key: the real one; agents get the attribute `api_key` in its place.
      model: put in every request of an agent; empty: the agent's own stays.

    Attributes:
      calls: in the order of their beginnings; unanswered ones have no `end`.
    """

    def __init__(self, base_url: str, api_key: str, model: str = ""):
        parts = urllib.parse.urlsplit(base_url)
        self._origin, self._path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
        self._key, self._model = api_key, model
        self.api_key = f"rlx-{secrets.token_hex(12)}"
        self.calls: list[ModelCall] = []
        self._thread = LoopThread("rlx-recorder")

    def __enter__(self) -> "Recorder":
        http_clients.spare(_HOST)
        self._thread.start()
        self._thread.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._stop())
        self._thread.close()

    def base_url(self, run: int) -> str:
        """Return what a run gets as `base_url`; its calls are known by it."""
        return f"http://{_HOST}:{self._port}/{self.api_key}/{run}{self._path}"

    def connections(self) -> int:
        """Return how many connections agents have open."""
        return len(self._runner.server.connections) if self._runner.server else 0

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), trust_env=True,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            cookie_jar=aiohttp.DummyCookieJar(),
        )  # fmt: skip
        self._listener = HttpListener()
        app = web.Application(middlewares=[self._listener.watch], client_max_size=1 << 30)
        app.router.add_route("*", f"/{self.api_key}/{{run:\\d+}}/{{rest:.*}}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_errors.LOGGER,
            handle_signals=False, shutdown_timeout=0,
        )  # fmt: skip
        await self._runner.setup()
        assert self._runner.server is not None
        self._port = self._listener.open(self._runner.server, _HOST, 0, None)

    async def _stop(self) -> None:
        await self._listener.close()
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        rest = request.rel_url.raw_path_qs.split("/", 3)[3]
        path = f"/{rest.partition('?')[0]}".removeprefix(self._path)
        body = await request.read()
        call = ModelCall(int(request.match_info["run"]), path, time.monotonic())
        call.ask(body)
        self.calls.append(call)
        try:
            return await self._forward(request, f"{self._origin}/{rest}", self._named(body), call)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # After a stop reason the agent has left a stream of which it had read all.
            call.error = "" if call.stop_reason else f"{type(error).__name__}: {error}"
            answer = {"error": {"message": call.error, "type": "no_answer"}}
            return web.json_response(answer, status=502)
        finally:
            if not call.stop_reason and not call.error and not call.end:
                call.error = "the agent hung up before the answer was whole"
            call.end = call.end or time.monotonic()

    async def _forward(
        self, request: web.Request, url: str, body: bytes, call: ModelCall
    ) -> web.StreamResponse:
        headers = {"Accept-Encoding": "identity"}
        for name, value in request.headers.items():
            ours = name.lower() in _KEYS and self.api_key in value
            if name.lower() not in _PER_CONNECTION and (self._key or not ours):
                headers[name] = value.replace(self.api_key, self._key) if ours else value
        async with self._session.request(
            request.method, yarl.URL(url, encoded=True), data=body or None, headers=headers,
            allow_redirects=False,
        ) as answer:  # fmt: skip
            call.first, call.status = time.monotonic(), answer.status
            call.streamed = answer.content_type == "text/event-stream"
            back = {k: v for k, v in answer.headers.items() if k.lower() not in _PER_CONNECTION}
            if not call.streamed:
                content = await answer.read()
                call.hear(content)
                call.end = time.monotonic()  # before the agent can have read it
                return web.Response(body=content, status=answer.status, headers=back)
            response = web.StreamResponse(status=answer.status, headers=back)
            await response.prepare(request)
            content = b""
            async for chunk in answer.content.iter_any():
                content += chunk
                if _STOPS.search(chunk):  # many agents leave a stream there
                    call.hear(content)
                    call.end = time.monotonic() if call.stop_reason else 0.0
                await response.write(chunk)
            call.hear(content)
            call.end = time.monotonic()
            await response.write_eof()
            return response

    def _named(self, body: bytes) -> bytes:
        """Return the body, asking for the model that every call is to have."""
        with contextlib.suppress(ValueError):
            found = json.loads(body) if self._model else None
            if isinstance(found, dict) and "model" in found:
                return json.dumps({**found, "model": self._model}).encode()
        return body
