"""OpenAI's HTTP API in front of the fleet, for agents of any framework.

    POST /v1/chat/completions   messages → chat template → tokens → fleet → text, tool calls
    POST /v1/responses          the same in other words (responses.py)
    GET  /v1/models, /health

Every request belongs to a session: by its API key, or by the key in the address
(/KEY/v1/…), for agents that use another key or none. A session records what it was answered, with
its tokens. This file needs aiohttp (the extra `agents`).
"""

import asyncio
import inspect
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web

from rlx.agents import chat, http_errors, responses, tool_calls
from rlx.agents.chat import ApiError, ChatRequest
from rlx.agents.sessions import Interaction, Session, Sessions
from rlx.agents.stream_text import StreamText, cut
from rlx.base import UserError
from rlx.fleet.client import Fleet
from rlx.fleet.member import Failed
from rlx.fleet.sample import Completion
from rlx.rollout import workflows

MAX_BODY = 16 << 20  # bytes of a request
_SMALL = 8 << 10  # bytes of a body that is read and tokenised on the event loop
_PIECE = 1 << 16  # characters of a long prompt whose tokens are counted at once
_BACKLOG = 4096  # connections that a burst of agents may open at once
_Convert = Callable[[Any], Any]  # another API's request as one of chat completions
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request on its way to the fleet.

    Attributes:
      text: the rendered prompt; `tokens`: [P] int32.
      parent: number of the session's interaction that the prompt goes on from.
      created: seconds since 1970.
    """

    session: Session
    chat: ChatRequest
    text: str
    tokens: np.ndarray
    parent: int | None
    completion_id: str
    created: int

    def head(self) -> dict[str, Any]:
        """Return the fields that begin every answer and event."""
        return {"id": self.completion_id, "created": self.created, "model": self.chat.model}

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        """Return token counts, the prompt's once and those of all choices together."""
        prompt, said = len(self.tokens), sum(len(c.tokens) for c in completions)
        return {
            "prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """One choice as the agent gets it: text, tool calls and finish reason."""

    content: str | None
    calls: list[dict[str, Any]]
    reason: str


class Gateway:
    """The HTTP server, on the running event loop from `start` to `stop`.

    Args:
      fleet: generates, on the same loop.
      tokenizer: of the served model, with its chat template.
      name: what /v1/models calls the model.
      host, port: to listen at; port 0 takes a free one.
    """

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: Any,
        *,
        name: str = "default",
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        self.sessions = Sessions()
        self._fleet, self._tokenizer, self._name = fleet, tokenizer, name
        self._host, self._port = host, port
        self._has_tools = tool_calls.known(str(tokenizer.chat_template))
        self._template_own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._created = int(time.time())
        self._runner: web.AppRunner | None = None
        self._threads = ThreadPoolExecutor(2, "gateway")

    async def start(self) -> None:
        """Begin to listen.

        Raises:
          UserError: the port cannot be had.
        """
        app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        for prefix in ("", "/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            app.router.add_post(f"{prefix}/v1/responses", self._respond)
        # A client that goes away takes its request with it, down to the engine.
        runner = web.AppRunner(
            app, access_log=None, logger=http_errors.LOGGER, handle_signals=False,
            handler_cancellation=True, shutdown_timeout=1.0,
        )  # fmt: skip
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=_BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(
                f"cannot listen at {self._host}:{self._port}: {error.strerror}; choose another port"
            ) from None
        self._runner, self._port = runner, runner.addresses[0][1]

    async def stop(self) -> None:
        """End its connections and everything under way."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    def base_url(self, session: Session | None = None) -> str:
        """Return the address for clients; with a session's key in it, any API key will do."""
        key = f"/{session.key}" if session else ""
        return f"http://{self._host}:{self._port}{key}/v1"

    # The calls.

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "rlx"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        with self._under_way(request) as session:
            p = await self._prepare(session, await request.read(), "chatcmpl-")
            if p.chat.stream:
                return await self._stream(request, p)
            completions = await self._generate(p)
            said, choices = self._keep(p, completions), []
            for i, (words, found) in enumerate(zip(said, completions, strict=True)):
                message: dict = {"role": "assistant", "content": words.content, "refusal": None}
                if words.calls:
                    message["tool_calls"] = words.calls
                logprobs = self._logprobs(p, found.tokens, found.logprobs)
                choices.append({
                    "index": i, "message": message, "finish_reason": words.reason,
                    "logprobs": _wrapped(logprobs) if p.chat.logprobs else None,
                })  # fmt: skip
            kind = {"object": "chat.completion"}
            return web.json_response(
                {**p.head(), **kind, "choices": choices, "usage": p.usage(completions)}
            )

    async def _respond(self, request: web.Request) -> web.Response:
        with self._under_way(request) as session:
            p = await self._prepare(session, await request.read(), "resp_", responses.to_chat)
            completions = await self._generate(p)
            (said,) = self._keep(p, completions)
            output = responses.output(said.content, said.calls, said.reason, _new_id)
            return web.json_response(
                responses.answer(p.head(), output, said.reason, p.usage(completions))
            )

    @contextmanager
    def _under_way(self, request: web.Request) -> Iterator[Session]:
        """Provide the request's session, whose end also ends the request."""
        session, task = self._session(request), asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            yield session
        finally:
            session.tasks.discard(task)

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request; raise ApiError where there is none."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or (key.strip() if scheme.lower() == "bearer" else "")
        session = self.sessions.find(key)
        if session:
            return session
        if self.sessions.ended(key):
            raise ApiError(
                410, "this run of the agent has ended; take base_url and api_key of this call of "
                "`run`", code="session_ended",
            )  # fmt: skip
        message = "an unknown API key" if key else "no API key"
        raise ApiError(
            401, f"{message}; send the api_key that `run` was given", code="invalid_api_key"
        )

    async def _prepare(
        self, session: Session, body: bytes, id_begin: str, convert: _Convert = lambda data: data
    ) -> Prepared:
        """Check, render and tokenise a request; raise ApiError for what cannot be answered.

        A large body is read in a thread: nothing else would run meanwhile, of the whole run.
        """
        work = partial(self._read_body, session, body, id_begin, convert)
        if len(body) <= _SMALL:
            read = work()
        else:
            read = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        # Here and not in a thread: two of them could count the same prompt as one.
        seed = read.chat.sampling.seed
        drawn = session.seed(read.tokens) if seed is None else seed % 2**31
        return replace(
            read, chat=replace(read.chat, sampling=replace(read.chat.sampling, seed=drawn))
        )

    def _read_body(
        self, session: Session, body: bytes, id_begin: str, convert: _Convert
    ) -> Prepared:
        data = convert(chat.parse(body))
        asked = chat.read(data, session.defaults, temperature_fixed=session.temperature_fixed)
        if asked.tools and not self._has_tools:
            raise ApiError(
                400,
                "the model's chat template does not describe tools in the format of Hermes and "
                "Qwen (<tool_call>), the one that is read here; leave tools out",
                "tools",
            )
        text, tokens, parent = self._tokens(session, asked)
        if not len(tokens):
            message = "the rendered prompt is empty; give a message with text"
            raise ApiError(400, message, "messages")
        return Prepared(session, asked, text, tokens, parent, _new_id(id_begin), int(time.time()))

    def _tokens(self, session: Session, asked: ChatRequest) -> tuple[str, np.ndarray, int | None]:
        template = dict(asked.template_kwargs)
        if taken := self._template_own & set(template):
            message = f"{min(taken)} is not a variable of the chat template; leave it out"
            raise ApiError(400, message, "chat_template_kwargs")
        if asked.tools:
            template["tools"] = list(asked.tools)
        try:
            text = workflows.chat(self._tokenizer, session.verbatim(asked.messages), **template)
        except Exception as error:  # templates raise what they like
            why = " ".join(str(error).split())[:300]
            message = f"the model's chat template does not take these messages: {why}"
            raise ApiError(400, message, "messages") from error
        self._check_length(text)
        return text, *session.prompt(text, partial(workflows.encode, self._tokenizer))

    def _check_length(self, text: str) -> None:
        """Raise ApiError for a text far beyond the context, having tokenised little of it.

        Cut into pieces, a text has a few tokens more than as a whole: twice as many is a wide
        margin, not a proved one. What is between one and two contexts the fleet refuses.
        """
        context, counted = self._fleet.context, 0
        if not context or len(text) <= _PIECE:
            return
        for start in range(0, len(text), _PIECE):
            counted += len(workflows.encode(self._tokenizer, text[start : start + _PIECE]))
            if counted > 2 * context:
                raise ApiError(
                    400, f"the prompt has more than {context} tokens, and max_model_len is "
                    f"{context}; shorten it", "messages", "context_length_exceeded",
                )  # fmt: skip

    async def _generate(self, p: Prepared, **options: Any) -> list[Completion]:
        try:
            return await self._fleet.generate(
                p.tokens, p.chat.sampling, p.chat.n, session=p.session.key,
                priority=p.session.priority, **options,
            )  # fmt: skip
        except ValueError as error:
            code = "context_length_exceeded" if "max_model_len" in str(error) else ""
            raise ApiError(400, str(error), "messages", code) from error
        except (UserError, Failed) as error:
            raise ApiError(503, str(error), code="no_server") from error

    def _keep(self, p: Prepared, completions: Sequence[Completion]) -> list[Said]:
        """Record the completions; return the choices."""
        said = []
        for number, completion in enumerate(completions):
            words = self._decode(completion.tokens)
            text = cut(words, p.chat.sampling.stop)
            content: str | None = text
            calls: list[dict[str, Any]] = []
            if p.chat.tools and text:
                content, calls = tool_calls.split(text, partial(_new_id, "call_"))
            if calls:
                p.session.remember(content, calls, words)
            p.session.interactions.append(
                Interaction(
                    completion_id=p.completion_id,
                    choice=number,
                    prompt_tokens=p.tokens,
                    prompt_text=p.text,
                    completion=completion,
                    raw=self._decode(completion.tokens, special=True),
                    text=text,
                    parent=p.parent,
                    tool_calls=len(calls),
                )
            )
            length = completion.stop_reason == "length"
            reason = "length" if length else "tool_calls" if calls else "stop"
            said.append(Said(content, calls, reason))
        return said

    def _decode(self, ids: Any, special: bool = False) -> str:
        return self._tokenizer.decode(
            list(map(int, ids)),
            skip_special_tokens=not special,
            clean_up_tokenization_spaces=False,
        )

    def _logprobs(self, p: Prepared, tokens: np.ndarray, logprobs: np.ndarray) -> list[dict]:
        """Return the `logprobs.content` of tokens, where the request wants it."""
        if not p.chat.logprobs:
            return []
        texts = [self._decode([token], special=True) for token in tokens]
        return chat.token_logprobs(texts, logprobs.tolist())

    # Streams.

    async def _stream(self, request: web.Request, p: Prepared) -> web.StreamResponse:
        """Answer by server-sent events.

        Nothing is sent before the first token, so that errors have a status; a later one is an
        event of its own, as OpenAI's clients expect it.
        """
        events = self._events(p)
        try:
            first = await anext(events)
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await response.prepare(request)
            await response.write(_sse(first))
            try:
                async for event in events:
                    await response.write(_sse(event))
            except ApiError as error:
                await response.write(_sse(error.body()))
            else:
                await response.write(b"data: [DONE]\n\n")
            with suppress(ConnectionError):
                await response.write_eof()
            return response
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def _events(self, p: Prepared) -> AsyncIterator[dict[str, Any]]:
        marks = (tool_calls.OPEN,) if p.chat.tools else ()
        texts = [StreamText(self._decode, p.chat.sampling.stop, marks) for _ in range(p.chat.n)]
        coming: asyncio.Queue[tuple | None] = asyncio.Queue()
        work = asyncio.create_task(
            self._generate(p, watch=lambda i, tokens, logs: coming.put_nowait((i, tokens, logs)))
        )
        work.add_done_callback(lambda _: coming.put_nowait(None))
        unsaid: list[list[dict]] = [[] for _ in texts]
        begun = set()

        def event(choices: list[dict], usage: dict | None = None) -> dict[str, Any]:
            found = {**p.head(), "object": "chat.completion.chunk", "choices": choices}
            return {**found, "usage": usage} if p.chat.include_usage else found

        def of(index: int, delta: dict, reason: str | None = None) -> dict[str, Any]:
            """Return the event of a choice, with the logprobs of what was not said before."""
            said, unsaid[index] = unsaid[index] if "content" in delta else [], []
            logprobs = _wrapped(said) if said else None
            return event([
                {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            ])  # fmt: skip

        try:
            while (piece := await coming.get()) is not None:
                index, tokens, logs = piece
                if index not in begun:
                    begun.add(index)
                    yield of(index, {"role": "assistant", "content": ""})
                unsaid[index] += self._logprobs(p, tokens, logs)
                if words := texts[index].add(tokens.tolist()):
                    yield of(index, {"content": words})
            completions = await work
            for index, said in enumerate(self._keep(p, completions)):
                words = texts[index].rest(said.content or "")
                if words or unsaid[index]:
                    yield of(index, {"content": words})
                for number, call in enumerate(said.calls):
                    yield of(index, {"tool_calls": [{"index": number, **call}]})
                yield of(index, {}, said.reason)
            if p.chat.include_usage:
                yield event([], p.usage(completions))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _wrapped(logprobs: list[dict]) -> dict[str, Any]:
    return {"content": logprobs, "refusal": None}


def _new_id(begin: str) -> str:
    return begin + uuid.uuid4().hex


def _sse(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer every error with OpenAI's error object."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(error)
    except web.HTTPRequestEntityTooLarge:
        return _refusal(ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB"))
    except http_errors.CLIENTS as error:
        return _refusal(ApiError(400, f"the body cannot be read: {error}"))
    except web.HTTPNotFound:
        known = "POST /v1/chat/completions, /v1/responses, GET /v1/models, GET /health"
        return _refusal(ApiError(404, f"no {request.path} here; there are {known}"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} does not take {request.method}, only {allowed}"
        return _refusal(ApiError(405, message))


def _refusal(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)
