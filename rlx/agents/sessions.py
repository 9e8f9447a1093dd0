"""Sessions of the gateway: the key of one run of an agent, and all that it asked. Pure.

Each prompt that goes on from an earlier one of the session, text for text, takes over that one's
tokens, sampled ones included, so that a conversation is one sequence of tokens however a tokenizer
would cut its text a second time. Which completion a request goes on from is known by its messages,
also where a template rewrites them and no tokens can be taken over.
"""

import asyncio
import hashlib
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rollout.control_tokens import Own

_REMEMBERED = 100_000  # keys of ended sessions, answered by 410 rather than 401
_SEARCHED = 256  # interactions of an endless session that a prompt may go on from
_MOST_TOKENS = 4_000_000  # prompts' and drawn, that an endless session keeps, then begins anew


class TurnPlace(NamedTuple):
    """The place of a request in the conversations of its session.

    Attributes:
      after: the interaction (its number) that it goes on from; None: it begins a conversation.
      since: a digest of the messages that came since. last: the last of them, see `message_key`.
    """

    after: int | None = None
    since: str = ""
    last: str = ""


_NOWHERE = TurnPlace()


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
      place: in its conversation, which has an order also where `parent` is None.
      said: the key of the answer, see `message_key`; "": unknown.
      memory: the model's own words, where the agent got others; "": it got these.
      retry: whether the client asked again because it got no answer.
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
    place: TurnPlace = _NOWHERE
    said: str = ""
    memory: str = ""
    retry: bool = False

    @property
    def after(self) -> int | None:
        """Return the interaction of the session that its conversation goes on from."""
        return self.parent if self.place.after is None else self.place.after

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
    # Numbers of interactions by their place, and by their answer and the message before it.
    _places: dict[tuple[int | None, str], list[int]] = field(default_factory=dict)
    _answers: dict[tuple[str, str], int] = field(default_factory=dict)
    _failed: Counter[str] = field(default_factory=Counter)  # requests without an answer, by prompt

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
        for number, earlier in self._searched():
            own, raw = earlier.prompt_text, earlier.raw
            # Of equal ones the latest: an answer that was lost came before the one that was not.
            fits = length <= len(own) + len(raw) <= len(text) and text.startswith(own)
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
        number, place = len(self.interactions), interaction.place
        if interaction.said:
            self._places.setdefault((place.after, place.since), []).append(number)
            self._answers[_known_by(place.last, interaction.said)] = number
        self._tokens += len(interaction.completion.tokens)
        self.interactions.append(interaction)

    def failed(self, name: str, prompt_text: str) -> None:
        """Note that a request ended in an error, unless its answer `name` was kept."""
        if not (self.endless or any(i.completion_id == name for i in self.interactions)):
            self._failed[prompt_text] += 1

    def answered_before(self, prompt_text: str) -> bool:
        """Return whether a request that a client sends again had an answer, which was lost."""
        failed = self._failed[prompt_text] > 0
        self._failed[prompt_text] -= failed
        return not failed

    @property
    def full(self) -> bool:
        """Whether it has been asked and has said more than an endless session keeps."""
        return self.endless and self._tokens > _MOST_TOKENS

    def recognise(self, messages: Sequence[Any]) -> tuple[list[Any], TurnPlace]:
        """Return the messages, the model's own in its own words, and the place of the request."""
        after, since, last, out = None, hashlib.blake2b(digest_size=16), "", list(messages)
        for at, message in enumerate(messages):
            own, said = message_key(message), message["role"] == "assistant"
            found = self._answer(after, since.hexdigest(), last, own) if said else None
            if found is None:
                since.update(own.encode())
                last = own
                continue
            after, since, earlier = found, hashlib.blake2b(digest_size=16), self.interactions[found]
            if earlier.memory and earlier.said == own:
                out[at] = {"role": "assistant", "content": Own(earlier.memory)}
        after = self._within(last) if after is None else after
        return out, TurnPlace(after, since.hexdigest(), last)

    def _answer(self, after: int | None, since: str, last: str, own: str) -> int | None:
        """Return the interaction whose answer a message is, changed or not; None: no such one."""
        several = self._places.get((after, since), [])[-_SEARCHED:]
        said = {number: self.interactions[number].said for number in several}
        same = [number for number in several if said[number] == own]
        elsewhere = self._answers.get(_known_by(last, own))
        if same or elsewhere is not None or not several:
            return same[-1] if same else elsewhere
        # Agents send other words than they got: of several the most alike, or else the latest.
        alike = {n: len(commonprefix([said[n], own])) for n in several}  # noqa: RUF071
        return max(several, key=lambda n: (alike[n], n))

    def _within(self, last: str) -> int | None:
        """Return the latest interaction that a message repeats, its answer included."""
        best, found = 0, None
        for number, earlier in self._searched():
            head = earlier.place.last[: -len(_END)]
            if best <= len(head) and earlier.said and last.startswith(head):
                words, asked, answer = (
                    json.loads(key)[1] for key in (last, earlier.place.last, earlier.said)
                )
                rest = words[len(asked) :].lstrip()
                ends = rest.startswith(answer) and not rest[len(answer) :][:1].strip()
                if asked and answer and ends:
                    best, found = len(head), number
        return found

    def _searched(self) -> Iterator[tuple[int, Interaction]]:
        """Return the interactions that a request may go on from, with their numbers."""
        # Of a key that is let in for good the latest will do: it may have asked 100,000 times.
        start = max(0, len(self.interactions) - _SEARCHED) if self.endless else 0
        return enumerate(self.interactions[start:], start)


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


_END = '", []]'  # of the key of a message without calls


def message_key(message: Mapping[str, Any]) -> str:
    """Return role, words and calls of a message, in one form however they are written."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["id"], call["function"]["name"], read))
    words = (message["content"] or "").strip()
    return json.dumps([message["role"], words, calls], sort_keys=True)


def _known_by(last: str, said: str) -> tuple[str, str]:
    return last if said.endswith(_END) else "", said  # calls have ids, which no other answer has
