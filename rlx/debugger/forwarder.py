"""Forward agents' requests to a model server and record them by run. Imports aiohttp.

ANY http://127.0.0.1:PORT/SECRET/RUN/v1/…      → BASE_URL/…
"""

import contextlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping

import aiohttp
import yarl
from aiohttp import web

from rlx.base import UserError, unknown
from rlx.debugger.model_call import ModelCall, refusal

HOST = "127.0.0.1"
_BACKLOG = 4096  # connections that may wait to be accepted
_PER_CONNECTION = {  # headers that are not forwarded
    "host", "content-length", "accept-encoding", "content-encoding", "connection", "keep-alive",
    "te", "upgrade", "transfer-encoding", "proxy-authorization", "expect",
}  # fmt: skip
_GENERATES = ("/completions", "/messages", "/responses")


class Forwarder:
    """Async context manager with an address for each run.

    Args:
      base_url: the server's, `http://host:port/v1`.
      api_key: the server's; agents use the attribute `api_key` instead.
      model: replaces the model in every request, unless empty.
    """

    def __init__(self, base_url: str, api_key: str, model: str = ""):
        self._server, self._key, self._model = base_url.rstrip("/"), api_key, model
        self.api_key = f"rlx-{secrets.token_hex(12)}"
        self._calls: defaultdict[str, list[tuple[ModelCall, bytearray]]] = defaultdict(list)

    async def __aenter__(self) -> "Forwarder":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=30), trust_env=True,
        )  # fmt: skip
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", f"/{self.api_key}/{{run}}/v1/{{rest:.*}}", self._forward)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=_BACKLOG).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def base_url(self, run: int) -> str:
        """Return the `base_url` of a run."""
        return f"http://{HOST}:{self._runner.addresses[0][1]}/{self.api_key}/{run}/v1"

    def calls(self, run: int) -> list[ModelCall]:
        """Return the calls of a finished run, in order."""
        found = self._calls.pop(str(run), [])
        for call, body in found:  # at the end, because an agent may abandon a stream
            call.read_answer(bytes(body))
        return [call for call, _ in found]

    async def models(self, seconds: float = 30.0) -> list[str]:
        """Return the names of the server's models, if it lists them.

        Raises:
          UserError: the server does not answer within `seconds`, refuses, or lacks the model.
        """
        url, limit = f"{self._server}/models", aiohttp.ClientTimeout(total=seconds)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with self._session.get(url, headers=headers, timeout=limit) as answer:
                body = await answer.read()
            if answer.status in (404, 405) and self._model:
                return []  # some servers have no list
            if answer.status != 200:
                raise ValueError(f"{answer.status} {refusal(body)}")
            found = [str(model["id"]) for model in json.loads(body)["data"]]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"cannot list the models of {url} ({type(error).__name__}: {error}); start the "
                "server, or correct --api_key or --base_url=http://HOST:PORT/v1"
            ) from None
        if self._model and found and self._model not in found:
            raise unknown("model of the server", self._model, found)
        return found

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        rest = request.rel_url.raw_path_qs.split("/", 4)[4]
        if self._server.endswith("/v1"):  # Anthropic's clients add another
            rest = rest.removeprefix("v1/")
        body, got = await request.read(), bytearray()
        call = ModelCall(f"/{rest.partition('?')[0]}", time.monotonic())
        call.read_request(body)
        if call.path.endswith(_GENERATES):
            self._calls[request.match_info["run"]].append((call, got))
        response = web.StreamResponse()
        try:
            async with self._session.request(
                request.method, yarl.URL(f"{self._server}/{rest}", encoded=True),
                data=self._with_model(body) or None, headers=self._headers(request),
                allow_redirects=False,
            ) as answer:  # fmt: skip
                call.status = answer.status
                response.set_status(answer.status)
                response.headers.update(_kept(answer.headers))
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    got += chunk
                    call.seconds = time.monotonic() - call.begin
                    with contextlib.suppress(ConnectionResetError):  # the agent left
                        await response.write(chunk)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            call.error = f"{type(error).__name__}: {error}"
            if not response.prepared:
                return web.json_response({"error": {"message": call.error}}, status=502)
            assert request.transport
            request.transport.abort()
        return response

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Return a request's headers with the server's key."""
        key, own = self._key or "none", _kept(request.headers)
        return {n: t.replace(self.api_key, key) for n, t in own} | {"Accept-Encoding": "identity"}

    def _with_model(self, body: bytes) -> bytes:
        """Return the body with `model` replaced."""
        with contextlib.suppress(ValueError):
            found = json.loads(body) if self._model else None
            if isinstance(found, dict) and "model" in found:
                return json.dumps({**found, "model": self._model}).encode()
        return body


def _kept(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [pair for pair in headers.items() if pair[0].lower() not in _PER_CONNECTION]
