"""OpenAI's chat completions: a request's JSON checked and read, an answer written. Pure.

(https://platform.openai.com/docs/api-reference/chat) What would change the answer and is not
supported is refused by name; what cannot change it (`user`, `metadata`, …) is ignored.
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
    Event,
    Head,
    Said,
    check_fields,
    check_type,
    member,
    take,
    wrong,
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
    """Return the request as it is."""
    return data


def read(data: Any, defaults: Sampling, *, temperature_fixed: bool = False) -> ChatRequest:
    """Return the request in a body's JSON.

    Args:
      defaults: of the session; its `max_new_tokens` is also the most that a request may have,
        more is cut down to it.
      temperature_fixed: whether the answer is trained on. Then another temperature than the
        session's is refused, and so is a guide: losses take the logprobs to be without.

    Raises:
      ApiError: 400, naming the field.
    """
    check_fields(data, _TAKEN, IGNORED, _KNOWN)
    messages, tools = data.get("messages"), take(data, "tools", list, [])
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list with one message or more")
    tools = [{"type": "function", **t} if isinstance(t, dict) else t for t in tools]
    for i, tool in enumerate(tools):
        check_type(types.ChatCompletionFunctionToolParam, tool, f"tools[{i}]")
    forced = _forced(data.get("tool_choice"), [tool["function"]["name"] for tool in tools])
    if data.get("tool_choice") == "none":
        tools = []
    guide, logprobs = _guide(data.get("response_format")), take(data, "logprobs", bool, False)
    if guide and (tools or temperature_fixed):
        why = "leaves no room for tool calls" if tools else "changes what training counts on"
        message = f"response_format {why}; leave it out, or ask in words"
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
    """Return a token and its logprob (nats); −inf, which JSON cannot hold, is OpenAI's −9999."""
    finite = logprob if math.isfinite(logprob) else -9999.0
    return {"token": own.decode(errors="replace"), "logprob": finite, "bytes": list(own)}


class ChatReply:
    """See `dialects.Reply`."""

    def __init__(self, head: Head):
        self._head = head

    def whole(self, said: Sequence[Said]) -> Event:
        """Return the answer of all choices."""
        choices = []
        for index, one in enumerate(said):
            message: dict = {"role": "assistant", "content": one.content, "refusal": None}
            if one.calls:
                message["tool_calls"] = one.calls
            if one.thoughts:
                message["reasoning_content"] = one.thoughts
            choices.append({
                "index": index, "message": message, "finish_reason": one.reason,
                "logprobs": _wrapped(one.logprobs) if self._head.asked.logprobs else None,
            })  # fmt: skip
        return {**self._of("chat.completion", choices), "usage": self._usage(said)}

    def begin(self) -> Iterator[Event]:
        """Yield the role of each choice."""
        for index in range(self._head.asked.n):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def words(
        self, choice: int, kind: str, text: str, logprobs: Sequence[Mapping]
    ) -> Iterator[Event]:
        """Yield the next words of a choice."""
        key = {"text": "content", "thinking": "reasoning_content"}[kind]
        yield self._delta(choice, {key: text}, logprobs)

    def end(self, said: Sequence[Said]) -> Iterator[Event]:
        """Yield tool calls and reasons, and token counts where the request wants them."""
        for index, one in enumerate(said):
            for number, call in enumerate(one.calls):
                yield self._delta(index, {"tool_calls": [{"index": number, **call}]})
            yield self._delta(index, {}, reason=one.reason)
        if self._head.asked.include_usage:
            yield {**self._of("chat.completion.chunk", []), "usage": self._usage(said)}

    def _delta(
        self, index: int, delta: Event, logprobs: Sequence[Mapping] = (), reason: str | None = None
    ) -> Event:
        found = _wrapped(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": reason}
        empty = {"usage": None} if self._head.asked.include_usage else {}
        return {**self._of("chat.completion.chunk", [choice]), **empty}

    def _of(self, kind: str, choices: list) -> Event:
        head = self._head
        return {
            "id": head.id, "created": head.created, "model": head.asked.model, "object": kind,
            "choices": choices,
        }  # fmt: skip

    def _usage(self, said: Sequence[Said]) -> dict[str, int]:
        """Return token counts, the prompt's once and those of all choices together."""
        prompt, drawn = self._head.prompt_tokens, sum(one.tokens for one in said)
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
            400, f"temperature={temperature:g} where training samples at {defaults.temperature:g}, "
            "which its losses count on; leave it out", "temperature",
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
        raise wrong("stop", stop, f"a text or at most {MAX_STOPS} of them, none empty")
    return found


def _guide(form: Any) -> str:
    """Return the JSON Schema that an answer in a format must fit, "" where it need not."""
    if form is None or member(form, "type", _FORMATS, "response_format") == "text":
        return ""
    return json.dumps(form.get("json_schema", {}).get("schema") or {"type": "object"})


def _forced(choice: Any, names: Sequence[str]) -> str | None:
    """Return the tool that must be called, "" for any, or None."""
    if choice in (None, "auto", "none"):
        return None
    if choice != "required":
        check_type(types.ChatCompletionNamedToolChoiceParam, choice, "tool_choice")
    name = "" if choice == "required" else choice["function"]["name"]
    if not names or (name and name not in names):
        raise wrong("tool_choice", choice, f"among tools, which has {', '.join(names) or 'none'}")
    return name


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return a message as chat templates want it."""
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
        out |= dict.fromkeys(("reasoning_content", "reasoning"), thought)  # as templates call it
        if not (out["content"] and "tool_calls" in out):  # gpt-oss takes but one of both
            out["thinking"] = thought
    for key in ("tool_call_id", "name"):
        if key in message:
            out[key] = message[key]
    return out


def _content(content: Any, name: str) -> str:
    """Return a message's text; parts of several are joined by line ends."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(name, content, "a text, or a list of parts of type text")
    kinds = [member(part, "type", _PARTS, f"{name}[{i}]") for i, part in enumerate(content)]
    return "\n".join(part[kind] for part, kind in zip(content, kinds, strict=True))


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a tool call as chat templates want it: the arguments are an object, not its text."""
    call = {"type": "function", **call} if isinstance(call, dict) else call
    check_type(types.ChatCompletionMessageFunctionToolCallParam, call, name)
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        name = f"{name}.function.arguments"
        raise wrong(name, function["arguments"], "the text of JSON") from None
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
        raise wrong(name, value, f"a {'whole ' if kind is int else ''}number {wanted}")
    return kind(value)
