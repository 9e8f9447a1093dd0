"""Serve the HTTP APIs of OpenAI and Anthropic from the fleet. Imports aiohttp (extra `agents`).

    POST /v1/chat/completions   messages → chat template → tokens → fleet → text, tool calls
    POST /v1/responses          the same in OpenAI's newer API (responses.py)
    POST /v1/messages           and in Anthropic's (messages.py); /v1/messages/count_tokens
    GET  /v1/models, /health
    /v1/sessions, /v1/session   sessions of outside applications (online_routes.py)

Each request belongs to the session of its API key, in `Authorization`, `x-api-key` or the address
(/KEY/v1/…). The session records every answer with its tokens.
"""

import asyncio
import inspect
import json
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
from aiohttp import web

from rlx.agents import dialects, http_listener, online_routes, returns
from rlx.agents.dialects import ApiError, ChatRequest, Choice, Event, Reply, TooLong
from rlx.agents.http_listener import HttpListener
from rlx.agents.online import OnlineSessions
from rlx.agents.sessions import Interaction, Session, Sessions, TurnPlace, message_key
from rlx.agents.stream_text import Logprobs, StreamText, token_bytes
from rlx.agents.tool_calls import Reader
from rlx.base import UserError, packages_of, with_images
from rlx.engines.stop_strings import cut
from rlx.fleet import tls as fleet_tls
from rlx.fleet.client import Fleet
from rlx.fleet.member import Failed
from rlx.fleet.requests import Chunk, Sampling
from rlx.fleet.sample import Completion
from rlx.fleet.tls import Tls
from rlx.observe import traces
from rlx.rollout import workflows
from rlx.rollout.control_tokens import controls, own_text, plain, shielded
from rlx.rollout.images import ImagePrompts, image_part, images_in, is_image
from rlx.system.host_port import bracketed
from rlx.system.threads import DaemonThreads, in_thread

MAX_BODY = 16 << 20  # bytes of a request
_SMALL = 8 << 10  # bytes of a body that is parsed on the event loop, not in a thread
_DIALECTS = {  # route → module and class
    "/v1/chat/completions": ("rlx.agents.chat", "ChatReply"),
    "/v1/responses": ("rlx.agents.responses", "ResponseReply"),
    "/v1/messages": ("rlx.agents.messages", "MessageReply"),
}
_COUNT = "/v1/messages/count_tokens"
_SAMPLING_FIELDS = re.compile(rf"\b(?:{'|'.join(Sampling.__dataclass_fields__)})\b")
_FIELDS = {  # the API's names of fields of Sampling
    "guide": "response_format", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
}  # fmt: skip
_RETRIES = "x-stainless-retry-count"  # header of OpenAI's and Anthropic's clients
_MOST_RETRY = 600  # seconds in a Retry-After, at least 1


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for the fleet."""

    session: Session
    chat: ChatRequest
    text: str  # the rendered prompt
    tokens: np.ndarray  # [P] int32
    forced: str  # start of a tool call at the end of the prompt, or ""
    images: tuple[str, ...]  # names of those in the prompt
    parent: int | None  # number of the session's interaction whose tokens the prompt begins with
    place: TurnPlace  # its place in the session's conversations
    retry: bool = False  # whether the client resent it after losing an answer
    began: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Gateway:
    """HTTP server on the running loop, from `start` to `stop`; UserError for invalid TLS files."""

    fleet: Fleet  # generates on the same loop
    tokenizer: Any  # the served model's, with its chat template
    _: KW_ONLY
    name: str = "default"  # the model's name in /v1/models
    tool_format: str = ""  # see `Reader`; "" derives it from the chat template
    host: str = "127.0.0.1"  # host, port: listen address; port 0 takes a free one
    port: int = 0
    tls: Tls | None = None
    online: OnlineSessions | None = None  # sessions of outside applications, closed by `stop`
    images: ImagePrompts | None = None  # of the model; None: it takes none

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        self._tls = fleet_tls.https(self.tls) if self.tls else None
        self.sessions, self._sweeping = Sessions(), set[asyncio.Task]()
        self._reader = Reader(str(tokenizer.chat_template), self.tool_format)
        marks = {*self._reader.opens, *(self._reader.tags or ())}
        added = tokenizer.added_tokens_decoder.items()
        self._hidden = {k for k, t in added if t.special and t.content not in marks}
        self._token_bytes = token_bytes(tokenizer)
        self._longest = max(map(len, tokenizer.get_vocab()))  # most characters of a token
        self._template_own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._dialects: dict[str, type[Reply]] = {}  # by route
        self._created = int(time.time())
        self._listener, self._started = HttpListener(), False
        self._threads = DaemonThreads(2)

    async def start(self) -> None:
        """Start listening; raise UserError if the port or a package is missing."""
        with packages_of("agents", "agents need packages"):
            self._dialects = await in_thread(_load_dialects)
        around = (self._listener.watch, _errors_as_json)
        app = web.Application(middlewares=around, client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        # Anthropic's clients add /v1 to a base_url, OpenAI's do not: both may use the same.
        for prefix in ("", "/v1", "/{key}", "/{key}/v1"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}{_COUNT}", self._count)
            app.router.add_post(f"{prefix}/v1/rewards", self._reward)
            for route, dialect in self._dialects.items():
                app.router.add_post(f"{prefix}{route}", partial(self._answer, dialect))
            if self.online:
                online_routes.add(app.router, prefix, self.online)
        self.port = await self._listener.open(app, self.host, self.port, self._tls)
        self._started = True
        if self.online:
            self._sweeping.add(asyncio.create_task(self.online.run()))

    async def stop(self) -> None:
        """Close all connections and cancel their requests."""
        if self._started:
            await self._listener.close()
            self._started = False
        for task in self._sweeping:
            task.cancel()
        await asyncio.gather(*self._sweeping, return_exceptions=True)
        if self.online:
            self.online.close()
            self.online = None

    def base_url(self, session: Session | None = None) -> str:
        """Return the address for clients; a session's address works with any API key."""
        key = f"/{session.key}" if session else ""
        return f"http{'s' if self._tls else ''}://{bracketed(self.host, self.port)}{key}/v1"

    # The calls.

    async def _health(self, request: web.Request) -> web.Response:
        if self.fleet and not self.fleet.live:
            raise ApiError(503, "no server is live; look at the servers' logs", code="no_server")
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        date = datetime.fromtimestamp(self._created, UTC).isoformat()
        openai = {"id": self.name, "object": "model", "created": self._created, "owned_by": "rlx"}
        anthropic = {"type": "model", "display_name": self.name, "created_at": date}
        pages = {"has_more": False, "first_id": self.name, "last_id": self.name}
        return web.json_response({"object": "list", "data": [{**openai, **anthropic}], **pages})

    async def _answer(self, dialect: type[Reply], request: web.Request) -> web.StreamResponse:
        with self._request_session(request, dialect) as session:
            p = await self._read(request, session, dialect)
            # On the event loop, because two threads could give equal prompts the same seed.
            default, seed = session.seed(p.tokens), p.chat.sampling.seed
            sampling = replace(
                p.chat.sampling, seed=default if seed is None else seed % 2**31,
                return_masks=session.temperature_fixed and bool(p.chat.sampling.truncation),
            )  # fmt: skip
            retry = request.headers.get(_RETRIES, "0") != "0" and session.answered_before(p.text)
            p = replace(p, chat=replace(p.chat, sampling=sampling), retry=retry)
            reply = dialect(_new_id(dialect.ID), int(time.time()), p.chat, len(p.tokens))
            try:
                if p.chat.stream:
                    return await self._stream(request, self._events(p, reply))
                choices = self._keep(p, reply.id, await self._generate(p))
                return web.json_response(reply.full(choices))
            except BaseException:
                session.failed(reply.id, p.text)
                raise

    async def _reward(self, request: web.Request) -> web.Response:
        """Accept a reward sent over HTTP, for a run that returns none."""
        body = dialects.parse(await request.read())
        if self.online and (response := online_routes.reward(self.online, request, body)):
            return response
        session = self._session(request)
        if session.endless:
            raise ApiError(404, "this gateway does not train, so it takes no rewards")
        value = body.get("reward") if isinstance(body, dict) else None
        ids = {i.completion_id for i in session.interactions}
        if wrong := returns.mistake(value, ids, "the reward is"):
            raise ApiError(400, wrong, "reward")
        session.reward = value
        session.rewarded.set()
        return web.json_response({"completions": len(ids)})

    async def _count(self, request: web.Request) -> web.Response:
        dialect = self._dialects["/v1/messages"]
        with self._request_session(request, dialect) as session:
            p = await self._read(request, session, dialect)
            return web.json_response({"input_tokens": len(p.tokens)})

    @contextmanager
    def _request_session(self, request: web.Request, dialect: type[Reply]) -> Iterator[Session]:
        """Yield the request's session; its end cancels the request."""
        session, task = self._session(request), asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            with traces.span("gateway", *session.trace, api=dialect.__name__):
                yield session
        except ApiError as error:  # name fields as the API does
            if isinstance(error, TooLong):
                raise TooLong(*error.sizes, dialect.TOO_LONG) from error
            head, dot, rest = error.param.partition(".")
            error.param = dialect.NAMES.get(head, head) + dot + rest
            raise
        finally:
            session.tasks.discard(task)

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request's key; raise ApiError if there is none."""
        key = online_routes.key_of(request)
        session = self.sessions.find(key)
        if self.online:
            if key and self.online.is_admin(key):
                raise ApiError(403, "the admin key cannot generate; make a session and use its key")
            session = self.online.find(key) or session
        if session:
            return session
        if self.sessions.ended(key):
            remedy = "use the base_url and api_key of the current call of `run`"
            raise ApiError(410, f"this run of the agent has ended; {remedy}", code="session_ended")
        raise online_routes.unauthorized(key)

    async def _read(self, request: web.Request, session: Session, dialect: Any) -> PreparedRequest:
        """Check, render and tokenise a request; raise ApiError if it is invalid."""
        from rlx.agents import chat

        body = await request.read()

        def work() -> PreparedRequest:
            data, fixed = dialect.to_chat(dialects.parse(body)), session.temperature_fixed
            chat_request = chat.read(data, session.defaults, temperature_fixed=fixed)
            try:
                return self._prompt(session, chat_request)
            except UserError as error:  # about an image
                raise ApiError(400, str(error), "messages") from error

        if len(body) <= _SMALL:
            return work()
        # On the event loop, a large body would stall everything else of the run.
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _prompt(self, session: Session, chat_request: ChatRequest) -> PreparedRequest:
        if chat_request.tools and not self._reader.opens:
            problem = "the model's chat template has no supported format of tool calls"
            remedy = "(docs/agents.md); leave tools out, or give --tool-format"
            raise ApiError(400, f"{problem} {remedy}", "tools")
        tool = shielded(chat_request.forced or "", controls(self.tokenizer).pattern)
        forced = "" if chat_request.forced is None else self._reader.beginning(tool)
        recognised, place = session.recognise(chat_request.messages)
        try:
            text, images = self._render(chat_request, recognised)
        except ApiError:  # Mistral's templates take a call as text for a turn of its own
            text, images = self._render(chat_request, chat_request.messages)
        text, context = text + forced, self.fleet.context
        if context and len(text) > context * self._longest:  # cheaper than tokenising it
            raise TooLong(len(text) // self._longest, context)
        tokens, parent = session.prompt(text, self._encode, images)
        if not len(tokens):
            message = "the rendered prompt is empty; give a message with text"
            raise ApiError(400, message, "messages")
        return PreparedRequest(session, chat_request, text, tokens, forced, images, parent, place)

    def _stored_images(self, messages: Sequence[Any]) -> tuple[list[Any], tuple[str, ...]]:
        """Return messages with their images kept in the store, and these by name."""
        if not images_in(messages):
            return [*messages], ()
        if not self.images:
            raise ApiError(400, "the model takes no images; leave them out", "messages")
        copies = [
            {**message, "content": [
                image_part(part, self.images.store) if is_image(part) else part
                for part in message["content"]
            ]} if images_in([message]) else message
            for message in messages
        ]  # fmt: skip
        return copies, self.images.names(copies)

    def _encode(self, text: str, images: tuple[str, ...]) -> list[int]:
        text = self.images.expanded(text, images) if images and self.images else text
        return workflows.encode(self.tokenizer, text)

    def _render(self, chat_request: ChatRequest, sent: Sequence[Any]) -> tuple[str, tuple]:
        """Return the text of messages and the names of their images."""
        messages, images = self._stored_images(sent)
        template = dict(chat_request.template_kwargs)
        if clashes := self._template_own & set(template):
            message = f"{min(clashes)} is not a variable of the chat template; leave it out"
            raise ApiError(400, message, "chat_template_kwargs")
        if chat_request.tools:
            template["tools"] = list(chat_request.tools)
        try:
            return workflows.chat(self.tokenizer, messages, **template), images
        except Exception as error:  # templates raise any exception
            why = " ".join(str(error).split())[:300]
            message = f"the model's chat template rejects these messages: {why}"
            raise ApiError(400, message, "messages") from error

    async def _generate(self, p: PreparedRequest, **options: Any) -> list[Completion]:
        sticky = None if p.session.endless else p.session.key  # too many calls for one server
        try:
            return await (p.session.fleet or self.fleet).generate(
                with_images(p.tokens, p.images), p.chat.sampling, p.chat.n, session=sticky,
                priority=p.session.priority, **options,
            )  # fmt: skip
        except ValueError as error:
            if long := re.search(r"max_model_len(?: is |=)(\d+)", str(error)):
                raise TooLong(len(p.tokens), int(long[1])) from error
            match = _SAMPLING_FIELDS.search(str(error))
            field = _FIELDS.get(match[0], match[0]) if match else "messages"
            raise ApiError(400, str(error), field) from error
        except (UserError, Failed) as error:
            raise ApiError(503, str(error), code="no_server") from error

    def _keep(self, p: PreparedRequest, name: str, completions: list[Completion]) -> list[Choice]:
        """Record the completions under the answer's id `name`; return its choices."""
        choices = []
        for number, completion in enumerate(completions):
            words = plain(p.forced) + self._decode(completion.tokens)
            text, stop, stops = words, "", p.chat.sampling.stop
            if stops:
                before = plain(p.forced) + self._decode(completion.tokens[:-1])
                text, stop = cut(words, stops, before)
            thoughts, spoken = self._thoughts(p, text)
            content: str | None = spoken
            calls: list[dict[str, Any]] = []
            if p.chat.tools and spoken:
                ended = completion.stop_reason == "stop"
                content, calls = self._reader.calls(spoken, _call_id, p.chat.tools, ended=ended)
                calls = calls if p.chat.parallel else calls[:1]
            memory = ""
            if (calls or spoken) and words != content:
                shown = [i for i in completion.tokens if i not in self._hidden]
                memory = p.forced + own_text(shown, self._decode, controls(self.tokenizer))
            raw = own_text(completion.tokens, self._decode, controls(self.tokenizer))
            message = {"role": "assistant", "content": content, "tool_calls": calls}
            p.session.keep(Interaction(
                name, number, p.tokens, p.text, completion, raw, text, p.parent, len(calls),
                time.monotonic() - p.began, p.place, message_key(message), memory, p.retry,
                p.images,
            ))  # fmt: skip
            logprobs, begin = self._logprobs(p), len(text) - len(spoken) - len(plain(p.forced))
            if p.chat.logprobs:
                logprobs.add(completion)
            own_tokens = logprobs.unsent(begin, begin + len(content or ""), last=True)
            reason = "tool_calls" if calls else "stop"
            reason = "length" if completion.stop_reason == "length" else reason
            count = len(completion.tokens)
            choices.append(Choice(content, calls, reason, stop, count, own_tokens, thoughts))
        return choices

    def _thoughts(self, p: PreparedRequest, text: str) -> tuple[str, str]:
        tags = self._reader.tags
        active = bool(tags) and p.text.rstrip().endswith(tags[0])  # type: ignore[index]
        return self._reader.thoughts(text, active)

    def _decode(self, ids: Any, special: bool = False) -> str:
        shown = [int(i) for i in ids if special or i not in self._hidden]
        return self.tokenizer.decode(shown, clean_up_tokenization_spaces=False)

    def _logprobs(self, p: PreparedRequest) -> Logprobs:
        most = p.chat.sampling.top_logprobs
        return Logprobs(self._decode, self._token_bytes, most, self._hidden)

    async def _stream(
        self, request: web.Request, events: AsyncGenerator[list[Event], None]
    ) -> web.StreamResponse:
        """Answer by server-sent events; errors after the first token become an event."""
        async with aclosing(events):
            # Nothing is sent before the first token, so earlier errors have an HTTP status.
            first = await anext(events)
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(_sse(first))
            try:
                async for several in events:
                    await response.write(_sse(several))
            except ApiError as error:
                await response.write(_sse([error.body()]))
            else:
                if "type" not in first[0]:  # chat completions end with it
                    await response.write(b"data: [DONE]\n\n")
            with suppress(ConnectionError):
                await response.write_eof()
            return response

    async def _events(self, p: PreparedRequest, reply: Reply) -> AsyncGenerator[list[Event], None]:
        marks, stop = self._reader.opens if p.chat.tools else (), p.chat.sampling.stop
        thoughts, tags = partial(self._thoughts, p), self._reader.tags or ()
        texts = [StreamText(self._decode, stop, marks, thoughts, tags) for _ in range(p.chat.n)]
        logprobs, sent = [self._logprobs(p) for _ in texts], [0] * len(texts)
        coming: asyncio.Queue[Chunk | None] = asyncio.Queue()
        work = asyncio.create_task(self._generate(p, watch=coming.put_nowait))
        work.add_done_callback(lambda _: coming.put_nowait(None))
        started = False

        def events(index: int, pieces: Sequence[tuple[str, str]], tokens: Sequence) -> list[Event]:
            sent[index] += len(tokens)
            out = (reply.delta(index, k, text, tokens if k == "text" else ()) for k, text in pieces)
            return [*chain.from_iterable(out)]

        try:
            while (chunk := await coming.get()) is not None:
                if not started:
                    yield list(reply.begin())
                started, index = True, chunk.index
                if p.chat.logprobs:
                    logprobs[index].add(chunk)
                if p.forced:  # a forced call is sent when complete
                    continue
                if pieces := list(texts[index].add(list(chunk.tokens))):
                    yield events(index, pieces, logprobs[index].unsent(*texts[index].span))
            choices = self._keep(p, reply.id, await work)
            for index, choice in enumerate(choices):
                last = list(texts[index].rest(choice.thoughts, choice.content or ""))
                left = choice.logprobs[sent[index] :]
                if left and "text" not in dict(last):
                    last.append(("text", ""))
                if last:
                    yield events(index, last, left)
            yield list(reply.end(choices))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _load_dialects() -> dict[str, type[Reply]]:
    """Import the APIs, which takes seconds, because of the packages with their types."""
    return {route: getattr(import_module(m), name) for route, (m, name) in _DIALECTS.items()}


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def _call_id() -> str:
    return uuid.uuid4().hex[:9]  # Mistral's templates take no other length


def _sse(events: Sequence[Event]) -> bytes:
    kinds = [f"event: {event['type']}\n" if "type" in event else "" for event in events]
    lines = (f"{kind}data: {json.dumps(e)}\n\n" for kind, e in zip(kinds, events, strict=True))
    return "".join(lines).encode()


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: http_listener.Handler
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as refused:
        error = refused
    except http_listener.MALFORMED as broken:
        error = ApiError(400, f"the body cannot be read: {broken}")
    except web.HTTPException as other:
        endpoints = ", ".join([*_DIALECTS, _COUNT, "GET /v1/models", "GET /health"])
        allowed = ", ".join(sorted(getattr(other, "allowed_methods", ())))
        messages = {
            404: f"unknown path {request.path}; use POST {endpoints}",
            405: f"{request.path} does not accept {request.method}; use {allowed}",
            413: f"the body is larger than {MAX_BODY >> 20} MiB; shorten it",
        }
        if other.status not in messages:
            raise
        error = ApiError(other.status, messages[other.status])
    wait = min(max(math.ceil(error.wait), 1), _MOST_RETRY)
    again = {"Retry-After": str(wait)} if error.status == 429 else None
    return web.json_response(error.body(), status=error.status, headers=again)
