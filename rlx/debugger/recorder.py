"""A proxy between agents and a model server: forwards every request and records it.

    ANY http://127.0.0.1:PORT/SECRET/RUN/…      → the server, at …

It runs in a thread of its own, so that a blocked loop does not hold calls up. It reads chat
completions, completions and responses of OpenAI's API and messages of Anthropic's, as one JSON
object or as a stream of server-sent events; a body of another shape gives no words.
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import secrets
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.base import UserError, install

_HOST = "127.0.0.1"
_TEXT = 2_000  # characters kept of one message
_MESSAGES = 40  # messages kept of one request
_GENERATES = ("/completions", "/messages", "/responses")
_WRONG_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)
_PER_CONNECTION = {  # headers that are not for the other side, or are set anew
    "host", "content-length", "accept-encoding", "content-encoding", "connection", "keep-alive",
    "te", "upgrade", "transfer-encoding", "proxy-authorization", "expect",
}  # fmt: skip
_STOPS = re.compile(rb'"(finish|stop)_reason": ?"|response\.completed')
_KEYS = ("authorization", "x-api-key", "api-key")


@dataclass(slots=True)
class ModelCall:
    """An HTTP request of an agent, seen between it and the server.

    Attributes:
      run: number of the run whose base_url was used.
      path: what follows the base_url, `/chat/completions`.
      begin, first, end: seconds, monotonic, at which the request was read and the answer's first
        and last byte came; 0 where they did not.
      status: of HTTP; 0: no answer.
      error: the server's words where it refused, or what kept it from answering.
      model: as the agent asked for it.
      messages: (role, text) of the request, abbreviated.
      answer: the completion's text and tool calls, abbreviated.
      completion_id: the id by which a reward is given; "" where there is none.
      prompt_tokens, completion_tokens: as the server counts; −1 where it does not say.
      stop_reason: the server's word for it.
      streamed: whether the answer came as events.
    """

    run: int
    path: str
    begin: float
    end: float = 0.0
    first: float = 0.0
    status: int = 0
    error: str = ""
    model: str = ""
    messages: list[list[str]] = field(default_factory=list)
    answer: str = ""
    completion_id: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1
    stop_reason: str = ""
    streamed: bool = False

    @property
    def seconds(self) -> float:
        """Seconds from the request to the answer's end."""
        return self.end - self.begin

    @property
    def ok(self) -> bool:
        """Whether the server answered as asked."""
        return 200 <= self.status < 300 and not self.error

    @property
    def generates(self) -> bool:
        """Whether it asks for a completion; others list models and the like."""
        return self.path.endswith(_GENERATES)

    def ask(self, body: bytes) -> None:
        """Take the model and the messages from a request's body."""
        with contextlib.suppress(*_WRONG_SHAPE):
            request = json.loads(body)
            self.model = str(request.get("model") or "")
            said = request.get("messages") or request.get("input") or request.get("prompt") or []
            if not isinstance(said, list) or not all(isinstance(m, Mapping) for m in said):
                said = [{"role": "prompt", "content": said}]
            if system := request.get("system") or request.get("instructions"):
                said = [{"role": "system", "content": system}, *said]
            kept = [[str(m.get("role") or m.get("type")), shorten(_words(m))] for m in said]
            half, more = _MESSAGES // 2, len(kept) - _MESSAGES
            if more > 0:
                kept = [*kept[:half], ["…", f"{more} more"], *kept[-half:]]
            self.messages = kept

    def hear(self, body: bytes) -> None:
        """Take the answer's words, id, tokens and stop reason from its body, as far as it came."""
        if self.status >= 300:
            self.error = refusal(body) or f"status {self.status}"
            return
        with contextlib.suppress(*_WRONG_SHAPE):
            found = _assembled(body) if self.streamed else json.loads(body)
            choices = found.get("choices") or [found]
            more = f" [and {len(choices) - 1} more choices]" if len(choices) > 1 else ""
            self.answer = shorten(_words(choices[0].get("message") or choices[0]) + more)
            self.completion_id = str(found.get("id") or "")
            self.error = _refusal(found) if found.get("error") else ""
            stops = (choices[0].get("finish_reason"), found.get("stop_reason"), found.get("status"))
            self.stop_reason = str(next(filter(None, stops), ""))
            used = found.get("usage") or {}
            self.prompt_tokens = int(used.get("prompt_tokens", used.get("input_tokens", -1)))
            self.completion_tokens = int(
                used.get("completion_tokens", used.get("output_tokens", -1))
            )


class Recorder:
    """A context manager in which the proxy runs.

    Args:
      base_url: of the server, `http://host:port/v1`.
      api_key: the real one; agents get the attribute `api_key` in its place.
      model: put in every request of an agent; empty: the agent's own stays.
    """

    def __init__(self, base_url: str, api_key: str, model: str = ""):
        parts = urllib.parse.urlsplit(base_url)
        self._origin, self._path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
        self._key, self._model = api_key, model
        self.api_key = f"rlx-{secrets.token_hex(12)}"
        self._calls: list[ModelCall] = []
        self._ready, self._port = threading.Event(), 0

    def __enter__(self) -> "Recorder":
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise UserError(f"debugging needs the extra: {install('agents')} ({error})") from None
        _spare_loopback()
        with contextlib.suppress(ValueError, OSError):  # three sockets for each call in flight
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._thread = threading.Thread(target=self._run, name="rlx-recorder", daemon=True)
        self._thread.start()
        self._ready.wait()
        if not self._port:
            raise UserError("the recording proxy did not start; its traceback is above")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def base_url(self, run: int) -> str:
        """Return what a run gets as `base_url`; its calls are known by it."""
        return f"http://{_HOST}:{self._port}/{self.api_key}/{run}{self._path}"

    def calls(self) -> list[ModelCall]:
        """Return the calls until now in the order of their beginnings; unanswered have no `end`."""
        return list(self._calls)

    def connections(self) -> int:
        """Return how many connections agents have open."""
        return len(self._runner.server.connections) if self._runner.server else 0

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        import aiohttp
        from aiohttp import web

        from rlx.agents import http_errors

        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), trust_env=True,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self._session:  # fmt: skip
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", f"/{self.api_key}/{{run:\\d+}}/{{rest:.*}}", self._handle)
            self._runner = runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, logger=http_errors.LOGGER,
                handle_signals=False, shutdown_timeout=0,
            )  # fmt: skip
            await runner.setup()
            await web.TCPSite(runner, _HOST, 0, backlog=4096).start()
            self._port = runner.addresses[0][1]
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()

    async def _handle(self, request: Any) -> Any:
        import aiohttp
        from aiohttp import web

        rest = request.rel_url.raw_path_qs.split("/", 3)[3]
        path = f"/{rest.partition('?')[0]}".removeprefix(self._path)
        body = await request.read()
        call = ModelCall(int(request.match_info["run"]), path, time.monotonic())
        call.ask(body)
        self._calls.append(call)
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

    async def _forward(self, request: Any, url: str, body: bytes, call: ModelCall) -> Any:
        import yarl
        from aiohttp import web

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
            response = web.StreamResponse(status=answer.status, headers=back)
            content = b""
            if not call.streamed:
                content = await answer.read()
                response.content_length = len(content)
                call.hear(content)
                call.end = time.monotonic()  # before the agent can have read it
            await response.prepare(request)
            await response.write(content)
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


def _spare_loopback() -> None:
    """Keep clients that follow HTTP_PROXY from asking it for the way to this machine."""
    if any(os.environ.get(name) for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")):
        for name in ("NO_PROXY", "no_proxy"):
            known = os.environ.get(name, "")
            if _HOST not in known.split(","):
                os.environ[name] = ",".join(filter(None, (known, _HOST)))


def refusal(body: bytes) -> str:
    """Return a server's error message, from whichever shape it is in."""
    try:
        return _refusal(json.loads(body))
    except (ValueError, RecursionError):
        return " ".join(body.decode("utf-8", "replace").split())[:300]


def shorten(text: str, limit: int = _TEXT) -> str:
    """Return `text`, its middle cut out where it is longer than `limit` characters."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def _refusal(found: Any) -> str:
    for key in ("error", "detail", "message"):
        if isinstance(found, Mapping) and found.get(key):
            found = found[key]
    return " ".join(str(found).split())[:300]


def _words(value: Any) -> str:
    """Return the text of a message, a part or an answer; a tool call as `→ name(arguments)`."""
    match value:
        case str():
            return value
        case [int(), *_]:
            return f"[{len(value)} token ids]"
        case list():
            return " ".join(filter(None, map(_words, value)))
        case {"function": {"name": name, "arguments": given}}:
            return f"→ {name}({given})"
        case {"type": "tool_use" | "function_call", "name": name}:
            given = value.get("arguments", value.get("input"))
            return f"→ {name}({given if isinstance(given, str) else json.dumps(given)})"
        case {"text": str(text)}:
            return text
        case {"content": _} | {"output": _} | {"tool_calls": _}:
            return _words([value.get(key) for key in ("content", "output", "tool_calls")])
        case {"type": kind}:
            return f"[{kind}]"
    return ""


def _assembled(body: bytes) -> dict[str, Any]:
    """Return the object that one answer would have been, put together from a stream's events."""
    found: dict[str, Any] = {"content": ""}
    usage: dict[str, Any] = {}
    calls: dict[int, dict[str, str]] = {}
    for line in body.splitlines():
        if not line.startswith(b"data:") or not line.endswith(b"}"):  # [DONE], or cut off
            continue
        event = json.loads(line[5:])
        found |= event.get("response") or {}  # of /responses: the last one has it all
        begun = event.get("message") or {}  # of Anthropic's
        found["id"] = begun.get("id") or event.get("id") or found.get("id")
        found["error"] = event.get("error") or found.get("error")
        for part in (found, begun, event):
            usage |= part.get("usage") or {}
        delta = event.get("delta") or {}
        for choice in event.get("choices") or []:
            if choice.get("index", 0) == 0:
                delta = choice.get("delta") or {"content": choice.get("text")}
                found["stop_reason"] = choice.get("finish_reason") or found.get("stop_reason")
        if isinstance(delta, str):  # of /responses
            continue
        found["stop_reason"] = delta.get("stop_reason") or found.get("stop_reason")
        found["content"] += delta.get("content") or delta.get("text") or ""
        for call in delta.get("tool_calls") or []:
            kept = calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
            for key in kept:
                kept[key] += call["function"].get(key) or ""
    return {**found, "usage": usage, "tool_calls": [{"function": call} for call in calls.values()]}
