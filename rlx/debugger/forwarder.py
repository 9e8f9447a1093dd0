"""Forward agents' requests to a model server and record them by run. Imports aiohttp.

    ANY http://127.0.0.1:PORT/SECRET/RUN/v1/…      → BASE_URL/…

Requests and answers are recorded in any API of OpenAI or Anthropic, streams of server-sent events
included. A body of unknown shape gives no text.
"""

import contextlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yarl
from aiohttp import web

from rlx.agents.http_listener import HttpListener
from rlx.base import UserError, unknown

HOST = "127.0.0.1"
_PER_CONNECTION = {  # headers that are not forwarded
    "host", "content-length", "accept-encoding", "content-encoding", "connection", "keep-alive",
    "te", "upgrade", "transfer-encoding", "proxy-authorization", "expect",
}  # fmt: skip
_GENERATES = ("/completions", "/messages", "/responses")
_TEXT = 400  # characters of a message that are kept
_TEXTS = ("text", "thinking", "content", "partial_json", "output", "function", "tool_calls")
_ANSWERS = ("delta", "content_block", "item", "content", "output")  # of an event or an answer
_STOPS = ("finish_reason", "stop_reason", "status")
_WRONG_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)


@dataclass(slots=True)
class ModelCall:
    """A request for a completion and its answer."""

    path: str  # after the base_url
    begin: float  # monotonic seconds
    seconds: float = 0.0  # from there to the answer's end
    status: int = 0  # HTTP status, 0 without an answer
    error: str = ""  # the server's message, or why there is no answer
    model: str = ""
    messages: list[tuple[str, str]] = field(default_factory=list)  # (role, text), abbreviated
    answer: str = ""  # text and tool calls, abbreviated
    completion_id: str = ""
    stop_reason: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self.error

    def read_request(self, body: bytes, model: str = "") -> bytes:
        """Set model and messages from a body; return it, with another `model` if one is given."""
        with contextlib.suppress(*_WRONG_SHAPE):
            request = json.loads(body)
            if model and "model" in request:
                body = json.dumps({**request, "model": model}).encode()
            self.model = str(request.get("model") or "")
            messages = request.get("messages") or request.get("input") or request.get("prompt")
            if not isinstance(messages, list) or not isinstance(messages[0], Mapping):
                messages = [{"role": "prompt", "content": messages}]
            if system := request.get("system") or request.get("instructions"):
                messages = [{"role": "system", "content": system}, *messages]
            self.messages = [
                (str(m.get("role") or m.get("type")), shorten(_text(m))) for m in messages
            ]
        return body

    def read_answer(self, body: bytes) -> None:
        """Set text, id and stop reason from the received part of an answer's body."""
        if not self.ok:
            self.error = self.error or refusal(body) or "no answer"
            return
        events = [body]  # an answer that is no stream
        if not body.lstrip().startswith(b"{"):
            lines = (line[5:] for line in body.splitlines() if line.startswith(b"data:"))
            events = [line for line in lines if line.endswith(b"}")]  # complete ones
        with contextlib.suppress(*_WRONG_SHAPE):
            for event in [json.loads(event) for event in events]:
                head = event.get("response") or event.get("message") or event
                self.completion_id = self.completion_id or str(head.get("id") or "")
                if event.get("error"):
                    self.error = refusal(json.dumps(event).encode())
                choices = [c for c in event.get("choices") or [{}] if not c.get("index")]
                choice = choices[0] if choices else {}
                if not str(event.get("type")).endswith(".done"):  # repeats the text
                    texts = [choice.get(key) for key in ("message", "delta", "text")]
                    self.answer += _text([*texts, *map(event.get, _ANSWERS)])
                for part in (head, event.get("delta"), choice):
                    if isinstance(part, Mapping):
                        reason = next(filter(None, map(part.get, _STOPS)), self.stop_reason)
                        self.stop_reason = str(reason)
        self.answer = shorten(self.answer)


class Forwarder:
    """Async context manager with an address for each run."""

    def __init__(
        self,
        base_url: str,  # the server's, `http://host:port/v1`
        api_key: str,  # the server's; agents use the attribute `api_key` instead
        model: str = "",  # replaces the model in every request, unless empty
    ):
        self._server, self._key, self._model = base_url.rstrip("/"), api_key, model
        self.api_key = f"rlx-{secrets.token_hex(12)}"
        self._calls: defaultdict[str, list[tuple[ModelCall, bytearray]]] = defaultdict(list)

    async def __aenter__(self) -> "Forwarder":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=30), trust_env=True,
        )  # fmt: skip
        self._listener = HttpListener()
        app = web.Application(client_max_size=1 << 30, middlewares=[self._listener.watch])
        app.router.add_route("*", f"/{self.api_key}/{{run}}/v1/{{rest:.*}}", self._forward)
        self._port = await self._listener.open(app, HOST, 0, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()
        await self._session.close()

    def base_url(self, run: int) -> str:
        return f"http://{HOST}:{self._port}/{self.api_key}/{run}/v1"

    def calls(self, run: int) -> list[ModelCall]:
        """Return the calls of a finished run, in order."""
        pairs = self._calls.pop(str(run), [])
        for call, body in pairs:  # at the end, because an agent may abandon a stream
            call.read_answer(bytes(body))
        return [call for call, _ in pairs]

    async def models(self, seconds: float = 30.0) -> list[str]:
        """Return the names of the server's models, if it lists them; or raise UserError."""
        url, limit = f"{self._server}/models", aiohttp.ClientTimeout(total=seconds)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with self._session.get(url, headers=headers, timeout=limit) as answer:
                body = await answer.read()
            if answer.status in (404, 405) and self._model:
                return []  # some servers have no list
            if answer.status != 200:
                raise ValueError(f"{answer.status} {refusal(body)}")
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            problem = f"cannot list the models of {url} ({type(error).__name__}: {error})"
            remedy = "start the server, or correct --api_key or --base_url=http://HOST:PORT/v1"
            raise UserError(f"{problem}; {remedy}") from None
        if self._model and names and self._model not in names:
            raise unknown("model of the server", self._model, names)
        return names

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        rest = request.rel_url.raw_path_qs.split("/", 4)[4]
        if self._server.endswith("/v1"):  # Anthropic's clients add another
            rest = rest.removeprefix("v1/")
        call, content = ModelCall(f"/{rest.partition('?')[0]}", time.monotonic()), bytearray()
        body = call.read_request(await request.read(), self._model)
        if call.path.endswith(_GENERATES):
            self._calls[request.match_info["run"]].append((call, content))
        key, pairs = self._key or "none", _kept(request.headers)
        headers = {n: t.replace(self.api_key, key) for n, t in pairs}
        response = web.StreamResponse()
        try:
            async with self._session.request(
                request.method, yarl.URL(f"{self._server}/{rest}", encoded=True), data=body or None,
                headers=headers | {"Accept-Encoding": "identity"}, allow_redirects=False,
            ) as answer:  # fmt: skip
                call.status = answer.status
                response.set_status(answer.status)
                response.headers.update(_kept(answer.headers))
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    content += chunk
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


def refusal(body: bytes) -> str:
    """Return the message in an error's body, as one line."""
    value: Any = body.decode(errors="replace")
    with contextlib.suppress(*_WRONG_SHAPE):
        value = json.loads(body)
        for key in ("error", "detail", "message"):
            value = value[key] if isinstance(value, Mapping) and value.get(key) else value
    return " ".join(str(value).split())[:300]


def shorten(text: str) -> str:
    """Return `text` without its middle if it is long."""
    return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]} … {text[-_TEXT // 2 :]}"


def _kept(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [pair for pair in headers.items() if pair[0].lower() not in _PER_CONNECTION]


def _text(value: Any) -> str:
    """Return the text of a message, part or event; a tool call is `→ name arguments`."""
    if isinstance(value, list):
        return " ".join(filter(None, map(_text, value)))
    if not isinstance(value, Mapping):
        return value if isinstance(value, str) else ""
    for args in (value[key] for key in ("arguments", "input") if key in value):
        name = f" → {value['name']} " if value.get("name") else ""
        return name + (args if isinstance(args, str) else json.dumps(args) if args else "")
    if not any(key in value for key in _TEXTS):
        return f"[{value['type']}]" if "type" in value else ""
    return _text([value.get(key) for key in _TEXTS])
