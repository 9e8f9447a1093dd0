"""Sessions of the gateway: the key of one run of an agent, and all that it asked. Pure.

Each prompt that goes on from an earlier one of the session, text for text, takes over that one's
tokens, sampled ones included, so that a conversation is one sequence of tokens however a tokenizer
would cut its text a second time.
"""

import asyncio
import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rollout.control_tokens import Own

_REMEMBERED = 100_000  # keys of ended sessions, answered by 410 rather than 401
_SEARCHED = 256  # interactions of an endless session that a prompt may go on from
_MOST_TOKENS = 4_000_000  # prompts' and drawn, that an endless session keeps, then begins anew


@dataclass(frozen=True, slots=True, eq=False)
class Interaction:
    """One completion that an agent was given.

    Attributes:
      completion_id: of the answer; `choice`: which of its choices.
      prompt_tokens: [P] int32. prompt_text: as rendered.
      completion: the tokens, logprobs and versions.
      raw: the completion's text with its special tokens; `text`: as the agent got it, tool calls
        included.
      parent: the interaction of the session (its number) whose tokens the prompt begins with.
      tool_calls: how many it has. seconds: from the request to the answer.
      memory: see `Session.remember`.
    """

    completion_id: str
    choice: int
    prompt_tokens: np.ndarray
    prompt_text: str
    completion: Completion
    raw: str
    text: str
    parent: int | None = None
    tool_calls: int = 0
    seconds: float = 0.0
    memory: tuple[str, str] | None = None

    @property
    def whole(self) -> str:
        """Prompt and completion, as the model saw them."""
        return self.prompt_text + self.raw


@dataclass(eq=False)
class Session:
    """One run of an agent as the gateway knows it.

    Attributes:
      defaults: of its requests; `defaults.seed` is the run's.
      temperature_fixed: see `chat.read`.
      interactions: in the order in which they were finished.
      reward: what was told over HTTP in place of what `run` returns; `rewarded`: once it was.
      endless: whether it is of a key that is let in for good, and forgets.
      tasks: requests under way, cancelled when the session ends.
      on_keep: is told of what is kept, before it is.
    """

    key: str
    defaults: Sampling
    temperature_fixed: bool = False
    priority: int = 0
    endless: bool = False
    interactions: list[Interaction] = field(default_factory=list)
    reward: Any = None
    rewarded: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task] = field(default_factory=set)
    on_keep: Callable[[Interaction], None] | None = None
    _asked: dict[bytes, int] = field(default_factory=dict)
    _tokens: int = 0
    _said: dict[str, str] = field(default_factory=dict)

    def prompt(
        self, text: str, encode: Callable[[str], list[int]]
    ) -> tuple[np.ndarray, int | None]:
        """Return the tokens of a rendered prompt and the interaction that it goes on from.

        Args:
          encode: text to tokens.

        Returns:
          ([P] int32, number of the interaction or None).
        """
        parent, length = None, 0
        # Of a key that is let in for good the latest will do: it may have asked 100,000 times.
        start = max(0, len(self.interactions) - _SEARCHED) if self.endless else 0
        for number, earlier in enumerate(self.interactions[start:], start):
            own, raw = earlier.prompt_text, earlier.raw
            fits = length < len(own) + len(raw) <= len(text) and text.startswith(own)
            if fits and text.startswith(raw, len(own)):
                parent, length = number, len(own) + len(raw)
        if parent is None:
            return np.array(encode(text), np.int32), None
        before = self.interactions[parent]
        parts = (before.prompt_tokens, before.completion.tokens, encode(text[length:]))
        return np.concatenate([np.asarray(p, np.int32) for p in parts]), parent

    def seed(self, prompt_tokens: np.ndarray) -> int:
        """Return a seed in [0, 2³¹) made of the session's, the prompt, and how often it came.

        So requests that an agent sends at once do not depend on which is first.
        """
        self._tokens += len(prompt_tokens)
        tokens = prompt_tokens.astype(np.int32).tobytes()
        asked = self._asked[tokens] = self._asked.get(tokens, -1) + 1
        start = f"{self.defaults.seed} {asked} ".encode()
        return int.from_bytes(hashlib.blake2b(start + tokens, digest_size=4).digest(), "big") >> 1

    def keep(self, interaction: Interaction) -> None:
        """Record what the agent is given."""
        if self.on_keep:
            self.on_keep(interaction)
        if interaction.memory:
            self._said.update([interaction.memory])
        self._tokens += len(interaction.completion.tokens)
        self.interactions.append(interaction)

    @property
    def full(self) -> bool:
        """Whether it has been asked and has said more than an endless session keeps."""
        return self.endless and self._tokens > _MOST_TOKENS

    def remember(
        self, before: Sequence[Any], content: str | None, calls: Sequence[Any], raw: str
    ) -> tuple[str, str]:
        """Return what keeps the model's own words, where the agent gets calls or no thoughts."""
        *_, key = _keys([*before, {"role": "assistant", "content": content, "tool_calls": calls}])
        return key, raw

    def verbatim(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages, with unchanged ones of the model in its own words again."""
        if not self._said:
            return list(messages)
        found = [self._said.get(key) for key in _keys(messages)]
        return [
            message if raw is None else {"role": "assistant", "content": Own(raw)}
            for message, raw in zip(messages, found, strict=True)
        ]


class Sessions:
    """All sessions of a gateway, by key."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def open(self, defaults: Sampling, key: str | None = None, **options: Any) -> Session:
        """Return a new session; `options` are attributes of Session.

        Args:
          key: None: a new one; "": all that have no session of their own.
        """
        key = "rlx-" + secrets.token_urlsafe(24) if key is None else key
        session = self._open[key] = Session(key, defaults, **options)
        return session

    def find(self, key: str) -> Session | None:
        """Return the open session of a key, or None."""
        found = self._open.get(key) or self._open.get("")
        if found and found.full:
            return self.open(found.defaults, found.key, endless=True)
        return found

    def ended(self, key: str) -> bool:
        """Return whether the session of a key has ended."""
        return key in self._ended

    def end(self, session: Session) -> list[Interaction]:
        """End a session and the requests that it has under way; return its interactions."""
        if self._open.pop(session.key, None):
            self._ended[session.key] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        for task in list(session.tasks):
            task.cancel()
        return session.interactions


def _keys(messages: Sequence[Any]) -> Iterator[str]:
    """Yield what each message is known by: what it says, and without calls all before it too."""
    before = hashlib.blake2b()
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append((call["id"], call["function"]["name"], read))
        words = (message["content"] or "").strip()
        own = json.dumps([message["role"], words, calls], sort_keys=True)
        yield own if calls else own + before.hexdigest()
        before.update(own.encode())
