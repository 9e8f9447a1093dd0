"""Read requests and write answers of OpenAI's Responses API, by way of chat completions. Pure.

https://platform.openai.com/docs/api-reference/responses. The gateway keeps no responses. Fields
that refer to an earlier one are refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from rlx.agents.chat import IGNORED
from rlx.agents.dialects import (
    ApiError,
    Choice,
    Event,
    Events,
    Reply,
    checked_fields,
    invalid,
    take,
)

_SAME = (
    "model", "temperature", "top_p", "stream", "chat_template_kwargs", "top_logprobs",
    "parallel_tool_calls",
)  # fmt: skip
_KNOWN = frozenset(ResponseCreateParamsNonStreaming.__annotations__)
SCHEMA = dict.fromkeys((*_SAME, "input", "instructions", "max_output_tokens", "tool_choice")) | {
    "text": dict, "include": list, "tools": list,
}  # fmt: skip
_IGNORED = frozenset({"reasoning", "truncation", "stream_options", "client_metadata"})
_LOGPROBS = "message.output_text.logprobs"  # in `include`
_PARTS = {"text": "output_text", "thinking": "reasoning_text"}
_ITEMS: dict[str, tuple[str, Event, Event]] = {  # prefix of the id, fields, fields of its part
    "text": ("msg_", {"type": "message", "role": "assistant"}, {"annotations": []}),
    "thinking": ("rs_", {"type": "reasoning", "summary": []}, {}),
}
_TEXTS = ("input_text", "output_text", "text")


def to_chat(data: Any) -> dict[str, Any]:
    """Convert a request's JSON to a chat completion's; raise ApiError naming a bad field."""
    fields = checked_fields(data, SCHEMA, IGNORED | _IGNORED, _KNOWN)
    out = {name: fields[name] for name in _SAME if name in fields}
    if (form := fields.get("text", {}).get("format")) is not None:
        entries = form if isinstance(form, dict) else {}
        schema = {key: value for key, value in entries.items() if key != "type"}
        out["response_format"] = {**entries, "json_schema": schema} if schema else form
    if _LOGPROBS in fields.get("include", []) or out.get("top_logprobs"):
        out["logprobs"] = True
    choice, system = fields.get("tool_choice"), fields.get("instructions")
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return out | {
        "max_completion_tokens": fields.get("max_output_tokens"), "tool_choice": choice,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.get("tools", []))],
        "messages": [{"role": "system", "content": system}] * bool(system)
        + _messages(fields.get("input")),
    }  # fmt: skip


class ResponseReply(Reply):
    """Writes responses, see `dialects.Reply`."""

    ID = "resp_"
    NAMES: ClassVar = {
        "response_format": "text.format", "max_completion_tokens": "max_output_tokens",
    }  # fmt: skip
    to_chat = staticmethod(to_chat)
    _number = -1  # of the last event
    _open, _index, _text = "", -1, ""  # kind, number and text of the open item
    _logprobs: list[Mapping]

    def full(self, choices: Sequence[Choice]) -> Event:
        (choice,) = choices
        prompt, status = self.prompt_tokens, _status(choice)
        output = list[Event]()
        if choice.thoughts:
            output.append(self._item("thinking", choice.thoughts, status))
        if choice.content or not choice.calls:
            output.append(self._item("text", choice.content or "", status, choice.logprobs))
        details = {"reason": "max_output_tokens"} if status != "completed" else None
        usage = {
            "input_tokens": prompt, "output_tokens": choice.tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + choice.tokens,
        }  # fmt: skip
        output += map(_call, choice.calls)
        return self._response(status=status, incomplete_details=details, output=output, usage=usage)

    def begin(self) -> Events:
        yield self._event("created", response=self._response())
        yield self._event("in_progress", response=self._response())

    def delta(self, index: int, kind: str, text: str, logprobs: Sequence[Mapping]) -> Events:
        if kind != self._open:
            if not text:  # logprobs of a tool call: the API has no field
                return
            yield from self._close("completed")
            self._open, self._index, self._text, self._logprobs = kind, self._index + 1, "", []
            item = self._item(kind, "", "in_progress")
            (part,) = item["content"]
            empty = {**item, "content": []}
            yield self._event("output_item.added", output_index=self._index, item=empty)
            yield self._event("content_part.added", **self._place(), part=part)
        self._text += text
        self._logprobs += logprobs
        delta = {"delta": text, **_logprobs(kind, logprobs)}
        yield self._event(f"{_PARTS[kind]}.delta", **self._place(), **delta)

    def end(self, choices: Sequence[Choice]) -> Events:
        (choice,) = choices
        yield from self._close(_status(choice))
        for index, item in enumerate(map(_call, choice.calls), self._index + 1):
            empty = {**item, "arguments": "", "status": "in_progress"}
            at, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
            yield self._event("output_item.added", output_index=index, item=empty)
            yield self._event("function_call_arguments.delta", **at, delta=arguments)
            done = {"name": item["name"], "arguments": arguments}
            yield self._event("function_call_arguments.done", **at, **done)
            yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(_status(choice), response=self.full(choices))

    def _close(self, status: str) -> Events:
        if not self._open:
            return
        kind, place = self._open, self._place()
        item = self._item(kind, self._text, status, self._logprobs)
        done = {"text": self._text, **_logprobs(kind, self._logprobs)}
        yield self._event(f"{_PARTS[kind]}.done", **place, **done)
        yield self._event("content_part.done", **place, part=item["content"][0])
        yield self._event("output_item.done", output_index=self._index, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def _place(self) -> Event:
        item = _ITEMS[self._open][0] + self.id
        return {"output_index": self._index, "content_index": 0, "item_id": item}

    def _item(self, kind: str, text: str, status: str, logprobs: Sequence[Mapping] = ()) -> Event:
        begin, fields, part = _ITEMS[kind]
        content = [{"type": _PARTS[kind], "text": text, **part, **_logprobs(kind, logprobs)}]
        return {"id": begin + self.id, "status": status, **fields, "content": content}

    def _response(self, **more: Any) -> Event:
        return {
            "id": self.id, "object": "response", "created_at": self.created, "error": None,
            "status": "in_progress", "incomplete_details": None, "model": self.request.model,
            "output": [], "parallel_tool_calls": self.request.parallel, "tool_choice": "auto",
            "tools": [], "metadata": {}, **more,
        }  # fmt: skip


def _logprobs(kind: str, logprobs: Sequence[Mapping]) -> Event:
    return {"logprobs": list(logprobs)} if kind == "text" else {}


def _call(call: Mapping[str, Any]) -> Event:
    return {
        "type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"],
        "status": "completed", **call["function"],
    }  # fmt: skip


def _status(choice: Choice) -> str:
    return "incomplete" if choice.reason == "length" else "completed"


def _messages(items: Any) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise invalid("input", items, "a string or a list")
    out: list[dict[str, Any]] = []
    thoughts = ""  # of a reasoning item, added to the next message
    for index, item in enumerate(items):
        name = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(name, item, "an object")
        kind = item.get("type", "message")
        more, thoughts = {"reasoning_content": thoughts} if thoughts else {}, ""
        if kind == "message":
            out.append({"role": item.get("role"), "content": _content(item.get("content")), **more})
        elif kind == "function_call":
            # Calls join the assistant's text before them in one message.
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].update(more)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            out[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content, number = _content(item.get("output")), item.get("call_id")
            out.append({"role": "tool", "tool_call_id": number, "content": content})
        elif kind == "reasoning":
            parts = take(item, "content", list, []) or take(item, "summary", list, [])
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            thoughts = "\n".join(text for text in texts if isinstance(text, str))
        else:
            problem = f"{name} has type {kind!r}, which is not supported"
            raise ApiError(400, f"{problem}; leave it out", name)
    return out


def _content(content: Any) -> Any:
    """Convert a content or a part to the names of chat completions, whose check refuses others."""
    if isinstance(content, list):
        return [_content(part) for part in content]
    kind = content.get("type") if isinstance(content, dict) else None
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": content.get("image_url")}}
    return {"type": "text", "text": content.get("text")} if kind in _TEXTS else content


def _tool(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind != "function":
        raise ApiError(400, f"tools of type {kind!r} are not supported; give functions", name)
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {k: tool[k] for k in fields if tool.get(k) is not None}}
