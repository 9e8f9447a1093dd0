"""OpenAI's Responses API in terms of chat completions, as some frameworks ask by default. Pure.

(https://platform.openai.com/docs/api-reference/responses) One request is one completion: nothing is
kept between two, and nothing is streamed; both are refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.agents.chat import IGNORED, ApiError, check_fields, wrong

_SAME = ("model", "temperature", "top_p", "tool_choice", "chat_template_kwargs")
_REFUSED = frozenset({
    "stream", "previous_response_id", "conversation", "background", "prompt", "top_logprobs",
    "max_tool_calls",
})  # fmt: skip
_TAKEN = frozenset({*_SAME, "input", "instructions", "max_output_tokens", "tools", "text"})
_TEXTS = ("input_text", "output_text", "text")


def to_chat(data: Any) -> dict[str, Any]:
    """Return a request's JSON as that of a chat completion, which checks the rest of it.

    Raises:
      ApiError: 400, naming the field.
    """
    check_fields(data, _TAKEN, IGNORED | {"include", "reasoning", "truncation"}, _REFUSED)
    form = (data.get("text") or {}).get("format") if isinstance(data.get("text"), dict) else None
    if form and form.get("type") != "text":
        raise ApiError(400, "text.format can be {'type': 'text'} only; ask in words", "text")
    out = {name: data[name] for name in _SAME if data.get(name) is not None}
    if data.get("max_output_tokens") is not None:
        out["max_completion_tokens"] = data["max_output_tokens"]
    if data.get("tools"):
        out["tools"] = _tools(data["tools"])
    system = data.get("instructions")
    out["messages"] = [
        *([{"role": "system", "content": system}] if system else []),
        *_messages(data.get("input")),
    ]
    return out


def output(
    content: str | None, calls: Sequence[Mapping], reason: str, new_id: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return what a model said as the items of a response.

    Args:
      calls: of tools, as chat completions have them.
      reason: the finish_reason of a chat completion.
      new_id: makes an id from its beginning.
    """
    out: list[dict[str, Any]] = []
    if content or not calls:
        text = {"type": "output_text", "text": content or "", "annotations": [], "logprobs": []}
        out.append({
            "type": "message", "id": new_id("msg_"), "role": "assistant", "status": _status(reason),
            "content": [text],
        })  # fmt: skip
    for call in calls:
        out.append({
            "type": "function_call", "id": new_id("fc_"), "call_id": call["id"],
            "name": call["function"]["name"], "arguments": call["function"]["arguments"],
            "status": "completed",
        })  # fmt: skip
    return out


def answer(
    head: Mapping[str, Any], items: Sequence[Mapping], reason: str, usage: Mapping[str, int]
) -> dict[str, Any]:
    """Return a whole response.

    Args:
      head: id, created (seconds since 1970) and model.
      items: of `output`.
      usage: token counts, as chat completions have them.
    """
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "status": _status(reason),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
        "model": head["model"],
        "output": list(items),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _messages(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list):
        raise wrong("input", found, "a text or a list")
    out: list[dict[str, Any]] = []
    for index, item in enumerate(found):
        name = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong(name, item, "an object")
        kind = item.get("type", "message")
        if kind == "message":
            out.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            # What was one message goes on as one: words first, then its calls.
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            out[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"))
            call_id = item.get("call_id")
            out.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind != "reasoning":
            raise ApiError(400, f"{name} has type {kind!r}, which is not read here", name)
    return out


def _content(content: Any) -> Any:
    """Return parts of text as chat completions name them, which refuse other parts."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXTS
        else part
        for part in content
    ]


def _tools(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list")
    out = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise ApiError(400, f"a tool of type {kind!r} is not done here", f"tools[{index}]")
        function = {k: tool[k] for k in ("name", "description", "parameters") if k in tool}
        out.append({"type": "function", "function": function})
    return out
