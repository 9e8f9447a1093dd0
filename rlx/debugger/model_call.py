"""An HTTP request of an agent and the server's answer, in words. Pure.

Reads chat completions, completions and responses of OpenAI's API and messages of Anthropic's, whole
or as a stream of server-sent events; a body of another shape gives no words.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TEXT = 2_000  # characters kept of one message
_MESSAGES = 40  # messages kept of one request
_GENERATES = ("/completions", "/messages", "/responses")
_TEXTS = ("text", "content", "output", "function", "tool_calls")  # where a message has its words
_WRONG_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)


@dataclass(slots=True)
class ModelCall:
    """An HTTP request of an agent, seen between it and the server.

    Attributes:
      run: number of the run whose base_url was used; `path`: what follows it.
      begin, first, end: seconds, monotonic, at which the request was read and the answer's first
        and last byte came; 0 where they did not.
      status: of HTTP, 0 without an answer; `error`: the server's words, or why there was none.
      model: as the agent asked for it.
      messages: (role, text) of the request; `answer`: text and tool calls; both abbreviated.
      completion_id: the id by which a reward is given; "" where there is none.
      prompt_tokens, completion_tokens: as the server counts; −1 where it does not say.
      stop_reason: the server's word for it.
      streamed: whether the answer came as events.
    """

    run: int
    path: str
    begin: float
    end: float = 0.0
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

    @property
    def seconds(self) -> float:
        """Seconds from the request to the answer's end."""
        return self.end - self.begin

    @property
    def ok(self) -> bool:
        """Whether the server answered as asked."""
        return 200 <= self.status < 300 and not self.error

    @property
    def generates(self) -> bool:
        """Whether it asks for a completion; others list models and the like."""
        return self.path.endswith(_GENERATES)

    def ask(self, body: bytes) -> None:
        """Take the model and the messages from a request's body."""
        with contextlib.suppress(*_WRONG_SHAPE):
            request = json.loads(body)
            self.model = str(request.get("model") or "")
            said = request.get("messages") or request.get("input") or request.get("prompt") or []
            if not isinstance(said, list) or not all(isinstance(m, Mapping) for m in said):
                said = [{"role": "prompt", "content": said}]
            if system := request.get("system") or request.get("instructions"):
                said = [{"role": "system", "content": system}, *said]
            half, more = _MESSAGES // 2, len(said) - _MESSAGES
            if more > 0:
                said = [*said[:half], {"role": "…", "content": f"{more} more"}, *said[-half:]]
            self.messages = [[str(m.get("role") or m.get("type")), _short(m)] for m in said]

    def hear(self, body: bytes) -> None:
        """Take the answer's words, id, tokens and stop reason from its body, as far as it came."""
        if self.status >= 300:
            self.error = refusal(body) or f"status {self.status}"
            return
        with contextlib.suppress(*_WRONG_SHAPE):
            found = _assembled(body) if self.streamed else json.loads(body)
            choices = found.get("choices") or [found]
            more = f"[and {len(choices) - 1} more choices]" if len(choices) > 1 else ""
            self.answer = _short([choices[0].get("message") or choices[0], more])
            self.completion_id = str(found.get("id") or "")
            self.error = _refusal(found) if found.get("error") else ""
            stops = (choices[0].get("finish_reason"), found.get("stop_reason"), found.get("status"))
            self.stop_reason = str(next(filter(None, stops), ""))
            used = found.get("usage") or {}
            self.prompt_tokens = int(used.get("prompt_tokens", used.get("input_tokens", -1)))
            written = used.get("completion_tokens", used.get("output_tokens", -1))
            self.completion_tokens = int(written)


def refusal(body: bytes) -> str:
    """Return a server's error message, from whichever shape it is in."""
    try:
        return _refusal(json.loads(body))
    except (ValueError, RecursionError):
        return " ".join(body.decode("utf-8", "replace").split())[:300]


def shorten(text: str, limit: int = _TEXT) -> str:
    """Return `text`, its middle cut out where it is longer than `limit` characters."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def _short(message: Any) -> str:
    return shorten(_words(message))


def _refusal(found: Any) -> str:
    for key in ("error", "detail", "message"):
        if isinstance(found, Mapping) and found.get(key):
            found = found[key]
    return " ".join(str(found).split())[:300]


def _words(value: Any) -> str:
    """Return the text of a message, a part or an answer; a tool call as `→ name(arguments)`."""
    if isinstance(value, list):
        return " ".join(filter(None, map(_words, value)))
    if not isinstance(value, Mapping):
        return value if isinstance(value, str) else ""
    for given in (value[key] for key in ("arguments", "input") if key in value):
        return f"→ {value['name']}({given if isinstance(given, str) else json.dumps(given)})"
    said = _words([value.get(key) for key in _TEXTS])
    return said or (f"[{value['type']}]" if "type" in value else "")


def _assembled(body: bytes) -> dict[str, Any]:
    """Return the object that one answer would have been, put together from a stream's events."""
    found: dict[str, Any] = {"content": ""}
    usage: dict[str, Any] = {}
    calls: dict[int, dict[str, str]] = {}
    for line in body.splitlines():
        if not line.startswith(b"data:") or not line.endswith(b"}"):  # [DONE], or cut off
            continue
        event = json.loads(line[5:])
        found |= event.get("response") or {}  # of /responses: the last one has it all
        begun = event.get("message") or {}  # of Anthropic's
        found["id"] = begun.get("id") or event.get("id") or found.get("id")
        found["error"] = event.get("error") or found.get("error")
        for part in (found, begun, event):
            usage |= part.get("usage") or {}
        delta = event.get("delta") or {}
        for choice in event.get("choices") or []:
            if choice.get("index", 0) == 0:
                delta = choice.get("delta") or {"content": choice.get("text")}
                found["stop_reason"] = choice.get("finish_reason") or found.get("stop_reason")
        if isinstance(delta, str):  # of /responses
            continue
        found["stop_reason"] = delta.get("stop_reason") or found.get("stop_reason")
        pieces = (delta.get(key) for key in ("content", "text", "partial_json"))
        found["content"] += next(filter(None, pieces), "")
        for call in delta.get("tool_calls") or []:
            kept = calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
            for key in kept:
                kept[key] += call["function"].get(key) or ""
    return {**found, "usage": usage, "tool_calls": [{"function": call} for call in calls.values()]}
