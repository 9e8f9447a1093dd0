"""Read requests and write answers of OpenAI's chat completions. Pure.

https://platform.openai.com/docs/api-reference/chat. Unsupported fields that would change the answer
are refused by name; fields that cannot change it (`user`, `metadata`, …) are ignored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openai.types import chat as types
from openai.types import shared_params as formats
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from rlx.agents import dialects
from rlx.agents.dialects import ApiError, ChatRequest, Choice, Event, Events, Reply, invalid, take
from rlx.fleet.requests import MOST_TOP_LOGPROBS, Sampling

MAX_CHOICES = 128
MAX_STOPS = 16
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity", "moderation",
})  # fmt: skip
_KNOWN = frozenset({*CompletionCreateParamsNonStreaming.__annotations__, "best_of"})
SCHEMA: dialects.Schema = {
    "messages": list, "tools": list, "model": str, "stream": bool, "logprobs": bool,
    "stream_options": dict, "parallel_tool_calls": bool, "chat_template_kwargs": dict,
    "stop": None, "tool_choice": None, "response_format": None,
    "temperature": (float, lambda v: 0 <= v <= 100, "in [0, 100]"),
    "top_p": (float, lambda v: 0 < v <= 1, "in (0, 1]"),
    "top_k": (int, lambda v: -1 <= v < 2**31, "in [0, 2³¹), or −1: off"),
    "max_tokens": (int, lambda v: v >= 1, "≥ 1"),
    "max_completion_tokens": (int, lambda v: v >= 1, "≥ 1"),
    "min_tokens": (int, lambda v: v >= 0, "≥ 0"),
    "n": (int, lambda v: 1 <= v <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]"),
    "seed": (int, lambda v: abs(v) < 2**63, "of 64 bits"),
    "top_logprobs": (int, lambda v: 0 <= v <= MOST_TOP_LOGPROBS, f"in [0, {MOST_TOP_LOGPROBS}]"),
}  # fmt: skip
_ROLES = {
    role: getattr(types, f"ChatCompletion{role.title()}MessageParam")
    for role in ("system", "developer", "user", "assistant", "tool")
}
_FORMATS = {
    "text": formats.ResponseFormatText, "json_object": formats.ResponseFormatJSONObject,
    "json_schema": formats.ResponseFormatJSONSchema,
}  # fmt: skip
_PARTS = {
    "text": types.ChatCompletionContentPartTextParam,
    "refusal": types.ChatCompletionContentPartRefusalParam,
    "image_url": types.ChatCompletionContentPartImageParam,
}


def read(data: Any, defaults: Sampling, *, temperature_fixed: bool = False) -> ChatRequest:
    """Check a request's JSON and return it; raise ApiError (400), which names the field.

    `defaults.max_new_tokens` is also the upper limit. With `temperature_fixed`, for training,
    another temperature than the default is refused, because losses assume it.
    """
    fields = dialects.checked_fields(data, SCHEMA, IGNORED, _KNOWN)
    if not (messages := fields.get("messages")):
        raise invalid("messages", messages, "a list with one message or more")
    tools = fields.get("tools", [])
    tools = [{"type": "function", **t} if isinstance(t, dict) else t for t in tools]
    for i, tool in enumerate(tools):
        dialects.check_type(types.ChatCompletionFunctionToolParam, tool, f"tools[{i}]")
    forced = _forced_tool(fields.get("tool_choice"), [tool["function"]["name"] for tool in tools])
    if fields.get("tool_choice") == "none":
        tools = []
    guide = _guide(fields.get("response_format")) or defaults.guide
    logprobs = fields.get("logprobs", False)
    if guide and tools:
        message = "a schema excludes tool calls; leave response_format or sampling.guide out"
        raise ApiError(400, message, "response_format")
    temperature = fields.get("temperature", defaults.temperature)
    if temperature_fixed and temperature != defaults.temperature:
        problem = f"temperature={temperature:g} differs from training's {defaults.temperature:g}"
        raise ApiError(400, f"{problem}, which the losses assume; leave it out", "temperature")
    if fields.get("top_logprobs") and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    max_tokens = fields.get("max_tokens", defaults.max_new_tokens)
    most = min(defaults.max_new_tokens, fields.get("max_completion_tokens", max_tokens))
    stops = [s for s in _stop(fields.get("stop", [])) if s not in defaults.stop]
    sampling = replace(
        defaults, temperature=temperature, top_p=fields.get("top_p", defaults.top_p),
        top_k=max(0, fields.get("top_k", defaults.top_k)), max_new_tokens=most,
        min_new_tokens=min(most, fields.get("min_tokens", defaults.min_new_tokens)),
        stop=(*defaults.stop, *stops), seed=fields.get("seed"), guide=guide,
        top_logprobs=fields.get("top_logprobs", 0), unscored=defaults.unscored and not logprobs,
    )  # fmt: skip
    return ChatRequest(
        fields.get("model", ""),
        tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        sampling, n=fields.get("n", 1), stream=fields.get("stream", False), logprobs=logprobs,
        include_usage=fields.get("stream_options", {}).get("include_usage") is True,
        tools=tuple(tools), forced=forced, parallel=fields.get("parallel_tool_calls", True),
        template_kwargs=fields.get("chat_template_kwargs", {}),
    )  # fmt: skip


class ChatReply(Reply):
    """Writes chat completions, see `dialects.Reply`."""

    ID = "chatcmpl-"

    def full(self, choices: Sequence[Choice]) -> Event:
        entries = []
        for index, choice in enumerate(choices):
            message: dict = {"role": "assistant", "content": choice.content, "refusal": None}
            if choice.calls:
                message["tool_calls"] = choice.calls
            if choice.thoughts:
                message["reasoning_content"] = choice.thoughts
            entries.append({
                "index": index, "message": message, "finish_reason": choice.reason,
                "logprobs": _logprob_content(self.request.logprobs, choice.logprobs),
            })  # fmt: skip
        return {**self._of("chat.completion", entries), "usage": self._usage(choices)}

    def begin(self) -> Events:
        for index in range(self.request.n):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, kind: str, text: str, logprobs: Sequence[Mapping]) -> Events:
        key = {"text": "content", "thinking": "reasoning_content"}[kind]
        yield self._delta(index, {key: text}, logprobs)

    def end(self, choices: Sequence[Choice]) -> Events:
        for index, choice in enumerate(choices):
            for number, call in enumerate(choice.calls):
                yield self._delta(index, {"tool_calls": [{"index": number, **call}]})
            yield self._delta(index, {}, reason=choice.reason)
        if self.request.include_usage:
            yield {**self._of("chat.completion.chunk", []), "usage": self._usage(choices)}

    def _delta(self, index: int, delta: Event, logprobs: Sequence = (), reason: str = "") -> Event:
        choice = {"index": index, "delta": delta, "logprobs": _logprob_content(logprobs, logprobs)}
        empty = {"usage": None} if self.request.include_usage else {}
        chunk = self._of("chat.completion.chunk", [{**choice, "finish_reason": reason or None}])
        return {**chunk, **empty}

    def _of(self, kind: str, choices: list) -> Event:
        return {
            "id": self.id, "created": self.created, "model": self.request.model,
            "object": kind, "choices": choices,
        }  # fmt: skip

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Return token counts: the prompt once, and the sum over choices."""
        prompt, new = self.prompt_tokens, sum(choice.tokens for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _logprob_content(flag: object, logprobs: Sequence[Mapping]) -> Event | None:
    return {"content": list(logprobs), "refusal": None} if flag else None


def _stop(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    texts = isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)
    if not texts or len(stops) > MAX_STOPS:
        raise invalid("stop", stop, f"a string or at most {MAX_STOPS} strings, none empty")
    return stops


def _guide(form: Any) -> str:
    """Return the JSON Schema that a response format demands, "" for none."""
    if form is None or dialects.member(form, "type", _FORMATS, "response_format") == "text":
        return ""
    return json.dumps(form.get("json_schema", {}).get("schema") or {"type": "object"})


def _forced_tool(choice: Any, names: Sequence[str]) -> str | None:
    """Return the name of the tool that must be called, "" for any tool, None for no need."""
    if choice in (None, "auto", "none"):
        return None
    if choice != "required":
        dialects.check_type(types.ChatCompletionNamedToolChoiceParam, choice, "tool_choice")
    name = "" if choice == "required" else choice["function"]["name"]
    if not names or (name and name not in names):
        raise invalid("tool_choice", choice, f"among tools, which has {', '.join(names) or 'none'}")
    return name


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return a message in the form that chat templates take."""
    role = dialects.member(message, "role", _ROLES, name)
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
    return out | {key: message[key] for key in ("tool_call_id", "name") if key in message}


def _content(content: Any, name: str) -> str | list[dict[str, Any]]:
    """Return a message's text, several parts joined by newlines; its parts if one is an image."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(name, content, "a string, or a list of parts of type text or image_url")
    parts = []
    for i, part in enumerate(content):
        kind = dialects.member(part, "type", _PARTS, f"{name}[{i}]")
        parts.append(part if kind == "image_url" else {"type": "text", "text": part[kind]})
    images = any(part["type"] == "image_url" for part in parts)
    return parts if images else "\n".join(part["text"] for part in parts)


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a tool call in the form that chat templates take, with parsed arguments."""
    call = {"type": "function", **call} if isinstance(call, dict) else call
    dialects.check_type(types.ChatCompletionMessageFunctionToolCallParam, call, name)
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        name = f"{name}.function.arguments"
        raise invalid(name, function["arguments"], "JSON text") from None
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}
