"""Turn one dataset row into a group of trajectories, on an event loop that nothing may block."""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.base import Group, PromptTokens, Trajectory, UserError, images_of, joined_masks, place
from rlx.fleet.requests import Chunk, Sampling
from rlx.fleet.sample import Completion
from rlx.rewards.reward_pool import RewardCall, RewardPool
from rlx.rollout.control_tokens import CUT, controls, plain, shielded
from rlx.rollout.images import MARK, ImagePrompts, images_in

_COLUMNS = {
    "tokens": np.int32, "loss_mask": bool, "behaviour_logprobs": np.float32, "versions": np.int32,
    "turn_ids": np.int32,
}  # fmt: skip


class Generator(Protocol):
    """The method of a fleet that workflows use."""

    async def generate(
        self, prompt_tokens: Any, sampling: Sampling, n: int, *, priority: int = 0
    ) -> list[Completion]: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A request for the group of one dataset row."""

    row: Mapping[str, Any]
    group_id: int
    seed: int  # in [0, 2³¹)
    sampling: Sampling | None = None  # an evaluation's, except for its seed; None: in training
    n: int | None = None  # trajectories of the group; None: the number in training
    priority: int = 0  # of the requests; the highest are served first
    version: int = -1  # the version of its admission, at least that of its tokens; −1: any


class Workflow(Protocol):
    """The method that every workflow has.

    Optional: `async aclose()`, called at the end on the loop of `run`, and `name`, for messages.
    """

    async def run(self, fleet: Generator, task: Task) -> Group: ...


def name(workflow: Workflow) -> str:
    """Return a workflow's `name`, or its class and the line of its `run`, for messages."""
    cls = type(workflow)
    return str(getattr(workflow, "name", f"{cls.__name__} {place(cls.run)}"))


async def close(holder: Any) -> None:
    """Close a workflow or a tool, on the loop that `run` was on."""
    if aclose := getattr(holder, "aclose", None):
        await aclose()


def conversation(question: Any, system_prompt: str = "") -> list[Mapping[str, Any]]:
    """Return a question as chat messages, after the system prompt unless it has its own."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": str(question)}]
    if isinstance(question, list):
        messages = list(question)
    if system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render(tokenizer: Any, question: Any, system_prompt: str = "") -> str:
    """Return the prompt's text for a row's question."""
    return chat(tokenizer, conversation(question, system_prompt))


def chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
    """Return a conversation's text up to the start of the answer, shielded for `encode`."""
    control = controls(tokenizer)
    patterns = [control.strict if m.get("role") == "tool" else control.pattern for m in messages]
    copies = [shielded(m, pattern) for m, pattern in zip(messages, patterns, strict=True)]
    template = shielded(template, control.strict)  # further variables, such as `tools`
    return tokenizer.apply_chat_template(
        copies, add_generation_prompt=True, tokenize=False, **template
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a rendered prompt, which already has its special tokens."""
    first, *rest = text.split(CUT)
    ids = tokenizer(first, add_special_tokens=False)["input_ids"]
    for piece in rest:
        # SentencePiece puts a space before a text; the line end takes it.
        both = tokenizer(["\n", f"\n{piece}", piece], add_special_tokens=False)["input_ids"]
        line, joint, alone = both
        ids += joint[len(line) :] if joint[: len(line)] == line else alone
    return ids


@contextlib.contextmanager
def _template_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of Jinja, or raised by the template on purpose
        problem = f"the chat template fails on {name} ({error!r:.200})"
        raise UserError(f"{problem}; correct it, or the messages") from error


class Overlong(UserError):
    """A row is too long for the run; data.overlong=skip leaves such rows out."""


class Prompts:
    """A renderer of dataset rows into prompts; a limit or size of 0 is unknown or none."""

    def __init__(
        self,
        tokenizer: Any,  # of transformers, with a chat template
        *,
        system_prompt: str = "",
        question_key: str = "question",  # of each row's text or chat messages
        max_prompt_tokens: int = 0,
        max_model_len: int = 0,  # the servers' context, which must also hold one generated token
        vocab_size: int = 0,  # number of the model's embeddings
        images: ImagePrompts | None = None,  # None: the model takes none
    ):
        self.tokenizer = tokenizer
        self._system_prompt, self._question_key = system_prompt, question_key
        self._variables: dict[str, Any] = {}  # of the chat template
        self._vocab_size, self.images = vocab_size, images
        self.may_lack_embeddings = 0 < vocab_size <= max(tokenizer.get_vocab().values())
        # Whether the template marks what is trained on, by {% generation %}.
        self.marked = "endgeneration" in str(tokenizer.chat_template)
        template = str(getattr(tokenizer, "chat_template", ""))
        marks = [mark for mark in tokenizer.get_added_vocab() if mark in template]
        marks = sorted(map(re.escape, marks), key=len, reverse=True)
        self._marks = re.compile("|".join(marks) or "(?!)")  # each is one token
        self._limits = {
            "data.max_prompt_tokens": max_prompt_tokens,
            "the model's context minus one generated token": max(0, max_model_len - 1),
        }

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Prompts":
        """Return prompts that describe `tools` to the model."""
        prompts = copy.copy(self)
        prompts._variables = {"tools": list(tools)}
        return prompts

    def text(self, row: Mapping[str, Any]) -> str:
        return plain(self._render(row))

    def messages(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the conversation to answer."""
        return conversation(row[self._question_key], self._system_prompt)

    def ids(self, row: Mapping[str, Any], name: str = "the row") -> PromptTokens:
        """Return the prompt's tokens; raise Overlong, which shows `name`, above a limit."""
        return self._encode(self._render(row), row, name)

    def expanded(
        self, text: str, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[str, ...]]:
        """Return rendered messages with all placeholders of their images, and these by name."""
        if not images_in(messages):
            return text, ()
        if not self.images:
            raise UserError("a prompt has images, and the model takes none; use one that does")
        names = self.images.names(messages)
        return self.images.expanded(text, names), names

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Raise Overlong if the prompt of `row` is too long, UserError if it cannot be rendered."""
        pictured = bool(images_in(self.messages(row)))
        if pictured and not self.images:
            raise UserError(f"{name} has images, and the model takes none; use one that does")
        if self.images and not pictured and MARK in str(row[self._question_key]):
            raise UserError(f"{name} has {MARK} and no images; set data.image_key to their column")
        with _template_errors(name):
            text = self._render(row)
        limit = min((limit for limit in self._limits.values() if limit), default=0)
        if self.may_lack_embeddings or (limit and self.most_tokens(text) > limit):
            self._encode(text, row, name)

    def render(self, messages: Sequence[Mapping[str, Any]], name: str, **options: Any) -> str:
        """Return a conversation's text; raise UserError, which shows `name`, if that fails."""
        with _template_errors(name):
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def most_tokens(self, text: str) -> int:
        """Return an upper bound of a text's tokens: one per byte, and one per added token."""
        return len(self._marks.sub(" ", text).encode()) + 8  # that a tokenizer may prepend

    def require_known(self, ids: Any, name: str) -> None:
        """Raise UserError if the model lacks an embedding of one of the tokens `ids`."""
        if self.may_lack_embeddings and (most := int(max(ids, default=0))) >= self._vocab_size:
            raise UserError(
                f"{name} has token {most} ({self.tokenizer.decode([most])!r}), and the model has "
                f"{self._vocab_size} embeddings; use the tokenizer files of its weights"
            )

    def _render(self, row: Mapping[str, Any]) -> str:
        return chat(self.tokenizer, self.messages(row), **self._variables)

    def _encode(self, text: str, row: Mapping[str, Any], name: str) -> PromptTokens:
        text, images = self.expanded(text, self.messages(row))
        ids = PromptTokens(encode(self.tokenizer, text), images)
        self.require_known(ids, f"the prompt of {name}")
        for what, limit in self._limits.items():
            if limit and len(ids) > limit:
                raise Overlong(
                    f"the prompt of {name} has {len(ids)} tokens, {what} is {limit}; shorten or "
                    f"remove it, or raise the limit: {str(row[self._question_key])[:60]!r}"
                )
        return ids


class RLVR:
    """One turn with a verifiable reward: row → chat template → n samples → a reward each."""

    def __init__(self, prompts: Prompts, sampling: Sampling, reward_pool: RewardPool, n: int):
        self._prompts, self._sampling, self._rewards, self._n = prompts, sampling, reward_pool, n

    async def run(self, fleet: Generator, task: Task) -> Group:
        row, group_id = task.row, task.group_id
        text, prompt = self._prompts.text(row), self._prompts.ids(row, f"group {group_id}")
        sampling = dataclasses.replace(task.sampling or self._sampling, seed=task.seed)
        n = task.n or self._n
        completions = await fleet.generate(prompt, sampling, n, priority=task.priority)
        ids = [completion.tokens.tolist() for completion in completions]
        texts = self._prompts.tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        calls = [RewardCall(text, t, prompt, i, row) for t, i in zip(texts, ids, strict=True)]
        graded = await self._rewards.grade(calls)
        parts = zip(completions, graded.rewards, texts, graded.infos, strict=True)
        trajectories = [
            trajectory(
                prompt, done, reward, f"{group_id}.{i}", prompt=text, completion=words, info=info
            )
            for i, (done, reward, words, info) in enumerate(parts)
        ]
        return Group(group_id, tuple(trajectories), row)


def trajectory(
    prompt_ids: Any, sampled: Completion, reward: float, trajectory_id: str, **further: Any
) -> Trajectory:
    """Return a single turn, as `joined` does."""
    turn = joined([(prompt_ids, sampled)], reward, trajectory_id, **further)
    return dataclasses.replace(turn, turn_ids=None)


def joined(
    turns: Sequence[tuple[Any, Completion]],
    reward: float,
    trajectory_id: str,
    first: int = 0,  # number of the first turn
    **further: Any,  # other fields of Trajectory
) -> Trajectory:
    """Return the turns of a conversation as one sequence.

    Each has the new tokens that the model read ([P] int, not trained on) and its completion.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for number, (shown, sampled) in enumerate(turns, first):
        blank, count = len(shown), len(sampled.tokens)
        columns["tokens"] += [shown, sampled.tokens]
        columns["loss_mask"] += [np.zeros(blank), np.ones(count)]
        columns["behaviour_logprobs"] += [np.zeros(blank), sampled.logprobs]
        columns["versions"] += [np.full(blank, -1), sampled.versions]
        columns["turn_ids"] += [np.full(blank + count, number)]
    arrays: dict[str, Any] = {k: np.concatenate(v).astype(_COLUMNS[k]) for k, v in columns.items()}
    parts = [part for shown, sampled in turns for part in (Chunk(0, shown), sampled)]
    return Trajectory(
        **arrays, **joined_masks(parts), **further, reward=reward, trajectory_id=trajectory_id,
        images=images_of(*(shown for shown, _ in turns)), stop_reason=turns[-1][1].stop_reason,
    )  # fmt: skip
