"""OpenAI's chat completions as data: a request's JSON checked, answers built. Pure.

(https://platform.openai.com/docs/api-reference/chat) What would change the answer and is not
supported is refused by name; what cannot change it (`user`, `metadata`, …) is ignored.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.config import unknown
from rlx.fleet.requests import Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES = 128
MAX_STOPS = 16
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "reasoning_effort", "verbosity",
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


class ApiError(Exception):
    """A request that is answered with a status and OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
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
    """The JSON of an HTTP body; raises ApiError where it is none."""
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def read(data: Any, defaults: Sampling, *, temperature_fixed: bool = False) -> ChatRequest:
    """The request in a body's JSON.

    Args:
      defaults: of the session; its `max_new_tokens` is also the most that a request may have,
        more is cut down to it.
      temperature_fixed: whether another temperature than the session's is refused: losses take
        the logprobs to be of that one.

    Raises:
      ApiError: 400, naming the field.
    """
    if not isinstance(data, dict):
        raise _wrong("the body", data, "a JSON object")
    _check_names(data)
    tools, choice = _tools(data), data.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice can be 'auto' or 'none' only", "tool_choice")
    template = data.get("chat_template_kwargs") or {}
    if not isinstance(template, dict):
        raise _wrong("chat_template_kwargs", template, "an object")
    stream_options = data.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise _wrong("stream_options", stream_options, "an object")
    return ChatRequest(
        model=_take(data, "model", str, "text", ""),
        messages=_messages(data),
        sampling=_sampling(data, defaults, temperature_fixed),
        n=_number(data, "n", int, lambda v: 1 <= v <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]", 1),
        stream=_take(data, "stream", bool, "true or false", False),
        include_usage=stream_options.get("include_usage") is True,
        logprobs=_take(data, "logprobs", bool, "true or false", False),
        tools=() if choice == "none" else tools,
        template_kwargs=template,
    )


def choice(
    index: int, content: str | None, calls: Sequence[Mapping], reason: str, logprobs: Any
) -> dict[str, Any]:
    """One of an answer's choices."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = list(calls)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def answer(request: ChatRequest, completion_id: str, created: int, choices, usage) -> dict:
    """A whole answer. `created`: seconds since 1970."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": list(choices),
        "usage": usage,
    }


def chunk(
    request: ChatRequest,
    completion_id: str,
    created: int,
    index: int,
    delta: Mapping[str, Any],
    *,
    reason: str | None = None,
    logprobs: Any = None,
) -> dict[str, Any]:
    """One event of a streamed answer."""
    found = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return _event(request, completion_id, created, [found], None)


def usage_chunk(request: ChatRequest, completion_id: str, created: int, usage) -> dict[str, Any]:
    """The last event of a stream that was asked for its usage."""
    return _event(request, completion_id, created, [], usage)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts, the prompt once and all choices together."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def token_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """A choice's `logprobs`, in nats, of the tempered distribution."""
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _event(request: ChatRequest, completion_id: str, created: int, choices, usage) -> dict:
    found = {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": request.model,
        "choices": choices,
    }
    return {**found, "usage": usage} if request.include_usage else found


def _check_names(data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        if name in _REFUSED and value:
            raise ApiError(400, f"{name} is not supported here; leave it out", name)
        if name not in _TAKEN | _IGNORED | _REFUSED:
            raise ApiError(400, str(unknown("field", name, _TAKEN)), name)
    form = data.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise ApiError(
            400, "response_format can be {'type': 'text'} only; ask in words", "response_format"
        )


def _sampling(data: Mapping[str, Any], defaults: Sampling, temperature_fixed: bool) -> Sampling:
    number = _number
    temperature = number(
        data, "temperature", float, lambda v: 0 <= v <= 100, "in [0, 100]", defaults.temperature
    )
    if temperature_fixed and temperature != defaults.temperature:
        raise ApiError(
            400,
            f"temperature={temperature:g} where training samples at {defaults.temperature:g}, "
            "which its losses count on; leave it out",
            "temperature",
        )
    most = defaults.max_new_tokens
    for name in ("max_completion_tokens", "max_tokens"):
        asked = number(data, name, int, lambda v: v >= 1, "≥ 1", None)
        if asked is not None:
            most = min(asked, most)
            break
    return replace(
        defaults,
        temperature=temperature,
        top_p=number(data, "top_p", float, lambda v: 0 < v <= 1, "in (0, 1]", defaults.top_p),
        top_k=number(data, "top_k", int, lambda v: v >= 0, "≥ 0", defaults.top_k),
        max_new_tokens=most,
        min_new_tokens=min(
            most, number(data, "min_tokens", int, lambda v: v >= 0, "≥ 0", defaults.min_new_tokens)
        ),
        stop=(*defaults.stop, *(s for s in _stop(data) if s not in defaults.stop)),
        seed=number(data, "seed", int, lambda v: abs(v) < 2**63, "of 64 bits", None),
    )


def _stop(data: Mapping[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop")
    found = () if stop is None else (stop,) if isinstance(stop, str) else stop
    texts = isinstance(found, list | tuple) and all(isinstance(s, str) and s for s in found)
    if not texts or len(found) > MAX_STOPS:
        raise _wrong("stop", stop, f"a text or at most {MAX_STOPS} of them, none empty")
    return tuple(found)


def _messages(data: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    found = data.get("messages")
    if not isinstance(found, list) or not found:
        raise _wrong("messages", found, "a list with one message or more")
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(found))


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise _wrong(name, message, f"an object whose role is one of {', '.join(ROLES)}")
    role = message["role"]
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{name}.content", role),
    }
    if role == "assistant" and message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise _wrong(f"{name}.tool_calls", calls, "a list")
        out["tool_calls"] = [
            _call(found, f"{name}.tool_calls[{i}]") for i, found in enumerate(calls)
        ]
    if role == "tool":
        out["tool_call_id"] = str(message.get("tool_call_id", ""))
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _content(content: Any, name: str, role: str) -> str:
    """A message's text; parts of several are joined by line ends."""
    if isinstance(content, str):
        return _sound(content, name)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise _wrong(name, content, "a text, or a list of parts of type text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{name} has a part of type {kind!r}; only text is read", name)
        texts.append(_sound(part.get(part["type"]), name))
    return "\n".join(texts)


def _sound(text: Any, name: str) -> str:
    """`text`, if it is a text that can be tokenised."""
    if not isinstance(text, str):
        raise _wrong(name, text, "a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{name} has half of a surrogate pair, which is no character"
        raise ApiError(400, message, name) from None
    return text


def _call(call: Any, name: str) -> dict[str, Any]:
    """A tool call as chat templates want it: the arguments are an object, not its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(name, call, "an object with function.name and function.arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _wrong(f"{name}.function.arguments", arguments, "the text of JSON") from None
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(data: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = data.get("tools") or []
    if not isinstance(tools, list):
        raise _wrong("tools", tools, "a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type", "function") != "function":
            raise _wrong(f"tools[{i}]", tool, "a function with a name")
    return tuple(tools)


def _take(data: Mapping[str, Any], name: str, kind: type, wanted: str, default: Any) -> Any:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _wrong(name, value, wanted)
    return value


def _number(
    data: Mapping[str, Any],
    name: str,
    kind: type,
    good: Callable[[Any], bool],
    wanted: str,
    default: Any,
) -> Any:
    value = data.get(name)
    if value is None:
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    sound = number and (isinstance(value, int) or math.isfinite(value))  # 1e400 is JSON
    whole = sound and (kind is float or value == int(value))
    if not whole or not good(value):
        raise _wrong(name, value, f"a {'whole ' if kind is int else ''}number {wanted}")
    return kind(value)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _wrong(name: str, got: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{name} is {repr(got)[:80]}; it must be {wanted}", name)


def finite(value: float) -> float:
    """A logprob that JSON can hold: −inf, of a token without probability, is OpenAI's −9999."""
    return value if math.isfinite(value) else -9999.0
