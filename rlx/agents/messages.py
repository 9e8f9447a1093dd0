"""Anthropic's messages in terms of chat completions, and an answer in its words. Pure.

(https://docs.claude.com/en/api/messages) A `tool_use` is a tool call of the same id, a
`tool_result` a message of the role tool, a `thinking` block what templates call reasoning.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anthropic import types
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

from rlx.agents.chat import MAX_STOPS
from rlx.agents.dialects import (
    ApiError,
    Event,
    Head,
    Said,
    check_fields,
    check_type,
    member,
    take,
    wrong,
)

ID = "msg_"
NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}
TOO_LONG = "prompt is too long: {tokens} tokens > {context} maximum"
_SAME = ("model", "temperature", "top_p", "top_k", "max_tokens", "stream", "chat_template_kwargs")
_TAKEN = frozenset({
    *_SAME, "messages", "system", "stop_sequences", "tools", "tool_choice", "output_config",
})  # fmt: skip
_IGNORED = frozenset({
    "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
    "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
})  # fmt: skip
_KNOWN = frozenset(MessageCreateParamsNonStreaming.__annotations__)
_TEXT = {"text": types.TextBlockParam}
_THOUGHTS = {
    "thinking": types.ThinkingBlockParam, "redacted_thinking": types.RedactedThinkingBlockParam,
}  # fmt: skip
_BLOCKS: dict[str, dict[str, Any]] = {  # of the messages of a role
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": types.ToolResultBlockParam},
    "assistant": {**_TEXT, **_THOUGHTS, "tool_use": types.ToolUseBlockParam},
}
_ROLES = dict.fromkeys(_BLOCKS, types.MessageParam)
_CHOICES = {
    "auto": types.ToolChoiceAutoParam, "any": types.ToolChoiceAnyParam,
    "none": types.ToolChoiceNoneParam, "tool": types.ToolChoiceToolParam,
}  # fmt: skip
_BEGUN = {  # blocks
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def to_chat(data: Any) -> dict[str, Any]:
    """Return a request's JSON as that of a chat completion, which checks the numbers in it.

    Raises:
      ApiError: 400, naming the field.
    """
    check_fields(data, _TAKEN, _IGNORED, _KNOWN)
    out = {name: data[name] for name in _SAME if data.get(name) is not None}
    if form := take(data, "output_config", dict, {}).get("format"):
        check_type(types.JSONOutputFormatParam, form, "output_config.format")
        schema = {"name": "output", "schema": form["schema"]}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    stops = take(data, "stop_sequences", list, [])
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong("stop_sequences", stops, f"at most {MAX_STOPS} texts, none empty")
    out["stop"] = stops
    tools = take(data, "tools", list, [])
    out["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if (choice := data.get("tool_choice")) is not None:
        kind = member(choice, "type", _CHOICES, "tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        out["tool_choice"] = {"any": "required", "tool": named}.get(kind, kind)
        out["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list with one message or more")
    system = _texts(data.get("system") or "", "system")
    out["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(messages):
        role = member(message, "role", _ROLES, f"messages[{i}]")
        out["messages"] += _said(role, message["content"], f"messages[{i}].content")
    if messages[-1]["role"] == "assistant":
        name = f"messages[{len(messages) - 1}]"
        raise ApiError(400, f"{name} would begin the answer; end with a user's message", name)
    return out


class MessageReply:
    """See `dialects.Reply`."""

    def __init__(self, head: Head):
        self._head = head
        self._open = ""  # thinking | text: the block under way
        self._index = -1  # its number

    def whole(self, said: Sequence[Said]) -> Event:
        """Return the answer."""
        (one,) = said
        said_so = (("thinking", one.thoughts), ("text", one.content))
        texts = [{**_BEGUN[kind], kind: words} for kind, words in said_so if words]
        calls = [{**_use(call), "input": json.loads(_given(call))} for call in one.calls]
        return self._message([*texts, *calls], one)

    def begin(self) -> Iterator[Event]:
        """Yield the empty message."""
        yield {"type": "message_start", "message": self._message([], None)}

    def words(
        self, choice: int, kind: str, text: str, logprobs: Sequence[Mapping]
    ) -> Iterator[Event]:
        """Yield the next words, the beginning of their block before the first."""
        if kind != self._open:
            yield from self._close()
            self._open, self._index = kind, self._index + 1
            yield _block(self._index, "start", content_block=_BEGUN[kind])
        yield _block(self._index, "delta", delta={"type": f"{kind}_delta", kind: text})

    def end(self, said: Sequence[Said]) -> Iterator[Event]:
        """Yield the end of the text, a block for each tool call, and why it ended."""
        (one,) = said
        yield from self._close()
        for index, call in enumerate(one.calls, self._index + 1):
            yield _block(index, "start", content_block=_use(call))
            delta = {"type": "input_json_delta", "partial_json": _given(call)}
            yield _block(index, "delta", delta=delta)
            yield _block(index, "stop")
        yield {"type": "message_delta", "delta": _ended(one), "usage": self._usage(one)}
        yield {"type": "message_stop"}

    def _close(self) -> Iterator[Event]:
        if self._open:
            yield _block(self._index, "stop")

    def _message(self, content: list, said: Said | None) -> Event:
        return {
            "id": self._head.id, "type": "message", "role": "assistant", "content": content,
            "model": self._head.asked.model, **_ended(said), "usage": self._usage(said),
        }  # fmt: skip

    def _usage(self, said: Said | None) -> dict[str, int]:
        tokens = said.tokens if said else 0
        return {"input_tokens": self._head.prompt_tokens, "output_tokens": tokens}


REPLY = MessageReply


def _block(index: int, what: str, **fields: Any) -> Event:
    return {"type": f"content_block_{what}", "index": index, **fields}


def _use(call: Mapping[str, Any]) -> Event:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _given(call: Mapping[str, Any]) -> str:
    return call["function"]["arguments"]


def _ended(said: Said | None) -> Event:
    if said is None:
        return {"stop_reason": None, "stop_sequence": None}
    by_text = said.reason == "stop" and said.stop
    reason = "stop_sequence" if by_text else _REASONS[said.reason]
    return {"stop_reason": reason, "stop_sequence": said.stop if by_text else None}


def _tool(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise ApiError(400, f"a tool of type {kind!r} is not done here", name)
    check_type(types.ToolParam, tool, name)
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _said(role: str, content: Any, name: str) -> list[dict[str, Any]]:
    """Return the messages that one of Anthropic's is: tools' results first, then the words."""
    out: list[dict[str, Any]] = []
    calls, texts, thoughts = [], [], []
    for kind, block, at in _blocks(content, name, _BLOCKS[role]):
        if kind == "text":
            texts.append(block["text"])
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            result = _texts(block.get("content") or "", f"{at}.content")
            result = f"Error: {result}" if block.get("is_error") else result
            out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
    if texts or calls or not out:
        words = {"role": role, "content": "\n".join(texts)}
        words |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        out.append({**words, "tool_calls": calls} if calls else words)
    return out


def _texts(content: Any, name: str) -> str:
    return "\n".join(block["text"] for _, block, _ in _blocks(content, name, _TEXT))


def _blocks(
    content: Any, name: str, kinds: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield (type, block, its name) of a content, a text or a list of blocks, each checked."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(name, content, "a text or a list of blocks")
    for i, block in enumerate(content):
        yield member(block, "type", kinds, f"{name}[{i}]"), block, f"{name}[{i}]"
