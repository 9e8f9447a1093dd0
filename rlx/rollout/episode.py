"""One answer in several pieces: what the model was shown, and what it sampled in between.

Sampled tokens stay as they are; what comes next is appended, and no text is tokenised twice.
"""

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from rlx.base import Trajectory, UserError
from rlx.engines.stop_strings import cut
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rewards.reward_pool import RewardCall
from rlx.rollout.workflows import Generator, Prompts, Task, chat, joined

_MARK = "@@ANSWER@@"  # stands for an answer, to find what a chat template puts behind it


class Episode:
    """One sample in the making; `left` of its tokens, against which what it is shown counts too."""

    def __init__(
        self, prompts: Prompts, task: Task, prompt: Sequence[int], index: int, sampling: Sampling
    ):
        self._tokenizer, self._sampling, self._task = prompts.tokenizer, sampling, task
        self._text, self._index, self._pieces = prompts.text(task.row), index, 0
        self._turns: list[tuple[Sequence[int], Completion]] = []
        self._shown = prompt  # since the model sampled last
        self.left, self.ended = sampling.max_new_tokens, False

    @property
    def words(self) -> str:
        """The text, special tokens included, of what was sampled in the last turn."""
        return self._decode(self._turns[-1][1].tokens, special=True)

    @property
    def truncated(self) -> bool:
        """Whether a budget ended it, not the model."""
        return self._turns[-1][1].stop_reason == "length"

    def take(self, sampled: Completion, stop: Sequence[str]) -> None:
        """Append what the model sampled, asked to stop at the texts `stop` among others."""
        self._pieces += 1
        self.left -= len(sampled.tokens)
        if len(self._shown):
            self._turns.append((self._shown, sampled))
        else:
            seen, before = self._turns[-1]
            self._turns[-1] = seen, _continued(before, sampled)
        self._shown = ()
        but_one = self._decode(self._turns[-1][1].tokens[:-1], special=True)
        self.ended = self.left <= 0 or not cut(self.words, stop, but_one)[1]

    async def sample(self, fleet: Generator, stop: Sequence[str] = ()) -> None:
        """Let the model go on until its end, one of the texts `stop`, or that of its tokens."""
        before = [part for seen, made in self._turns for part in (seen, made.tokens)]
        prompt = np.concatenate([*before, self._shown]).astype(np.int32)
        # The seed of the piece before would repeat its draws.
        text = f"{self._sampling.seed} sample {self._index} piece {self._pieces}"
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        seeded = replace(self._sampling, seed=int.from_bytes(digest, "big") >> 1)
        limits, priority = _limits(seeded, self.left, stop), self._task.priority
        (sampled,) = await fleet.generate(prompt, limits, 1, priority=priority)
        self.take(sampled, stop)

    def show(self, tokens: Sequence[int]) -> bool:
        """Append what the model did not sample, without an end token that it did.

        Where it could sample none after that, cut it and return False.
        """
        last = self._turns[-1][1].tokens[-1:].tolist()
        tokens = tokens[last == list(tokens[:1]) :]
        if len(tokens) >= self.left:
            self.cut()
            return False
        self._shown = tokens
        self.left -= len(tokens)
        return True

    def cut(self) -> None:
        """End it, as it is, for want of a budget."""
        seen, last = self._turns[-1]
        self._turns[-1] = seen, replace(last, stop_reason="length")
        self.ended = True

    def graded_as(self, first: int = 0) -> RewardCall:
        """Return what rewards get: the model's own words from turn `first` on, and no tool's."""
        sampled = [made.tokens.tolist() for _, made in self._turns[first:]]
        words, prompt = "".join(map(self._decode, sampled)), list(self._turns[0][0])
        return RewardCall(self._text, words, prompt, [*chain(*sampled)], self._task.row)

    def trajectory(self, reward: float, info: Mapping[str, float]) -> Trajectory:
        """Return the trajectory: what was sampled is trained on, what was shown is not."""
        completion, said = "", list[tuple[int, int]]()
        for number, (seen, made) in enumerate(self._turns):
            completion += self._decode(seen) if number else ""
            begin = len(completion)
            completion += self._decode(made.tokens)
            said.append((begin, len(completion)))
        return joined(
            self._turns, reward, f"{self._task.group_id}.{self._index}", info=info,
            prompt=self._text, completion=completion, said=tuple(said),
        )  # fmt: skip

    def _decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode([int(i) for i in ids], **options)


async def begin(
    fleet: Generator, prompts: Prompts, task: Task, sampling: Sampling, n: int, stop: Sequence = ()
) -> list[Episode]:
    """Return a task's `n` episodes up to the first of the texts `stop`, by a single request."""
    sampling = replace(task.sampling or sampling, seed=task.seed)
    prompt = prompts.ids(task.row, f"group {task.group_id}")
    limits = _limits(sampling, sampling.max_new_tokens, stop)
    firsts = await fleet.generate(prompt, limits, task.n or n, priority=task.priority)
    found = []
    for i, first in enumerate(firsts):
        found.append(Episode(prompts, task, prompt, i, sampling))
        found[i].take(first, stop)
    return found


async def together(*coroutines: Coroutine) -> list[Any]:
    """Return what each gives; where one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def behind(tokenizer: Any, message: Mapping[str, str]) -> str:
    """Return what a chat template puts between two answers for `message`; UserError if nothing."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, message]
    try:
        text, why = chat(tokenizer, talk).partition(_MARK)[2], "it is left out"
    except Exception as error:  # of Jinja, or what the template raises on purpose
        text, why = "", f"{error!r:.100}"
    if message["content"] not in text:
        raise UserError(
            f"the chat template takes no message of role {message['role']} after an answer "
            f"({why}); give another by data.chat_template"
        )
    return text


def _continued(before: Completion, after: Completion) -> Completion:
    """Return two pieces of one turn as one."""
    names, pieces = ("tokens", "logprobs", "versions"), (before, after)
    joint = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in names}
    return Completion(**joint, stop_reason=after.stop_reason)


def _limits(sampling: Sampling, left: int, stop: Sequence[str]) -> Sampling:
    """Return how a piece is sampled where `left` tokens are left of the whole."""
    least = max(0, sampling.min_new_tokens - (sampling.max_new_tokens - left))
    texts = (*sampling.stop, *stop)
    return replace(sampling, max_new_tokens=left, min_new_tokens=least, stop=texts)
