"""Requests and answers in a form that all HTTP APIs of the gateway share. Pure.

Each API is a subclass of `Reply` in a module of its own (chat.py, responses.py, messages.py).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Protocol

from rlx.base import unknown
from rlx.fleet.requests import Sampling

Event = dict[str, Any]
Events = Iterator[Event]
_KINDS = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}
# Field → type of its value, or (int | float, check, text of the range), or None for any value.
Schema = Mapping[str, Any]
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip
_TOO_LONG = (  # OpenAI's
    "This model's maximum context length is {context} tokens. However, your messages resulted in "
    "{tokens} tokens. Please reduce the length of the messages."
)


class ApiError(Exception):
    """A refused request; with status 429, `wait` is the seconds until a retry may succeed."""

    def __init__(self, status: int, message: str, param: str = "", code: str = "", wait: float = 0):
        super().__init__(message)
        self.status, self.param, self.code, self.wait = status, param, code, wait

    def body(self) -> Event:
        """Return the error object, in a form that OpenAI's and Anthropic's clients both read."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _ERRORS.get(self.status, kind)
        details = {"param": self.param or None, "code": self.code or None}
        return {"type": "error", "error": {"message": str(self), "type": kind, **details}}


class TooLong(ApiError):
    """A prompt longer than the context; clients recognise the error by its `template`."""

    def __init__(self, tokens: int, context: int, template: str = _TOO_LONG):
        message = template.format(tokens=tokens, context=context)
        super().__init__(400, message, "messages", "context_length_exceeded")
        self.sizes = tokens, context


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    model: str  # the answer repeats it; every name means the served model
    messages: tuple[Mapping[str, Any], ...]  # `content` is text, `arguments` of calls are objects
    sampling: Sampling  # the session's with the request's changes; `seed` is None without one
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()  # as OpenAI describes them; those that may be called
    forced: str | None = None  # tool that the answer must call, "" for any tool, None for no need
    parallel: bool = True  # whether the answer may have several calls
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    content: str | None  # text; None if there are only tool calls
    calls: Sequence[Mapping[str, Any]]  # calls, logprobs: in the form of chat completions
    reason: str  # stop | length | tool_calls
    stop: str  # the stop string that ended the text, or ""
    tokens: int  # number of sampled tokens
    logprobs: Sequence[Mapping[str, Any]]
    thoughts: str = ""  # text between the reasoning tags


class Reply(Protocol):
    """Writes one answer of an API: `full`, or events by `begin`, `delta` …, `end`."""

    ID: ClassVar[str]  # prefix of answers' ids
    NAMES: ClassVar[Mapping[str, str]] = {}  # fields of chat completions → the API's own
    TOO_LONG: ClassVar[str] = _TOO_LONG  # message for a prompt above the context

    id: str
    created: int  # seconds since 1970
    request: ChatRequest
    prompt_tokens: int

    def __init__(self, id: str, created: int, request: ChatRequest, prompt_tokens: int):
        self.id, self.created = id, created
        self.request, self.prompt_tokens = request, prompt_tokens

    @staticmethod
    def to_chat(data: Any) -> Any:
        """Convert a request's JSON to a chat completion's; raise ApiError naming a bad field."""
        return data

    def full(self, choices: Sequence[Choice]) -> Event:
        """Return the answer without streaming."""

    def begin(self) -> Events:
        """Yield the events before the first text."""

    def delta(self, index: int, kind: str, text: str, logprobs: Sequence[Mapping]) -> Events:
        """Yield the next text of a choice; `kind` is thinking, then text."""

    def end(self, choices: Sequence[Choice]) -> Events:
        """Yield the events after the last text: tool calls, reasons, token counts."""


def parse(body: bytes) -> Any:
    """Return the JSON of an HTTP body; ApiError (400) if it is invalid, or no valid Unicode."""
    try:
        # json.loads(bytes) accepts unpaired surrogates.
        text = str(body, json.detect_encoding(body))
        data = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has an unpaired surrogate; send Unicode") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return data


def checked_fields(
    data: Any, schema: Schema, ignored: Set[str] = frozenset(), known: Set[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields of `data` that a schema has, without those that are null.

    ApiError (400) names the field and, for an unknown one, the nearest name. Fields that are
    `ignored` cannot change the answer; others that the API has (`known`) must be empty.
    """
    if not isinstance(data, dict):
        raise invalid("the body", data, "a JSON object")
    for name in [name for name in data if name not in schema and name not in ignored]:
        if name not in known:
            raise ApiError(400, str(unknown("field", name, schema)), name)
        if data[name]:
            raise ApiError(400, f"{name} is not supported here; leave it out", name)
    return {name: take(data, name, schema[name]) for name in schema if data.get(name) is not None}


def check_type(kind: Any, value: Any, name: str) -> None:
    """Check a value by a type of an API's package; ApiError (400) names the field within `name`."""
    from pydantic import ValidationError

    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        worst = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
        for key in worst["loc"]:  # loc also has names of a union's members
            if isinstance(value, Mapping) and key in value:
                name, value = f"{name}.{key}", value[key]
            elif isinstance(value, list) and isinstance(key, int):
                name, value = f"{name}[{key}]", value[key]
        words = worst["msg"][0].lower() + worst["msg"][1:]
        if worst["type"] == "missing":
            name = f"{name}.{worst['loc'][-1]}"
            raise ApiError(400, f"{name} is missing; give it", name) from None
        raise ApiError(400, f"{name} is {repr(value)[:80]}: {words}", name) from None


def take(data: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """Return a field, `default` if absent or null; raise ApiError if it is not as in a Schema."""
    value = data.get(name)
    if value is None or kind is None:
        return default if value is None else value
    if isinstance(kind, type):
        if not isinstance(value, kind):
            raise invalid(name, value, _KINDS[kind])
        return value
    number, good, bounds = kind
    sound = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    fits = sound and (number is float or value == int(value))
    if isinstance(value, bool) or not fits or not good(value):
        raise invalid(name, value, f"a {'whole ' if number is int else ''}number {bounds}")
    return number(value)


def member(value: Any, key: str, kinds: Mapping[str, Any], name: str) -> Any:
    """Check an object by the type that its field `key` names; return that name."""
    kind = value.get(key) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise invalid(name, value, f"an object whose {key} is one of {', '.join(kinds)}")
    check_type(kinds[kind], value, name)
    return kind


def invalid(name: str, got: Any, wanted: str) -> ApiError:
    """Return the refusal of a field's value."""
    return ApiError(400, f"{name} is {repr(got)[:80]}; it must be {wanted}", name)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
