"""A process between agents and a model server: forwards everything, and notes what it was.

It is a process of its own so that an agent that blocks its loop, or the interpreter, does not
distort what is measured. `rlx.agents.recorder` starts it; the real API key lives here alone.

    GET /SECRET/calls?since=N           what was noted
    ANY /SECRET/RUN/…                   → the server, at …
"""

import asyncio
import contextlib
import dataclasses
import json
import resource
import sys
import time
from typing import Any

from rlx.agents.exchange import Call, answered, asked, ended, refusal

HOST = "127.0.0.1"
_OURS = {"host", "content-length", "accept-encoding", "connection", "keep-alive", "te", "upgrade",
         "transfer-encoding", "proxy-authorization", "expect"}  # fmt: skip
_THEIRS = {"content-length", "content-encoding", "transfer-encoding", "connection", "keep-alive"}
_TAIL = 200  # bytes in which the last event of a stream is looked for


class Proxy:
    """The notes, and the handler that makes them.

    Args:
      origin: scheme and host of the server.
      api_key: put where the agent sent `secret`; empty: none is sent.
      model: put in every request; empty: the agent's own.
      session: of aiohttp, towards the server.
    """

    def __init__(self, origin: str, api_key: str, secret: str, model: str, session: Any):
        self._origin, self._key, self._secret, self._model = origin, api_key, secret, model
        self._session = session
        self._done: list[Call] = []
        self._open: dict[int, _Exchange] = {}
        self._count = 0

    async def handle(self, request: Any) -> Any:
        """Answers one request of an agent, or of the recorder."""
        from aiohttp import web

        parts = request.rel_url.raw_path.split("/", 3)  # "", secret, run, rest
        if len(parts) < 3 or parts[1] != self._secret:
            return web.json_response({"error": {"message": "not a path of a run"}}, status=404)
        if parts[2] == "calls":
            return web.json_response(self._notes(int(request.query.get("since", 0))))
        rest = "/" + (parts[3] if len(parts) > 3 else "")
        body = await request.read()
        note = Call(int(parts[2]), rest, time.monotonic(), 0.0, **asked(body))
        headers, own_key = self._headers(request.headers)
        number, self._count = self._count, self._count + 1
        exchange = _Exchange(dataclasses.replace(note, own_key=own_key))
        self._open[number] = exchange

        def finish(**fields: Any) -> None:
            if self._open.pop(number, None):
                call = dataclasses.replace(exchange.call, end=time.monotonic(), **fields)
                self._done.append(call)

        query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
        try:
            return await self._forward(
                request, self._origin + rest + query, headers, body, exchange, finish
            )
        finally:  # also where the agent hung up, and this handler was cancelled
            finish(**exchange.cut())

    async def _forward(self, request, url, headers, body, exchange, finish) -> Any:
        import aiohttp
        import yarl
        from aiohttp import web

        try:
            async with self._session.request(
                request.method, yarl.URL(url, encoded=True), data=self._named(body) or None,
                headers=headers, allow_redirects=False,
            ) as answer:  # fmt: skip
                back = {k: v for k, v in answer.headers.items() if k.lower() not in _THEIRS}
                streamed = answer.content_type == "text/event-stream"
                exchange.note(status=answer.status, streamed=streamed)
                if streamed:
                    return await _stream(request, answer, back, exchange, finish)
                content = await answer.read()
                finish(**exchange.whole(content))
                return web.Response(status=answer.status, headers=back, body=content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
            finish(error=text)
            return web.json_response({"error": {"message": text, "type": "no_answer"}}, status=502)

    def _notes(self, since: int) -> dict[str, Any]:
        return {
            "done": [dataclasses.asdict(call) for call in self._done[since:]],
            "open": [dataclasses.asdict(exchange.so_far()) for exchange in self._open.values()],
        }

    def _headers(self, given: Any) -> tuple[list[tuple[str, str]], bool]:
        """(headers for the server, whether the agent sent a key of its own)."""
        out, own = [("Accept-Encoding", "identity")], True
        for name, value in given.items():
            if name.lower() in _OURS:
                continue
            if name.lower() in ("authorization", "x-api-key", "api-key") and self._secret in value:
                own = False
                if not self._key:
                    continue
                value = value.replace(self._secret, self._key)
            out.append((name, value))
        return out, own

    def _named(self, body: bytes) -> bytes:
        """The body with the model that every call is to have."""
        if not self._model:
            return body
        try:
            found = json.loads(body)
        except ValueError:
            return body
        if not isinstance(found, dict) or "model" not in found:
            return body
        return json.dumps({**found, "model": self._model}).encode()


class _Exchange:
    """A call as far as it is known."""

    def __init__(self, call: Call):
        self.call = call
        self.content = bytearray()  # of a stream

    def note(self, **fields: Any) -> None:
        """The answer begins."""
        self.call = dataclasses.replace(self.call, first=time.monotonic(), **fields)

    def so_far(self) -> Call:
        """The call with what came of its stream; it ends now if a stop reason did."""
        if not self.content:
            return self.call
        found = answered(bytes(self.content), True)
        return dataclasses.replace(self.call, end=time.monotonic(), **found)

    def cut(self) -> dict[str, Any]:
        """Of an agent that hung up: well enough, if it had the completion and its stop reason."""
        found = answered(bytes(self.content), True) if self.content else {}
        if not found.get("stop_reason"):
            found["error"] = "the agent hung up before the answer was whole"
        return found

    def whole(self, content: bytes) -> dict[str, Any]:
        """What the whole answer tells."""
        if not 200 <= self.call.status < 300:
            return {"error": refusal(content) or f"status {self.call.status}"}
        return answered(content, self.call.streamed)


async def _stream(request: Any, answer: Any, headers: Any, exchange: _Exchange, finish: Any) -> Any:
    from aiohttp import web

    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    content = exchange.content
    async for chunk in answer.content.iter_any():
        content += chunk
        if ended(bytes(content[-len(chunk) - _TAIL :])):
            finish(**exchange.whole(bytes(content)))  # noted before the agent can have read it
        await response.write(chunk)
    finish(**exchange.whole(bytes(content)))
    await response.write_eof()
    return response


async def serve(settings: dict[str, str], until: asyncio.Event, say: Any) -> None:
    """Listens on a free port of loopback, tells it by `say(port)`, and ends with `until`."""
    import aiohttp
    from aiohttp import web

    from rlx.agents import http_errors

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=True, auto_decompress=True,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:  # fmt: skip
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{rest:.*}", Proxy(session=session, **settings).handle)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_errors.LOGGER,
            shutdown_timeout=0,
        )  # fmt: skip
        await runner.setup()
        await web.TCPSite(runner, HOST, 0, backlog=4096).start()
        say(runner.addresses[0][1])
        await until.wait()
        await runner.cleanup()


async def _main() -> None:
    """Settings are the first line of stdin; its end is ours."""
    loop = asyncio.get_running_loop()
    settings = json.loads(await asyncio.to_thread(sys.stdin.readline))
    until = asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def parent() -> None:
        await reader.read()
        until.set()

    watching = asyncio.create_task(parent())
    await serve(settings, until, lambda port: print(port, flush=True))
    await watching


if __name__ == "__main__":
    with contextlib.suppress(ValueError, OSError):  # two sockets for each call in flight
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
