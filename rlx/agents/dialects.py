"""What the HTTP APIs of the gateway share: a request and an answer in normal form. Pure.

Each API is a module of its own, imported when it is first asked, since the packages whose types
check a request take seconds to import. It has ID (the beginning of an answer's id), `to_chat`
(a request's JSON → that of a chat completion), NAMES (its names of fields that are called otherwise
there), REPLY (a class of the protocol `Reply`) and perhaps TOO_LONG (its words for `TooLong`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

from rlx.base import unknown
from rlx.fleet.requests import Sampling

Event = dict[str, Any]
_KINDS = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip


_TOO_LONG = (  # OpenAI's
    "This model's maximum context length is {context} tokens. However, your messages resulted in "
    "{tokens} tokens. Please reduce the length of the messages."
)


class ApiError(Exception):
    """A request that is answered with a status and an error object.

    `wait`: seconds after which to come again, of status 429.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str = "",
        wait: float = 0.0,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.wait = status, param, code, wait

    def body(self) -> Event:
        """Return the JSON of the answer, which OpenAI's and Anthropic's clients read alike."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self), "type": _ERRORS.get(self.status, kind), "param": self.param,
            "code": self.code or None,
        }  # fmt: skip
        return {"type": "error", "error": error}


class TooLong(ApiError):
    """A prompt longer than the context; clients recognise the error by its message.

    Args:
      words: OpenAI's, or those of another API, with {tokens} and {context}.
    """

    def __init__(self, tokens: int, context: int, words: str = _TOO_LONG):
        message = words.format(tokens=tokens, context=context)
        super().__init__(400, message, "messages", "context_length_exceeded")
        self.sizes = tokens, context


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request.

    Attributes:
      model: the name that the answer repeats; every name means the model that is served.
      messages: for the chat template: `content` is text, `arguments` of tool calls are objects.
      sampling: what the request says over the session's defaults; `seed` None unless it has one.
      tools: as OpenAI describes them; empty where none may be called.
      forced: the tool that the answer must call, "" for any of them; None: it need not call one.
      parallel: whether the answer may have more than one call.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    forced: str | None = None
    parallel: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Head(NamedTuple):
    """What is known of an answer before it is drawn; `created` in seconds since 1970."""

    id: str
    created: int
    asked: ChatRequest
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Said:
    """One choice as the agent gets it.

    Attributes:
      content: the words; None where there are tool calls alone.
      thoughts: what the model wrote between its tags of reasoning, before the words.
      calls: of tools, as chat completions have them.
      reason: stop | length | tool_calls.
      stop: the stop string that ended it; "" where none did.
      tokens: how many were drawn.
      logprobs: of each token, as chat completions have them, where the request wants them.
    """

    content: str | None
    calls: Sequence[Mapping[str, Any]]
    reason: str
    stop: str
    tokens: int
    logprobs: Sequence[Mapping[str, Any]]
    thoughts: str = ""


class Reply(Protocol):
    """Writes one answer in the words of an API, whole or as events; events are in this order."""

    def whole(self, said: Sequence[Said]) -> Event:
        """Return the answer of all choices."""

    def begin(self) -> Iterator[Event]:
        """Yield what comes before the first word."""

    def words(
        self, choice: int, kind: str, text: str, logprobs: Sequence[Mapping]
    ) -> Iterator[Event]:
        """Yield the next words of a choice, with the logprobs of all tokens since the last.

        Args:
          kind: thinking | text, in this order.
        """

    def end(self, said: Sequence[Said]) -> Iterator[Event]:
        """Yield what comes after the last word: tool calls, reasons, token counts."""


def parse(body: bytes) -> Any:
    """Return the JSON of an HTTP body.

    Raises:
      ApiError: 400, it is none, or has a text that cannot be tokenised.
    """
    try:
        text = str(body, json.detect_encoding(body))  # json's own decoding lets half pairs pass
        found = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "the body has half of a surrogate pair, which is no character"
        raise ApiError(400, message) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return found


def check_fields(data: Any, taken: Set[str], ignored: Set[str], known: Set[str]) -> None:
    """Check that `data` is an object whose fields are known, and say nothing that is refused.

    Args:
      taken: that are read. ignored: that cannot change the answer. known: of the API; where they
        are in neither, only an empty value is taken.

    Raises:
      ApiError: 400, naming the field, and the nearest one to an unknown name.
    """
    if not isinstance(data, dict):
        raise wrong("the body", data, "a JSON object")
    for name, value in data.items():
        if name not in taken | ignored | known:
            raise ApiError(400, str(unknown("field", name, taken)), name)
        if value and name not in taken | ignored:
            raise ApiError(400, f"{name} is not supported here; leave it out", name)


def check_type(kind: Any, value: Any, name: str) -> None:
    """Check a value by a type of the package of an API.

    What is `Iterable` in it is not looked into: it is checked one by one.

    Raises:
      ApiError: 400, naming the field within `name`.
    """
    from pydantic import ValidationError

    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        worst = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
        for key in worst["loc"]:  # between keys stand the names of a union's members
            if isinstance(value, Mapping) and key in value:
                name, value = f"{name}.{key}", value[key]
            elif isinstance(value, list) and isinstance(key, int):
                name, value = f"{name}[{key}]", value[key]
        words = worst["msg"][0].lower() + worst["msg"][1:]
        if worst["type"] == "missing":
            name = f"{name}.{worst['loc'][-1]}"
            raise ApiError(400, f"{name} is missing; give it", name) from None
        raise ApiError(400, f"{name} is {repr(value)[:80]}: {words}", name) from None


def take(data: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of an object, `default` where it is absent or null.

    Raises:
      ApiError: 400, it is of another kind.
    """
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise wrong(name, value, _KINDS[kind])
    return value


def member(value: Any, key: str, kinds: Mapping[str, Any], name: str) -> Any:
    """Check an object by the type that its field `key` names; return that type.

    Raises:
      ApiError: 400, it is none of them, or not as the type has it.
    """
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, str) or found not in kinds:
        raise wrong(name, value, f"an object whose {key} is one of {', '.join(kinds)}")
    check_type(kinds[found], value, name)
    return found


def wrong(name: str, got: Any, wanted: str) -> ApiError:
    """Return the refusal of a field's value."""
    return ApiError(400, f"{name} is {repr(got)[:80]}; it must be {wanted}", name)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
