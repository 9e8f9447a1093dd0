"""Sessions of the gateway: all requests and answers of one run of an agent. Pure.

A prompt whose text continues an earlier one reuses its tokens, sampled ones included. So a
conversation is one sequence of tokens, even if encoding its text would give others. If a chat
template rewrites earlier messages, the order of a conversation follows from the messages.
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

from rlx.base import seed_of
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rollout.control_tokens import Own

_REMEMBERED = 100_000  # keys of ended sessions, answered by 410 rather than 401
_SEARCHED = 256  # latest interactions of an endless session that a prompt may continue
_MOST_TOKENS = 4_000_000  # of prompts and completions; a larger endless session starts afresh


class TurnPlace(NamedTuple):
    """Place of a request in the conversations of its session."""

    after: int | None = None  # interaction that it continues; None for a new conversation
    since: str = ""  # digest of the messages after that one
    last: str = ""  # `message_key` of the last message


_NOWHERE = TurnPlace()


@dataclass(frozen=True, slots=True, eq=False)
class Interaction:
    """One completion of a request."""

    completion_id: str  # id of the answer
    choice: int  # index in it
    prompt_tokens: np.ndarray  # [P] int32
    prompt_text: str
    completion: Completion  # tokens, logprobs and versions
    raw: str  # the completion's text with special tokens
    text: str  # the text that the agent received, with tool calls
    parent: int | None = None  # number of the interaction whose tokens the prompt begins with
    tool_calls: int = 0  # their number
    seconds: float = 0.0  # from request to answer
    place: TurnPlace = _NOWHERE  # in its conversation, known even if `parent` is None
    said: str = ""  # `message_key` of the answer, "" if unknown
    memory: str = ""  # the model's own text, if the agent received another
    retry: bool = False  # whether the client resent the request after losing its answer
    images: tuple[str, ...] = ()  # names of those in the prompt

    @property
    def after(self) -> int | None:
        """Return the number of the interaction that this one continues."""
        return self.parent if self.place.after is None else self.place.after

    @property
    def full_text(self) -> str:
        """Return prompt and completion as the model saw them."""
        return self.prompt_text + self.raw


@dataclass(eq=False)
class Session:
    """Requests and answers of one run of an agent."""

    key: str
    defaults: Sampling  # sampling of requests; its seed is the run's
    temperature_fixed: bool = False  # see `chat.read`
    priority: int = 0
    endless: bool = False  # a permanent API key; old interactions are discarded
    fleet: Any = None  # generates for this session; None: the gateway's
    trace: tuple[Any, Any] = (None, None)  # of its rollout, see `observe.traces.here`
    interactions: list[Interaction] = field(default_factory=list)  # in the order of answers
    reward: Any = None  # sent over HTTP; `rewarded` is set with it
    rewarded: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task] = field(default_factory=set)  # open; cancelled when it ends
    on_keep: Callable[[Interaction], None] | None = None  # gets each interaction before it is kept
    tokens: int = 0  # of all prompts and completions
    _asked: dict[bytes, int] = field(default_factory=dict)
    # Numbers of interactions, by place and by (message before the answer, answer).
    _places: dict[tuple[int | None, str], list[int]] = field(default_factory=dict)
    _answers: dict[tuple[str, str], int] = field(default_factory=dict)
    _failed: Counter[str] = field(default_factory=Counter)  # failed requests by prompt

    def prompt(
        self, text: str, encode: Callable[[str, tuple], list[int]], images: tuple[str, ...] = ()
    ) -> tuple[np.ndarray, int | None]:
        """Return a prompt's tokens, [P] int32, and the interaction that it continues, or None."""
        parent, length = None, 0
        for number, earlier in self._candidates():
            prompt, raw = earlier.prompt_text, earlier.raw
            # Of equal ones the latest: a lost answer comes before its retry.
            fits = length <= len(prompt) + len(raw) <= len(text) and text.startswith(prompt)
            fits = fits and images[: len(earlier.images)] == earlier.images
            if fits and text.startswith(raw, len(prompt)):
                parent, length = number, len(prompt) + len(raw)
        if parent is None:
            return np.array(encode(text, images), np.int32), None
        before = self.interactions[parent]
        new = encode(text[length:], images[len(before.images) :])
        parts = (before.prompt_tokens, before.completion.tokens, new)
        return np.concatenate([np.asarray(p, np.int32) for p in parts]), parent

    def seed(self, prompt_tokens: np.ndarray) -> int:
        """Return a seed in [0, 2³¹), a hash of the session's seed, the prompt and its count."""
        # So concurrent requests get the same seeds in any order.
        self.tokens += len(prompt_tokens)
        tokens = prompt_tokens.astype(np.int32).tobytes()
        count = self._asked[tokens] = self._asked.get(tokens, -1) + 1
        return seed_of(f"{self.defaults.seed} {count} ".encode() + tokens)

    def keep(self, interaction: Interaction) -> None:
        """Record an answer."""
        if self.on_keep:
            self.on_keep(interaction)
        number, place = len(self.interactions), interaction.place
        if interaction.said:
            self._places.setdefault((place.after, place.since), []).append(number)
            self._answers[_known_by(place.last, interaction.said)] = number
        self.tokens += len(interaction.completion.tokens)
        self.interactions.append(interaction)

    def failed(self, name: str, prompt_text: str) -> None:
        """Count a failed request, unless its answer `name` was kept."""
        if not (self.endless or any(i.completion_id == name for i in self.interactions)):
            self._failed[prompt_text] += 1

    def answered_before(self, prompt_text: str) -> bool:
        """Return whether a resent request had an answer, which was lost."""
        failed = self._failed[prompt_text] > 0
        self._failed[prompt_text] -= failed
        return not failed

    def recognise(self, messages: Sequence[Any]) -> tuple[list[Any], TurnPlace]:
        """Return the messages, with answers as the model wrote them, and the request's place."""
        after, since, last, out = None, hashlib.blake2b(digest_size=16), "", list(messages)
        for at, message in enumerate(messages):
            key, is_answer = message_key(message), message["role"] == "assistant"
            match = self._answer(after, since.hexdigest(), last, key) if is_answer else None
            if match is None:
                since.update(key.encode())
                last = key
                continue
            after, since, earlier = match, hashlib.blake2b(digest_size=16), self.interactions[match]
            if earlier.memory and earlier.said == key:
                out[at] = {"role": "assistant", "content": Own(earlier.memory)}
        after = self._within(last) if after is None else after
        return out, TurnPlace(after, since.hexdigest(), last)

    def _answer(self, after: int | None, since: str, last: str, key: str) -> int | None:
        """Return the interaction whose answer a message repeats, exactly or roughly, or None."""
        several = self._places.get((after, since), [])[-_SEARCHED:]
        answers = {number: self.interactions[number].said for number in several}
        same = [number for number in several if answers[number] == key]
        elsewhere = self._answers.get(_known_by(last, key))
        if same or elsewhere is not None or not several:
            return same[-1] if same else elsewhere
        # The agent changed the answer: take the most similar one, or else the latest.
        alike = {n: len(commonprefix([answers[n], key])) for n in several}  # noqa: RUF071
        return max(several, key=lambda n: (alike[n], n))

    def _within(self, last: str) -> int | None:
        """Return the latest interaction whose last message and answer a message contains."""
        best, match = 0, None
        for number, earlier in self._candidates():
            head = earlier.place.last[: -len(_END)]
            if best <= len(head) and earlier.said and last.startswith(head):
                keys = last, earlier.place.last, earlier.said
                words, question, answer = (json.loads(key)[1] for key in keys)
                rest = words[len(question) :].lstrip()
                ends = rest.startswith(answer) and not rest[len(answer) :][:1].strip()
                if question and answer and ends:
                    best, match = len(head), number
        return match

    def _candidates(self) -> Iterator[tuple[int, Interaction]]:
        """Return (number, interaction) of all that a request may continue."""
        # An endless session may have 100,000 interactions, so only the latest are searched.
        start = max(0, len(self.interactions) - _SEARCHED) if self.endless else 0
        return enumerate(self.interactions[start:], start)


class Sessions:
    """All sessions of a gateway, by key."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def open(self, defaults: Sampling, key: str | None = None, **options: Any) -> Session:
        """Open a session; `options` are attributes of Session.

        The key is a new one for None; "" stands for all keys without a session.
        """
        key = "rlx-" + secrets.token_urlsafe(24) if key is None else key
        session = self._open[key] = Session(key, defaults, **options)
        return session

    def find(self, key: str) -> Session | None:
        """Return the open session of a key, or None."""
        session = self._open.get(key) or self._open.get("")
        if session and session.endless and session.tokens > _MOST_TOKENS:
            return self.open(session.defaults, session.key, endless=True)
        return session

    def ended(self, key: str) -> bool:
        return key in self._ended

    def end(self, session: Session) -> None:
        """End a session and cancel its requests."""
        if self._open.pop(session.key, None):
            self._ended[session.key] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        for task in list(session.tasks):
            task.cancel()


_END = '", []]'  # end of the key of a message without calls


def message_key(message: Mapping[str, Any]) -> str:
    """Return a canonical text of a message's role, content and calls."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["id"], call["function"]["name"], value))
    content = message["content"] or ""
    words = content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return json.dumps([message["role"], words, calls], sort_keys=True)


def _known_by(last: str, key: str) -> tuple[str, str]:
    return last if key.endswith(_END) else "", key  # ids of calls are unique
