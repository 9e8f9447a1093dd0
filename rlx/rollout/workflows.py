"""Turn one dataset row into one group of trajectories.

A workflow has `async run(fleet, task) -> Group`; it runs on the executor's event loop, so
everything here is short or awaited.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.base import Group, Trajectory, UserError, place
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rewards.reward_pool import RewardCall, RewardPool
from rlx.rollout.control_tokens import CUT, controls, plain, shielded

_COLUMNS = {
    "tokens": np.int32, "loss_mask": bool, "behaviour_logprobs": np.float32, "versions": np.int32,
    "turn_ids": np.int32,
}  # fmt: skip


class Generator(Protocol):
    """A fleet, as far as a workflow uses it."""

    async def generate(
        self, prompt_tokens: Any, sampling: Sampling, n: int, *, priority: int = 0
    ) -> list[Completion]: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What a workflow is asked for: the group of one row.

    Attributes:
      row: of the dataset. group_id: of the group.
      seed: of its samples, in [0, 2³¹); a function of the run's seed, the group and the attempt.
      sampling: how an evaluation samples, whatever its seed; None: as training does.
      n: trajectories of the group; None: as many as training wants.
      priority: of the requests; the highest are served first.
      version: at which the group was admitted; none of its tokens may be older. −1: any.
    """

    row: Mapping[str, Any]
    group_id: int
    seed: int
    sampling: Sampling | None = None
    n: int | None = None
    priority: int = 0
    version: int = -1


class Workflow(Protocol):
    """A workflow, as far as every one has it.

    One that holds processes or sockets has `async aclose()` too, which is called at the end on the
    loop that `run` was on; one with a `name` is called by it in messages.
    """

    async def run(self, fleet: Generator, task: Task) -> Group: ...


def name(workflow: Workflow) -> str:
    """Return what messages call a workflow: its own name, or its class and where its run begins."""
    cls = type(workflow)
    return str(getattr(workflow, "name", f"{cls.__name__} {place(cls.run)}"))


async def close(holder: Any) -> None:
    """End what a workflow or a tool holds, if anything; on the loop that `run` was on."""
    if aclose := getattr(holder, "aclose", None):
        await aclose()


def conversation(question: Any, system_prompt: str = "") -> list[Mapping[str, Any]]:
    """Return a row's question as chat messages: a list as it is, else its text as the user's.

    The system prompt goes in front, unless the list begins with one of its own.
    """
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": str(question)}]
    if isinstance(question, list):
        messages = list(question)
    if system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render(tokenizer: Any, question: Any, system_prompt: str = "") -> str:
    """Return the text of a row's question (see `conversation`), up to the answer's turn."""
    return chat(tokenizer, conversation(question, system_prompt))


def chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
    """Return a conversation's text up to the start of the answer's turn, shielded for `encode`.

    Args:
      template: further variables of the chat template, `tools` for one.
    """
    found = controls(tokenizer)
    patterns = [found.strict if m.get("role") == "tool" else found.pattern for m in messages]
    own = [shielded(m, pattern) for m, pattern in zip(messages, patterns, strict=True)]
    template = shielded(template, found.strict)
    return tokenizer.apply_chat_template(
        own, add_generation_prompt=True, tokenize=False, **template
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a rendered prompt, which has its special tokens already."""
    first, *rest = text.split(CUT)
    ids = tokenizer(first, add_special_tokens=False)["input_ids"]
    for piece in rest:
        # SentencePiece puts a blank in front of a text: here in front of a line end.
        both = tokenizer(["\n", f"\n{piece}", piece], add_special_tokens=False)["input_ids"]
        line, joint, alone = both
        ids += joint[len(line) :] if joint[: len(line)] == line else alone
    return ids


def _explained(render: Callable[[], str], name: str) -> str:
    """Return a rendered text; raise UserError, which names `name`, where its template fails."""
    try:
        return render()
    except Exception as error:  # of Jinja, or what the template raises on purpose
        raise UserError(
            f"the chat template fails on {name} ({error!r:.200}); mend it, or the messages"
        ) from error


class Overlong(UserError):
    """A row is too long for the run; data.overlong=skip leaves such rows out."""


class Prompts:
    """The prompts of dataset rows, whichever workflow answers them."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str = "",
        question_key: str = "question",
        max_prompt_tokens: int = 0,
        max_model_len: int = 0,
        vocab_size: int = 0,
    ):
        """Make a renderer of rows.

        Args:
          tokenizer: a transformers tokenizer with a chat template.
          system_prompt: a first message with this text; none when empty.
          question_key: of each row's text or chat messages.
          max_prompt_tokens: limit of the rendered prompt; 0: none.
          max_model_len: the servers' context, which must also leave room for one token; 0: unknown.
          vocab_size: how many tokens the model has an embedding of; 0: unknown.
        """
        self.tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._question_key = question_key
        self._told: dict[str, Any] = {}
        self._vocab_size = vocab_size
        self.wide = 0 < vocab_size <= max(tokenizer.get_vocab().values())  # so tokens are checked
        self.marked = "endgeneration" in str(tokenizer.chat_template)  # what is trained on
        template = str(getattr(tokenizer, "chat_template", ""))
        marks = [mark for mark in tokenizer.get_added_vocab() if mark in template]
        marks = sorted(map(re.escape, marks), key=len, reverse=True)
        self._marks = re.compile("|".join(marks) or "(?!)")  # each is one token
        self._limits = {
            "data.max_prompt_tokens": max_prompt_tokens,
            "the model's context, less a token to generate": max(0, max_model_len - 1),
        }

    def told_of(self, tools: Sequence[Mapping[str, Any]]) -> "Prompts":
        """Return these prompts as the chat template has them where there are `tools`."""
        found = copy.copy(self)
        found._told = {"tools": list(tools)}
        return found

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the prompt's text."""
        return plain(self._render(row))

    def messages(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the conversation to answer."""
        return conversation(row[self._question_key], self._system_prompt)

    def ids(self, row: Mapping[str, Any], name: str = "the row") -> list[int]:
        """Return the prompt's tokens.

        Raises:
          Overlong: they exceed a limit; the message names `name`.
        """
        return self._encode(self._render(row), row, name)

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Raise Overlong if the prompt of `row` is too long, UserError if it cannot be rendered."""
        text = _explained(lambda: self._render(row), name)
        limit = min((limit for limit in self._limits.values() if limit), default=0)
        if self.wide or (limit and self.most(text) > limit):
            self._encode(text, row, name)

    def render(self, messages: Sequence[Mapping[str, Any]], name: str, **options: Any) -> str:
        """Return a conversation's text; raise UserError, which names `name`, where that fails."""
        apply = self.tokenizer.apply_chat_template
        return _explained(lambda: apply(messages, tokenize=False, **options), name)

    def most(self, text: str) -> int:
        """Return how many tokens a text has at most: one a byte, and one a mark of the template."""
        return len(self._marks.sub(" ", text).encode()) + 8  # which a tokenizer may put in front

    def require_known(self, ids: Any, name: str) -> None:
        """Raise UserError where the model has no embedding of one of the tokens `ids`."""
        if self.wide and (most := int(max(ids, default=0))) >= self._vocab_size:
            raise UserError(
                f"{name} has token {most} ({self.tokenizer.decode([most])!r}), the model has an "
                f"embedding of {self._vocab_size}; use the tokenizer files of its weights"
            )

    def _render(self, row: Mapping[str, Any]) -> str:
        return chat(self.tokenizer, self.messages(row), **self._told)

    def _encode(self, text: str, row: Mapping[str, Any], name: str) -> list[int]:
        ids = encode(self.tokenizer, text)
        self.require_known(ids, f"the prompt of {name}")
        for what, limit in self._limits.items():
            if limit and len(ids) > limit:
                raise Overlong(
                    f"the prompt of {name} has {len(ids)} tokens, {what} is {limit}; shorten or "
                    f"remove it, or raise the limit: {str(row[self._question_key])[:60]!r}"
                )
        return ids


class RLVR:
    """One turn with a verifiable reward: row → chat template → n samples → a reward each.

    Args:
      prompts: of the rows.
      sampling: of training; each group's seed replaces its own.
      reward_pool: computes the rewards.
      n: trajectories a group.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, reward_pool: RewardPool, n: int):
        self._prompts, self._sampling, self._rewards, self._n = prompts, sampling, reward_pool, n

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the task's row."""
        row, group_id = task.row, task.group_id
        text, prompt = self._prompts.text(row), self._prompts.ids(row, f"group {group_id}")
        drawn = dataclasses.replace(task.sampling or self._sampling, seed=task.seed)
        n = task.n or self._n
        completions = await fleet.generate(prompt, drawn, n, priority=task.priority)
        ids = [completion.tokens.tolist() for completion in completions]
        texts = self._prompts.tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        calls = [RewardCall(text, t, prompt, i, row) for t, i in zip(texts, ids, strict=True)]
        graded = await self._rewards.grade(calls)
        trajectories = tuple(
            trajectory(
                prompt,
                done,
                graded.rewards[i],
                f"{group_id}.{i}",
                prompt=text,
                completion=texts[i],
                info=graded.infos[i],
            )
            for i, done in enumerate(completions)
        )
        return Group(group_id, trajectories, row)


def trajectory(
    asked: Any, sampled: Completion, reward: float, trajectory_id: str, **further: Any
) -> Trajectory:
    """Return a single turn; `asked` and `further` as in `joined`."""
    alone = joined([(asked, sampled)], reward, trajectory_id, **further)
    return dataclasses.replace(alone, turn_ids=None)


def joined(
    turns: Sequence[tuple[Any, Completion]],
    reward: float,
    trajectory_id: str,
    first: int = 0,
    **further: Any,
) -> Trajectory:
    """Return the turns of a conversation as one sequence.

    Args:
      turns: of each the tokens that the model saw for the first time ([P] int, not trained on: the
        prompt, then observations), and what it sampled after them.
      first: the number of the first turn.
      further: fields of Trajectory.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for number, (seen, sampled) in enumerate(turns, first):
        blank, drawn = len(seen), len(sampled.tokens)
        columns["tokens"] += [seen, sampled.tokens]
        columns["loss_mask"] += [np.zeros(blank), np.ones(drawn)]
        columns["behaviour_logprobs"] += [np.zeros(blank), sampled.logprobs]
        columns["versions"] += [np.full(blank, -1), sampled.versions]
        columns["turn_ids"] += [np.full(blank + drawn, number)]
    arrays: dict[str, Any] = {k: np.concatenate(v).astype(_COLUMNS[k]) for k, v in columns.items()}
    return Trajectory(
        **arrays,
        reward=reward,
        stop_reason=turns[-1][1].stop_reason,
        trajectory_id=trajectory_id,
        **further,
    )
