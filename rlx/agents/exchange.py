"""One call of an agent to a model server: what was asked and answered, in few words. Pure.

Reads chat completions, completions and responses of OpenAI's API and messages of Anthropic's, as
one JSON object or as a stream of server-sent events.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_LIMIT = 2_000  # characters kept of one message
MESSAGES_LIMIT = 40  # messages kept of one request
_GENERATES = ("/completions", "/messages", "/responses")
_LAST_EVENTS = (
    b"data: [DONE]",
    b"data:[DONE]",
    b"event: message_stop",
    b"event: response.completed",
)


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request of an agent, seen between it and the server.

    Attributes:
      run: whose it is, by the base_url that was used.
      path: behind the base_url, `/chat/completions`.
      begin, first, end: seconds, monotonic of this machine: the request was read, the answer's
        first byte and its last. `first` is 0 where nothing came.
      status: of HTTP; 0: no answer.
      error: the server's words where it refused, or what kept it from answering.
      model: as asked for by the agent.
      messages: (role, text) of the request, abbreviated.
      answer: the completion's text and tool calls, abbreviated.
      completion_id: by which a reward is given; "" where there is none.
      prompt_tokens, completion_tokens: as the server counts; −1 where it does not say.
      stop_reason: the server's word for it.
      streamed: the answer came as events.
      own_key: the agent sent another API key than the one it was given.
    """

    run: int
    path: str
    begin: float
    end: float
    first: float = 0.0
    status: int = 0
    error: str = ""
    model: str = ""
    messages: list[list[str]] = field(default_factory=list)
    answer: str = ""
    completion_id: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1
    stop_reason: str = ""
    streamed: bool = False
    own_key: bool = False

    @property
    def seconds(self) -> float:
        """From the request to the answer's end."""
        return self.end - self.begin

    @property
    def ok(self) -> bool:
        """The server answered as asked."""
        return 200 <= self.status < 300 and not self.error

    @property
    def generates(self) -> bool:
        """It asks for a completion; others list models and the like."""
        return self.path.endswith(_GENERATES)


def asked(body: bytes) -> dict[str, Any]:
    """The fields `model` and `messages` of a Call, from a request's body."""
    request = _object(body)
    messages = request.get("messages", request.get("input", request.get("prompt", [])))
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        messages = [{"role": "prompt", "content": messages}] if messages else []
    if (system := request.get("system", request.get("instructions"))) is not None:
        messages = [{"role": "system", "content": system}, *messages]
    kept = [[str(m.get("role", m.get("type", ""))), shorten(_said(m))] for m in messages]
    if len(kept) > MESSAGES_LIMIT:
        half = MESSAGES_LIMIT // 2
        kept = [*kept[:half], ["…", f"{len(kept) - 2 * half} more"], *kept[-half:]]
    return {"model": str(request.get("model", "")), "messages": kept}


def answered(body: bytes, streamed: bool) -> dict[str, Any]:
    """The fields of a Call that an answer of status 200 gives."""
    found = _assembled(body) if streamed else _object(body)
    usage = _mapping(found.get("usage"))
    text, stop = _completion(found)
    return {
        "completion_id": str(found.get("id") or ""),
        "answer": shorten(text),
        "stop_reason": str(stop or ""),
        "prompt_tokens": _count(usage, "prompt_tokens", "input_tokens"),
        "completion_tokens": _count(usage, "completion_tokens", "output_tokens"),
        "error": refusal(body) if found.get("error") else "",
    }


def ended(tail: bytes) -> bool:
    """Whether the last event of a stream is in `tail`: many clients hang up at it."""
    return any(mark in tail for mark in _LAST_EVENTS)


def refusal(body: bytes) -> str:
    """A server's error message, from whichever shape it is in."""
    found: Any = _object(body)
    for key in ("error", "detail", "message"):
        if isinstance(found, Mapping) and found.get(key):
            found = found[key]
    if isinstance(found, Mapping):
        found = json.dumps(found) if found else body.decode("utf-8", "replace")
    return " ".join(str(found).split())[:300]


def shorten(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` with its middle cut out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = max((limit - 3) // 2, 1)
    return f"{text[:half]} … {text[-half:]}"


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _said(message: Mapping[str, Any]) -> str:
    """Text of a message's content, its tool calls and results, in order."""
    parts = [_text(message.get("content", message.get("output", "")))]
    parts += [_tool_call(call) for call in _list(message.get("tool_calls"))]
    return " ".join(filter(None, parts))


def _text(content: Any) -> str:
    """Content is text, or a list of parts of which some have text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return str(content)
    if all(isinstance(part, int) for part in content):
        return f"[{len(content)} token ids]"
    return " ".join(filter(None, map(_part, content)))


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    if part.get("type") in ("tool_use", "function_call"):
        given = part.get("arguments", part.get("input"))
        return f"→ {part.get('name')}({given if isinstance(given, str) else json.dumps(given)})"
    if "text" in part:
        return str(part["text"])
    if "content" in part:
        return _text(part["content"])
    return f"[{part.get('type', 'part')}]"


def _tool_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "→ a tool call"
    return f"→ {function.get('name')}({function.get('arguments') or ''})"


def _completion(found: Mapping[str, Any]) -> tuple[str, Any]:
    """(text, stop reason) of an answer."""
    choices = found.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        first = choices[0]
        text = _said(_mapping(first.get("message"))) or str(first.get("text") or "")
        more = f" [and {len(choices) - 1} more choices]" if len(choices) > 1 else ""
        return text + more, first.get("finish_reason")
    if isinstance(found.get("output"), list):  # of /responses
        return _text(found["output"]), found.get("status")
    return _text(found.get("content")), found.get("stop_reason")


def _count(usage: Any, *names: str) -> int:
    if not isinstance(usage, Mapping):
        return -1
    return next((int(usage[n]) for n in names if isinstance(usage.get(n), int)), -1)


def _mapping(value: Any) -> Mapping[str, Any]:
    """Itself, or an empty one: servers send null, and some send anything."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.splitlines():
        if line.startswith(b"data:") and (event := _object(line[5:])):
            yield event


def _assembled(body: bytes) -> dict[str, Any]:
    """A stream's events put together to the object that one answer would have been."""
    out: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    text: list[str] = []
    calls: dict[str, dict[str, str]] = {}
    stop, chat = None, False
    for event in _events(body):
        out |= _mapping(event.get("response"))  # of /responses: the last one has it all
        begun = _mapping(event.get("message"))  # of Anthropic's
        if begun.get("id") or ("choices" in event and event.get("id")):
            out["id"] = begun.get("id") or event["id"]
        for part in (out.get("usage"), begun.get("usage"), event.get("usage")):
            usage |= _mapping(part)
        if event.get("error"):
            out["error"] = event["error"]
        delta = _mapping(event.get("delta"))
        text.append(str(delta.get("text") or ""))
        stop = delta.get("stop_reason") or stop
        for choice in map(_mapping, _list(event.get("choices"))[:1]):
            chat, stop = True, choice.get("finish_reason") or stop
            delta = _mapping(choice.get("delta"))
            text.append(str(delta.get("content") or choice.get("text") or ""))
            for call in map(_mapping, _list(delta.get("tool_calls"))):
                kept = calls.setdefault(str(call.get("index", 0)), {})
                _extend(kept, _mapping(call.get("function")))
    if chat:
        message = {
            "content": "".join(text),
            "tool_calls": [{"function": c} for c in calls.values()],
        }
        out["choices"] = [{"message": message, "finish_reason": stop}]
    elif "output" not in out:
        out |= {"content": "".join(text), "stop_reason": stop}
    return {**out, "usage": usage}


def _extend(call: dict[str, str], piece: Mapping[str, Any]) -> None:
    for key in ("name", "arguments"):
        call[key] = call.get(key, "") + str(piece.get(key) or "")
