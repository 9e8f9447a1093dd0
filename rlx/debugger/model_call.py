"""Summarise an agent's HTTP request and its answer, in any API of OpenAI or Anthropic. Pure.

Answers may be streams of server-sent events. A body of unknown shape gives no text.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TEXT = 400  # characters of a message that are kept
_TEXTS = ("text", "thinking", "content", "partial_json", "output", "function", "tool_calls")
_ANSWERS = ("delta", "content_block", "item", "content", "output")  # of an event or an answer
_STOPS = ("finish_reason", "stop_reason", "status")
_WRONG_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)


@dataclass(slots=True)
class ModelCall:
    """A request for a completion and its answer.

    Attributes:
      path: after the base_url.
      begin: monotonic seconds; `seconds`: from there to the answer's end.
      status: HTTP status, 0 without an answer.
      error: the server's message, or why there is no answer.
      messages: (role, text), abbreviated; `answer`: text and tool calls, abbreviated.
    """

    path: str
    begin: float
    seconds: float = 0.0
    status: int = 0
    error: str = ""
    model: str = ""
    messages: list[tuple[str, str]] = field(default_factory=list)
    answer: str = ""
    completion_id: str = ""
    stop_reason: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the request succeeded."""
        return 200 <= self.status < 300 and not self.error

    def read_request(self, body: bytes) -> None:
        """Set model and messages from a request's body."""
        with contextlib.suppress(*_WRONG_SHAPE):
            request = json.loads(body)
            self.model = str(request.get("model") or "")
            messages = request.get("messages") or request.get("input") or request.get("prompt")
            if not isinstance(messages, list) or not isinstance(messages[0], Mapping):
                messages = [{"role": "prompt", "content": messages}]
            if system := request.get("system") or request.get("instructions"):
                messages = [{"role": "system", "content": system}, *messages]
            self.messages = [
                (str(m.get("role") or m.get("type")), shorten(_text(m))) for m in messages
            ]

    def read_answer(self, body: bytes) -> None:
        """Set text, id and stop reason from the received part of an answer's body."""
        if not self.ok:
            self.error = self.error or refusal(body) or "no answer"
            return
        with contextlib.suppress(*_WRONG_SHAPE):
            for event in _events(body):
                head = event.get("response") or event.get("message") or event
                self.completion_id = self.completion_id or str(head.get("id") or "")
                if event.get("error"):
                    self.error = refusal(json.dumps(event).encode())
                choices = [c for c in event.get("choices") or [{}] if not c.get("index")]
                choice = choices[0] if choices else {}
                if not str(event.get("type")).endswith(".done"):  # repeats the text
                    own = [choice.get(key) for key in ("message", "delta", "text")]
                    self.answer += _text([*own, *map(event.get, _ANSWERS)])
                for part in (head, event.get("delta"), choice):
                    if isinstance(part, Mapping):
                        found = next(filter(None, map(part.get, _STOPS)), self.stop_reason)
                        self.stop_reason = str(found)
        self.answer = shorten(self.answer)


def refusal(body: bytes) -> str:
    """Return the message in an error's body, as one line."""
    found: Any = body.decode(errors="replace")
    with contextlib.suppress(*_WRONG_SHAPE):
        found = json.loads(body)
        for key in ("error", "detail", "message"):
            found = found[key] if isinstance(found, Mapping) and found.get(key) else found
    return " ".join(str(found).split())[:300]


def shorten(text: str) -> str:
    """Return `text` without its middle if it is long."""
    return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]} … {text[-_TEXT // 2 :]}"


def _events(body: bytes) -> list[dict[str, Any]]:
    """Return the complete events of a stream, or an unstreamed answer as one event."""
    if body.lstrip().startswith(b"{"):
        return [json.loads(body)]
    lines = (line[5:] for line in body.splitlines() if line.startswith(b"data:"))
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def _text(value: Any) -> str:
    """Return the text of a message, part or event; a tool call is `→ name arguments`."""
    if isinstance(value, list):
        return " ".join(filter(None, map(_text, value)))
    if not isinstance(value, Mapping):
        return value if isinstance(value, str) else ""
    for given in (value[key] for key in ("arguments", "input") if key in value):
        name = f" → {value['name']} " if value.get("name") else ""
        return name + (given if isinstance(given, str) else json.dumps(given) if given else "")
    if not any(key in value for key in _TEXTS):
        return f"[{value['type']}]" if "type" in value else ""
    return _text([value.get(key) for key in _TEXTS])
