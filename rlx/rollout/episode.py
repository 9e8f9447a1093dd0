"""Answers in several pieces, sampled in turn with observations: tool outputs, or another try.

Observations are appended to the sampled tokens, which are never tokenised again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory, UserError, images_of, joined_masks, seed_of, with_images
from rlx.engines.stop_strings import cut
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rewards.reward_pool import RewardCall, RewardPool
from rlx.rollout.workflows import Generator, Prompts, Task, chat, encode, joined
from rlx.system.threads import run_all

_MARK = "@@ANSWER@@"  # an answer, to find the text that a chat template puts after it


class Episode:
    """An unfinished sample; `left` counts the tokens it may still have, observations included."""

    def __init__(
        self, prompts: Prompts, task: Task, prompt: Sequence[int], index: int, sampling: Sampling
    ):
        self._tokenizer, self._sampling, self._task = prompts.tokenizer, sampling, task
        self._text, self._index, self._pieces = prompts.text(task.row), index, 0
        self._turns: list[tuple[Sequence[int], Completion]] = []
        self._shown = prompt  # tokens for the model to read since it sampled last
        self.left, self.ended = sampling.max_new_tokens, False

    @property
    def last_text(self) -> str:
        """The text of the last turn's sampled tokens, special ones included."""
        return self._decode(self._turns[-1][1].tokens, special=True)

    @property
    def truncated(self) -> bool:
        """Whether a budget ended it."""
        return self._turns[-1][1].stop_reason == "length"

    def take(self, sampled: Completion, stop: Sequence[str]) -> None:
        """Append a completion, sampled with the extra stop strings `stop`."""
        self._pieces += 1
        self.left -= len(sampled.tokens)
        if len(self._shown):
            self._turns.append((self._shown, sampled))
        else:
            shown, before = self._turns[-1]
            self._turns[-1] = shown, _one_piece(before, sampled)
        self._shown = ()
        before_last = self._decode(self._turns[-1][1].tokens[:-1], special=True)
        stopped = cut(self.last_text, stop, before_last)[1]
        self.ended = self.left <= 0 or not stopped
        if stopped and self.ended:  # in a call, at the end of the budget
            self.truncate()

    async def sample(self, fleet: Generator, stop: Sequence[str] = ()) -> None:
        """Let the model continue to its end, a stop string, or the end of its budget."""
        before = [part for shown, reply in self._turns for part in (shown, reply.tokens)]
        tokens = np.concatenate([*before, self._shown]).astype(np.int32)
        prompt = with_images(tokens, images_of(*before, self._shown))
        # The seed of the previous piece would repeat its draws.
        text = f"{self._sampling.seed} sample {self._index} piece {self._pieces}"
        seeded = replace(self._sampling, seed=seed_of(text.encode()))
        sampling, priority = _piece_sampling(seeded, self.left, stop), self._task.priority
        (sampled,) = await fleet.generate(prompt, sampling, 1, priority=priority)
        self.take(sampled, stop)

    def show(self, tokens: Sequence[int]) -> bool:
        """Append an observation; if no budget is left after it, truncate and return False."""
        last = self._turns[-1][1].tokens[-1:].tolist()
        images = images_of(tokens)
        tokens = tokens[last == list(tokens[:1]) :]  # the model may have sampled the end token
        if len(tokens) >= self.left:
            self.truncate()
            return False
        self._shown = with_images(tokens, images)
        self.left -= len(tokens)
        return True

    def truncate(self) -> None:
        """End it because a budget is used up."""
        shown, last = self._turns[-1]
        self._turns[-1] = shown, replace(last, stop_reason="length")
        self.ended = True

    def reward_call(self, first: int = 0) -> RewardCall:
        """Return the arguments of reward functions: what was sampled from turn `first` on."""
        sampled = [reply.tokens.tolist() for _, reply in self._turns[first:]]
        text, prompt = "".join(map(self._decode, sampled)), list(self._turns[0][0])
        return RewardCall(self._text, text, prompt, [*chain(*sampled)], self._task.row)

    def trajectory(self, reward: float, info: Mapping[str, float]) -> Trajectory:
        """Return the trajectory, whose observations are not trained on."""
        completion, spans = "", list[tuple[int, int]]()
        for number, (shown, reply) in enumerate(self._turns):
            completion += self._decode(shown) if number else ""
            begin = len(completion)
            completion += self._decode(reply.tokens)
            spans.append((begin, len(completion)))
        return joined(
            self._turns, reward, f"{self._task.group_id}.{self._index}", info=info,
            prompt=self._text, completion=completion, said=tuple(spans),
        )  # fmt: skip

    def _decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode([int(i) for i in ids], **options)


async def begin(
    fleet: Generator, prompts: Prompts, task: Task, sampling: Sampling, n: int, stop: Sequence = ()
) -> list[Episode]:
    """Return a task's `n` episodes after their first piece, by a single request."""
    sampling = replace(task.sampling or sampling, seed=task.seed)
    prompt = prompts.ids(task.row, f"group {task.group_id}")
    first_sampling = _piece_sampling(sampling, sampling.max_new_tokens, stop)
    firsts = await fleet.generate(prompt, first_sampling, task.n or n, priority=task.priority)
    episodes = []
    for i, first in enumerate(firsts):
        episodes.append(Episode(prompts, task, prompt, i, sampling))
        episodes[i].take(first, stop)
    return episodes


def between_answers(tokenizer: Any, message: Mapping[str, str]) -> str:
    """Return a message's text between two answers; UserError if the chat template omits it."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, message]
    try:
        text, why = chat(tokenizer, talk).partition(_MARK)[2], "it is left out"
    except Exception as error:  # of Jinja, or raised by the template on purpose
        text, why = "", f"{error!r:.100}"
    if message["content"] not in text:
        raise UserError(
            f"the chat template renders no message of role {message['role']} after an answer "
            f"({why}); set another data.chat_template"
        )
    return text


def _one_piece(before: Completion, after: Completion) -> Completion:
    """Return two pieces of one turn as one."""
    names, pieces = ("tokens", "logprobs", "versions"), (before, after)
    joint = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in names}
    return Completion(**joint, **joined_masks(pieces), stop_reason=after.stop_reason)


def _piece_sampling(sampling: Sampling, left: int, stop: Sequence[str]) -> Sampling:
    """Return the sampling parameters of the next piece of a sample with `left` tokens left."""
    least = max(0, sampling.min_new_tokens - (sampling.max_new_tokens - left))
    texts = (*sampling.stop, *stop)
    return replace(sampling, max_new_tokens=left, min_new_tokens=least, stop=texts)


class MultiTurn:
    """Up to `max_turns` tries at a row; all answers are trained on, with one reward:

        reward = turn_discount^retries · r(last answer)

    An answer with a reward of at most `right` gets the user message `feedback`. All tokens after
    the prompt count towards `sampling.max_new_tokens`. Other arguments are those of `RLVR`.
    """

    def __init__(
        self, prompts: Prompts, sampling: Sampling, reward_pool: RewardPool, n: int,
        max_turns: int = 2, turn_discount: float = 1.0, right: float = 0.5,
        feedback: str = "Your answer is wrong. Please try again.",
    ):  # fmt: skip
        if max_turns < 1 or not 0 < turn_discount <= 1:
            wanted = "give max_turns from 1 and turn_discount in (0, 1]"
            raise UserError(f"{max_turns=}, {turn_discount=} in rollout.workflow_kwargs; {wanted}")
        self._prompts, self._sampling, self._rewards, self._n = prompts, sampling, reward_pool, n
        self._max_turns, self._discount, self._right = max_turns, turn_discount, right
        again = {"role": "user", "content": feedback}
        self._feedback = encode(prompts.tokenizer, between_answers(prompts.tokenizer, again))

    async def run(self, fleet: Generator, task: Task) -> Group:
        episodes = await begin(fleet, self._prompts, task, self._sampling, self._n)
        rewards, infos = [0.0] * len(episodes), [dict[str, float]() for _ in episodes]
        trying = list(range(len(episodes)))
        for turn in range(self._max_turns):
            calls = [episodes[i].reward_call(first=turn) for i in trying]
            graded = await self._rewards.grade(calls)
            for i, reward, info in zip(trying, graded.rewards, graded.infos, strict=True):
                rewards[i] = self._discount**turn * reward
                infos[i] = {**info, "turns": turn + 1, "run_reward": reward}
            wrong = [i for i, r in zip(trying, graded.rewards, strict=True) if r <= self._right]
            last = turn + 1 == self._max_turns
            trying = [] if last else [i for i in wrong if episodes[i].show(self._feedback)]
            await run_all(*(episodes[i].sample(fleet) for i in trying))
        parts = zip(episodes, rewards, infos, strict=True)
        return Group(task.group_id, tuple(e.trajectory(r, i) for e, r, i in parts), task.row)
