"""OpenAI's chat completions as data: a request's JSON checked and read. Pure.

(https://platform.openai.com/docs/api-reference/chat) What would change the answer and is not
supported is refused by name; what cannot change it (`user`, `metadata`, …) is ignored.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.base import unknown
from rlx.fleet.requests import Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES = 128
MAX_STOPS = 16
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
})  # fmt: skip
_REFUSED = frozenset({
    "frequency_penalty", "presence_penalty", "logit_bias", "functions", "function_call", "audio",
    "modalities", "prediction", "web_search_options", "top_logprobs", "best_of",
})  # fmt: skip
_TAKEN = frozenset({
    "model", "messages", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens",
    "min_tokens", "n", "stop", "seed", "stream", "stream_options", "logprobs", "tools",
    "tool_choice", "response_format", "chat_template_kwargs",
})  # fmt: skip
_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda v: 0 <= v <= 100, "in [0, 100]"),
    "top_p": (float, lambda v: 0 < v <= 1, "in (0, 1]"),
    "top_k": (int, lambda v: v >= 0, "≥ 0"),
    "max_tokens": (int, lambda v: v >= 1, "≥ 1"),
    "max_completion_tokens": (int, lambda v: v >= 1, "≥ 1"),
    "min_tokens": (int, lambda v: v >= 0, "≥ 0"),
    "n": (int, lambda v: 1 <= v <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]"),
    "seed": (int, lambda v: abs(v) < 2**63, "of 64 bits"),
}
_KINDS = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}


class ApiError(Exception):
    """A request that is answered with a status and OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": kinds.get(self.status, kind),
                "param": self.param,
                "code": self.code or None,
            }
        }


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request.

    Attributes:
      model: the name that the answer repeats; every name means the model that is served.
      messages: for the chat template: `content` is text, `arguments` of tool calls are objects.
      sampling: what the request says over the session's defaults; `seed` None unless it has one.
      tools: as OpenAI describes them; empty where none may be called.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def parse(body: bytes) -> Any:
    """Return the JSON of an HTTP body.

    Raises:
      ApiError: 400, it is none.
    """
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def read(data: Any, defaults: Sampling, *, temperature_fixed: bool = False) -> ChatRequest:
    """Return the request in a body's JSON.

    Args:
      defaults: of the session; its `max_new_tokens` is also the most that a request may have,
        more is cut down to it.
      temperature_fixed: whether another temperature than the session's is refused: losses take
        the logprobs to be of that one.

    Raises:
      ApiError: 400, naming the field.
    """
    check_fields(data, _TAKEN, IGNORED | {"reasoning_effort", "verbosity"}, _REFUSED)
    if data.get("response_format") not in (None, {"type": "text"}):
        message = "response_format can be {'type': 'text'} only; ask in words"
        raise ApiError(400, message, "response_format")
    choice = data.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice can be 'auto' or 'none' only", "tool_choice")
    tools = _tools(_take(data, "tools", list, []))
    return ChatRequest(
        model=_take(data, "model", str, ""),
        messages=_messages(data.get("messages")),
        sampling=_sampling(data, defaults, temperature_fixed),
        n=_number(data, "n", 1),
        stream=_take(data, "stream", bool, False),
        include_usage=_take(data, "stream_options", dict, {}).get("include_usage") is True,
        logprobs=_take(data, "logprobs", bool, False),
        tools=() if choice == "none" else tools,
        template_kwargs=_take(data, "chat_template_kwargs", dict, {}),
    )


def check_fields(data: Any, taken: Set[str], ignored: Set[str], refused: Set[str]) -> None:
    """Check that `data` is an object whose fields are known, and say nothing that is refused.

    Raises:
      ApiError: 400, naming the field, and the nearest one to an unknown name.
    """
    if not isinstance(data, dict):
        raise wrong("the body", data, "a JSON object")
    for name, value in data.items():
        if name in refused and value:
            raise ApiError(400, f"{name} is not supported here; leave it out", name)
        if name not in taken | ignored | refused:
            raise ApiError(400, str(unknown("field", name, taken)), name)


def wrong(name: str, got: Any, wanted: str) -> ApiError:
    """Return the refusal of a field's value."""
    return ApiError(400, f"{name} is {repr(got)[:80]}; it must be {wanted}", name)


def token_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """Return the `logprobs.content` of a choice.

    Args:
      logprobs: nats, ≤ 0, of the tempered distribution; −inf, which JSON cannot hold, is OpenAI's
        −9999.
    """
    finite = [value if math.isfinite(value) else -9999.0 for value in map(float, logprobs)]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, finite, strict=True)
    ]


def _sampling(data: Mapping[str, Any], defaults: Sampling, temperature_fixed: bool) -> Sampling:
    temperature = _number(data, "temperature", defaults.temperature)
    if temperature_fixed and temperature != defaults.temperature:
        raise ApiError(
            400,
            f"temperature={temperature:g} where training samples at {defaults.temperature:g}, "
            "which its losses count on; leave it out",
            "temperature",
        )
    asked = _number(data, "max_tokens", defaults.max_new_tokens)
    most = min(defaults.max_new_tokens, _number(data, "max_completion_tokens", asked))
    return replace(
        defaults,
        temperature=temperature,
        top_p=_number(data, "top_p", defaults.top_p),
        top_k=_number(data, "top_k", defaults.top_k),
        max_new_tokens=most,
        min_new_tokens=min(most, _number(data, "min_tokens", defaults.min_new_tokens)),
        stop=(*defaults.stop, *(s for s in _stop(data.get("stop")) if s not in defaults.stop)),
        seed=_number(data, "seed", None),
    )


def _stop(stop: Any) -> list[str]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    texts = isinstance(found, list) and all(isinstance(s, str) and s for s in found)
    if not texts or len(found) > MAX_STOPS:
        raise wrong("stop", stop, f"a text or at most {MAX_STOPS} of them, none empty")
    return found


def _messages(found: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise wrong("messages", found, "a list with one message or more")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(found))


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise wrong(name, message, f"an object whose role is one of {', '.join(ROLES)}")
    role = message["role"]
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{name}.content", role),
    }
    if role == "assistant" and message.get("tool_calls"):
        calls = _take(message, "tool_calls", list, [], name)
        out["tool_calls"] = [_call(c, f"{name}.tool_calls[{i}]") for i, c in enumerate(calls)]
    if role == "tool":
        out["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _content(content: Any, name: str, role: str) -> str:
    """Return a message's text; parts of several are joined by line ends."""
    if isinstance(content, str):
        return _sound(content, name)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise wrong(name, content, "a text, or a list of parts of type text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{name} has a part of type {kind!r}; only text is read", name)
        texts.append(_sound(part.get(part["type"]), name))
    return "\n".join(texts)


def _sound(text: Any, name: str) -> str:
    """Return `text`, if it is a text that can be tokenised."""
    if not isinstance(text, str):
        raise wrong(name, text, "a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{name} has half of a surrogate pair, which is no character"
        raise ApiError(400, message, name) from None
    return text


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a tool call as chat templates want it: the arguments are an object, not its text."""
    function = _function(call)
    if function is None:
        raise wrong(name, call, "an object with function.name and function.arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise wrong(f"{name}.function.arguments", arguments, "the text of JSON") from None
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(tools: list) -> tuple[dict[str, Any], ...]:
    for i, tool in enumerate(tools):
        if _function(tool) is None or tool.get("type", "function") != "function":
            raise wrong(f"tools[{i}]", tool, "a function with a name")
    return tuple(tools)


def _function(found: Any) -> dict[str, Any] | None:
    """Return the `function` of a tool or a call; None where it has no name."""
    function = found.get("function") if isinstance(found, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return function if named else None


def _take(data: Mapping[str, Any], name: str, kind: type, default: Any, of: str = "") -> Any:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise wrong(f"{of}.{name}" if of else name, value, _KINDS[kind])
    return value


def _number(data: Mapping[str, Any], name: str, default: Any) -> Any:
    value = data.get(name)
    if value is None:
        return default
    kind, good, wanted = _NUMBERS[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    sound = number and (isinstance(value, int) or math.isfinite(value))  # 1e400 is JSON
    whole = sound and (kind is float or value == int(value))
    if not whole or not good(value):
        raise wrong(name, value, f"a {'whole ' if kind is int else ''}number {wanted}")
    return kind(value)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
