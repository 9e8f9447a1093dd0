"""Read requests and write answers of OpenAI's chat completions. Pure.

https://platform.openai.com/docs/api-reference/chat. Unsupported fields that would change the answer
are refused by name; fields that cannot change it (`user`, `metadata`, …) are ignored.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openai.types import chat as types
from openai.types import shared_params as formats
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from rlx.agents.dialects import (
    ApiError,
    ChatRequest,
    Choice,
    Event,
    ReplyHeader,
    check_fields,
    check_type,
    invalid,
    member,
    take,
)
from rlx.fleet.requests import MOST_TOP_LOGPROBS, Sampling

ID = "chatcmpl-"
NAMES: dict[str, str] = {}
MAX_CHOICES = 128
MAX_STOPS = 16
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity", "moderation",
})  # fmt: skip
_KNOWN = frozenset({*CompletionCreateParamsNonStreaming.__annotations__, "best_of"})
_TAKEN = frozenset({
    "model", "messages", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens",
    "min_tokens", "n", "stop", "seed", "stream", "stream_options", "logprobs", "tools",
    "tool_choice", "response_format", "chat_template_kwargs", "top_logprobs", "parallel_tool_calls",
})  # fmt: skip
_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda v: 0 <= v <= 100, "in [0, 100]"),
    "top_p": (float, lambda v: 0 < v <= 1, "in (0, 1]"),
    "top_k": (int, lambda v: -1 <= v < 2**31, "in [0, 2³¹), or −1: off"),
    "max_tokens": (int, lambda v: v >= 1, "≥ 1"),
    "max_completion_tokens": (int, lambda v: v >= 1, "≥ 1"),
    "min_tokens": (int, lambda v: v >= 0, "≥ 0"),
    "n": (int, lambda v: 1 <= v <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]"),
    "seed": (int, lambda v: abs(v) < 2**63, "of 64 bits"),
    "top_logprobs": (int, lambda v: 0 <= v <= MOST_TOP_LOGPROBS, f"in [0, {MOST_TOP_LOGPROBS}]"),
}
_ROLES = {
    "system": types.ChatCompletionSystemMessageParam,
    "developer": types.ChatCompletionDeveloperMessageParam,
    "user": types.ChatCompletionUserMessageParam,
    "assistant": types.ChatCompletionAssistantMessageParam,
    "tool": types.ChatCompletionToolMessageParam,
}
_FORMATS = {
    "text": formats.ResponseFormatText, "json_object": formats.ResponseFormatJSONObject,
    "json_schema": formats.ResponseFormatJSONSchema,
}  # fmt: skip
_PARTS = {
    "text": types.ChatCompletionContentPartTextParam,
    "refusal": types.ChatCompletionContentPartRefusalParam,
}


def to_chat(data: Any) -> Any:
    """Return the request unchanged."""
    return data


def read(data: Any, defaults: Sampling, *, temperature_fixed: bool = False) -> ChatRequest:
    """Check a request's JSON and return it.

    Args:
      defaults: sampling of the session; its `max_new_tokens` is also the upper limit.
      temperature_fixed: whether the answer is trained on. If so, another temperature and
        `response_format` are refused, because losses assume logprobs without them.

    Raises:
      ApiError: 400, naming the field.
    """
    check_fields(data, _TAKEN, IGNORED, _KNOWN)
    messages, tools = data.get("messages"), take(data, "tools", list, [])
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", messages, "a list with one message or more")
    tools = [{"type": "function", **t} if isinstance(t, dict) else t for t in tools]
    for i, tool in enumerate(tools):
        check_type(types.ChatCompletionFunctionToolParam, tool, f"tools[{i}]")
    forced = _forced(data.get("tool_choice"), [tool["function"]["name"] for tool in tools])
    if data.get("tool_choice") == "none":
        tools = []
    guide, logprobs = _guide(data.get("response_format")), take(data, "logprobs", bool, False)
    if guide and (tools or temperature_fixed):
        why = "excludes tool calls" if tools else "changes the logprobs that training needs"
        message = f"response_format {why}; leave it out, or ask in the prompt"
        raise ApiError(400, message, "response_format")
    sampling = _sampling(data, defaults, temperature_fixed)
    sampling = replace(sampling, guide=guide, unscored=defaults.unscored and not logprobs)
    if sampling.top_logprobs and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    return ChatRequest(
        model=take(data, "model", str, ""),
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        sampling=sampling,
        n=_number(data, "n", 1),
        stream=take(data, "stream", bool, False),
        include_usage=take(data, "stream_options", dict, {}).get("include_usage") is True,
        logprobs=logprobs,
        tools=tuple(tools),
        forced=forced,
        parallel=take(data, "parallel_tool_calls", bool, True),
        template_kwargs=take(data, "chat_template_kwargs", dict, {}),
    )


def token_logprob(own: bytes, logprob: float) -> dict[str, Any]:
    """Return a token and its logprob (nats); −inf becomes −9999, as in OpenAI's API."""
    finite = logprob if math.isfinite(logprob) else -9999.0
    return {"token": own.decode(errors="replace"), "logprob": finite, "bytes": list(own)}


class ChatReply:
    """Writes chat completions, see `dialects.Reply`."""

    def __init__(self, header: ReplyHeader):
        self._header = header

    def full(self, choices: Sequence[Choice]) -> Event:
        found = []
        for index, choice in enumerate(choices):
            message: dict = {"role": "assistant", "content": choice.content, "refusal": None}
            if choice.calls:
                message["tool_calls"] = choice.calls
            if choice.thoughts:
                message["reasoning_content"] = choice.thoughts
            found.append({
                "index": index, "message": message, "finish_reason": choice.reason,
                "logprobs": _wrapped(choice.logprobs) if self._header.request.logprobs else None,
            })  # fmt: skip
        return {**self._of("chat.completion", found), "usage": self._usage(choices)}

    def begin(self) -> Iterator[Event]:
        for index in range(self._header.request.n):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def delta(
        self, index: int, kind: str, text: str, logprobs: Sequence[Mapping]
    ) -> Iterator[Event]:
        key = {"text": "content", "thinking": "reasoning_content"}[kind]
        yield self._delta(index, {key: text}, logprobs)

    def end(self, choices: Sequence[Choice]) -> Iterator[Event]:
        for index, choice in enumerate(choices):
            for number, call in enumerate(choice.calls):
                yield self._delta(index, {"tool_calls": [{"index": number, **call}]})
            yield self._delta(index, {}, reason=choice.reason)
        if self._header.request.include_usage:
            yield {**self._of("chat.completion.chunk", []), "usage": self._usage(choices)}

    def _delta(
        self, index: int, delta: Event, logprobs: Sequence[Mapping] = (), reason: str | None = None
    ) -> Event:
        found = _wrapped(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": reason}
        empty = {"usage": None} if self._header.request.include_usage else {}
        return {**self._of("chat.completion.chunk", [choice]), **empty}

    def _of(self, kind: str, choices: list) -> Event:
        header = self._header
        return {
            "id": header.id, "created": header.created, "model": header.request.model,
            "object": kind, "choices": choices,
        }  # fmt: skip

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Return token counts: the prompt once, and the sum over choices."""
        prompt, drawn = self._header.prompt_tokens, sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn,
        }  # fmt: skip


REPLY = ChatReply


def _wrapped(logprobs: Sequence[Mapping]) -> Event:
    return {"content": list(logprobs), "refusal": None}


def _sampling(data: Mapping[str, Any], defaults: Sampling, temperature_fixed: bool) -> Sampling:
    temperature = _number(data, "temperature", defaults.temperature)
    if temperature_fixed and temperature != defaults.temperature:
        raise ApiError(
            400, f"temperature={temperature:g} differs from training's "
            f"{defaults.temperature:g}, which the losses assume; leave it out", "temperature",
        )  # fmt: skip
    asked = _number(data, "max_tokens", defaults.max_new_tokens)
    most = min(defaults.max_new_tokens, _number(data, "max_completion_tokens", asked))
    return replace(
        defaults,
        temperature=temperature,
        top_p=_number(data, "top_p", defaults.top_p),
        top_k=max(0, _number(data, "top_k", defaults.top_k)),
        max_new_tokens=most,
        min_new_tokens=min(most, _number(data, "min_tokens", defaults.min_new_tokens)),
        stop=(*defaults.stop, *(s for s in _stop(data.get("stop")) if s not in defaults.stop)),
        seed=_number(data, "seed", None),
        top_logprobs=_number(data, "top_logprobs", 0),
    )


def _stop(stop: Any) -> list[str]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    texts = isinstance(found, list) and all(isinstance(s, str) and s for s in found)
    if not texts or len(found) > MAX_STOPS:
        raise invalid("stop", stop, f"a string or at most {MAX_STOPS} strings, none empty")
    return found


def _guide(form: Any) -> str:
    """Return the JSON Schema that a response format demands, "" for none."""
    if form is None or member(form, "type", _FORMATS, "response_format") == "text":
        return ""
    return json.dumps(form.get("json_schema", {}).get("schema") or {"type": "object"})


def _forced(choice: Any, names: Sequence[str]) -> str | None:
    """Return the name of the tool that must be called, "" for any tool, None for no need."""
    if choice in (None, "auto", "none"):
        return None
    if choice != "required":
        check_type(types.ChatCompletionNamedToolChoiceParam, choice, "tool_choice")
    name = "" if choice == "required" else choice["function"]["name"]
    if not names or (name and name not in names):
        raise invalid("tool_choice", choice, f"among tools, which has {', '.join(names) or 'none'}")
    return name


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return a message in the form that chat templates take."""
    role = member(message, "role", _ROLES, name)
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{name}.content"),
    }
    if message.get("tool_calls"):
        calls = take(message, "tool_calls", list, [])
        out["tool_calls"] = [_call(c, f"{name}.tool_calls[{i}]") for i, c in enumerate(calls)]
    thoughts = (take(message, key, str, "") for key in ("reasoning_content", "reasoning"))
    if role == "assistant" and (thought := next(filter(None, thoughts), "")):
        out |= dict.fromkeys(("reasoning_content", "reasoning"), thought)  # templates' two names
        if not (out["content"] and "tool_calls" in out):  # gpt-oss's template refuses both at once
            out["thinking"] = thought
    for key in ("tool_call_id", "name"):
        if key in message:
            out[key] = message[key]
    return out


def _content(content: Any, name: str) -> str:
    """Return a message's text; several parts are joined by newlines."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(name, content, "a string, or a list of parts of type text")
    kinds = [member(part, "type", _PARTS, f"{name}[{i}]") for i, part in enumerate(content)]
    return "\n".join(part[kind] for part, kind in zip(content, kinds, strict=True))


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a tool call in the form that chat templates take, with parsed arguments."""
    call = {"type": "function", **call} if isinstance(call, dict) else call
    check_type(types.ChatCompletionMessageFunctionToolCallParam, call, name)
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        name = f"{name}.function.arguments"
        raise invalid(name, function["arguments"], "JSON text") from None
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _number(data: Mapping[str, Any], name: str, default: Any) -> Any:
    value = data.get(name)
    if value is None:
        return default
    kind, good, wanted = _NUMBERS[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    sound = number and (isinstance(value, int) or math.isfinite(value))  # 1e400 is JSON
    whole = sound and (kind is float or value == int(value))
    if not whole or not good(value):
        raise invalid(name, value, f"a {'whole ' if kind is int else ''}number {wanted}")
    return kind(value)
