"""Read requests and write answers of Anthropic's Messages API, by way of chat completions. Pure.

https://docs.claude.com/en/api/messages. A `tool_use` becomes a tool call with the same id,
a `tool_result` a message of role tool, and a `thinking` block `reasoning_content`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from anthropic import types
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

from rlx.agents import dialects
from rlx.agents.chat import MAX_STOPS
from rlx.agents.dialects import ApiError, Choice, Event, Events, Reply, invalid, member
from rlx.rollout.images import source_of

_SAME = ("model", "temperature", "top_p", "top_k", "max_tokens", "stream", "chat_template_kwargs")
SCHEMA = dict.fromkeys((*_SAME, "system", "tool_choice")) | {
    "messages": list, "stop_sequences": list, "tools": list, "output_config": dict,
}  # fmt: skip
_IGNORED = frozenset({
    "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
    "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
})  # fmt: skip
_KNOWN = frozenset(MessageCreateParamsNonStreaming.__annotations__)
_TEXT = {"text": types.TextBlockParam}
_SHOWN: dict[str, Any] = {**_TEXT, "image": types.ImageBlockParam}
_THOUGHTS = {
    "thinking": types.ThinkingBlockParam, "redacted_thinking": types.RedactedThinkingBlockParam,
}  # fmt: skip
_BLOCKS: dict[str, dict[str, Any]] = {  # types of content by role
    "system": _TEXT,
    "user": {**_SHOWN, "tool_result": types.ToolResultBlockParam},
    "assistant": {**_TEXT, **_THOUGHTS, "tool_use": types.ToolUseBlockParam},
}
_ROLES = dict.fromkeys(_BLOCKS, types.MessageParam)
_KINDS = ("auto", "any", "none", "tool")
_CHOICES = {kind: getattr(types, f"ToolChoice{kind.title()}Param") for kind in _KINDS}
_EMPTY = {  # blocks
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def to_chat(data: Any) -> dict[str, Any]:
    """Convert a request's JSON to a chat completion's; raise ApiError naming a bad field."""
    fields = dialects.checked_fields(data, SCHEMA, _IGNORED, _KNOWN)
    out = {name: fields[name] for name in _SAME if name in fields}
    if form := fields.get("output_config", {}).get("format"):
        dialects.check_type(types.JSONOutputFormatParam, form, "output_config.format")
        schema = {"name": "output", "schema": form["schema"]}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    out["stop"] = stops = fields.get("stop_sequences", [])
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop_sequences", stops, f"at most {MAX_STOPS} strings, none empty")
    out["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.get("tools", []))]
    if (choice := fields.get("tool_choice")) is not None:
        kind = member(choice, "type", _CHOICES, "tool_choice")
        function = {"type": "function", "function": {"name": choice.get("name")}}
        out["tool_choice"] = {"any": "required", "tool": function}.get(kind, kind)
        out["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if not (messages := fields.get("messages")):
        raise invalid("messages", messages, "a list with one message or more")
    blocks = _blocks(fields.get("system") or "", "system", _TEXT)
    system = "\n".join(block["text"] for _, block, _ in blocks)
    out["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(messages):
        role = member(message, "role", _ROLES, f"messages[{i}]")
        out["messages"] += _chat_messages(role, message["content"], f"messages[{i}].content")
    if messages[-1]["role"] == "assistant":
        name = f"messages[{len(messages) - 1}]"
        raise ApiError(400, f"{name} would prefill the answer; end with a user's message", name)
    return out


class MessageReply(Reply):
    """Writes messages, see `dialects.Reply`; a tool call is a block of its own."""

    ID = "msg_"
    NAMES: ClassVar = {"response_format": "output_config.format", "stop": "stop_sequences"}
    TOO_LONG = "prompt is too long: {tokens} tokens > {context} maximum"
    to_chat = staticmethod(to_chat)
    _open, _index = "", -1  # the open block: thinking | text, and its number

    def full(self, choices: Sequence[Choice]) -> Event:
        (choice,) = choices
        parts = (("thinking", choice.thoughts), ("text", choice.content))
        texts = [{**_EMPTY[kind], kind: text} for kind, text in parts if text]
        calls = [{**_tool_use(c), "input": json.loads(c["function"]["arguments"])}
                 for c in choice.calls]  # fmt: skip
        return self._message([*texts, *calls], choice)

    def begin(self) -> Events:
        yield {"type": "message_start", "message": self._message([], None)}

    def delta(self, index: int, kind: str, text: str, logprobs: Sequence[Mapping]) -> Events:
        if kind != self._open:
            yield from self._close()
            self._open, self._index = kind, self._index + 1
            yield _block(self._index, "start", content_block=_EMPTY[kind])
        yield _block(self._index, "delta", delta={"type": f"{kind}_delta", kind: text})

    def end(self, choices: Sequence[Choice]) -> Events:
        (choice,) = choices
        yield from self._close()
        for index, call in enumerate(choice.calls, self._index + 1):
            yield _block(index, "start", content_block=_tool_use(call))
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            yield _block(index, "delta", delta=delta)
            yield _block(index, "stop")
        yield {"type": "message_delta", "delta": _stop_fields(choice), "usage": self._usage(choice)}
        yield {"type": "message_stop"}

    def _close(self) -> Events:
        if self._open:
            yield _block(self._index, "stop")

    def _message(self, content: list, choice: Choice | None) -> Event:
        return {
            "id": self.id, "type": "message", "role": "assistant", "content": content,
            "model": self.request.model, **_stop_fields(choice), "usage": self._usage(choice),
        }  # fmt: skip

    def _usage(self, choice: Choice | None) -> dict[str, int]:
        tokens = choice.tokens if choice else 0
        return {"input_tokens": self.prompt_tokens, "output_tokens": tokens}


def _block(index: int, what: str, **fields: Any) -> Event:
    return {"type": f"content_block_{what}", "index": index, **fields}


def _tool_use(call: Mapping[str, Any]) -> Event:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _stop_fields(choice: Choice | None) -> Event:
    if choice is None:
        return {"stop_reason": None, "stop_sequence": None}
    if choice.reason == "stop" and choice.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": _REASONS[choice.reason], "stop_sequence": None}


def _tool(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise ApiError(400, f"tools of type {kind!r} are not supported; give custom tools", name)
    dialects.check_type(types.ToolParam, tool, name)
    about = {"description": tool["description"]} if "description" in tool else {}
    function = {"name": tool["name"], "parameters": tool["input_schema"], **about}
    return {"type": "function", "function": function}


def _chat_messages(role: str, content: Any, name: str) -> list[dict[str, Any]]:
    """Convert a message to those of chat completions: tool results first, then the text."""
    out: list[dict[str, Any]] = []
    calls, texts, thoughts = [], [], []
    for kind, block, at in _blocks(content, name, _BLOCKS[role]):
        if kind in _SHOWN:
            texts.append(block)
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            parts = _blocks(block.get("content") or "", f"{at}.content", _SHOWN)
            result = _chat_content([part for _, part, _ in parts])
            if block.get("is_error"):
                error = [{"type": "text", "text": "Error:"}]
                result = f"Error: {result}" if isinstance(result, str) else error + result
            out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
    if texts or calls or not out:
        more = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
        more = {key: value for key, value in more.items() if value}
        out.append({"role": role, "content": _chat_content(texts), **more})
    return out


def _chat_content(blocks: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return blocks as the content of a chat completion: a text, or parts if one is an image."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return [
        {"type": "image_url", "image_url": {"url": source_of(block)}} if block["type"] == "image"
        else {"type": "text", "text": block["text"]}
        for block in blocks
    ]  # fmt: skip


def _blocks(
    content: Any, name: str, kinds: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Check a content, text or a list of blocks; yield (type, block, name) of each block."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(name, content, "a string or a list of blocks")
    for i, block in enumerate(content):
        yield member(block, "type", kinds, f"{name}[{i}]"), block, f"{name}[{i}]"
