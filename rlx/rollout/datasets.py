"""Turn one dataset row into a group to train on, without a fleet: SFT and preference pairs.

A group of demonstrations is one trajectory, the answer that the row gives; a pair is two, the
chosen answer and then the rejected one. The tokens are those of the conversation as the chat
template renders it, up to the answer's end token; no policy sampled them, so they have version −1
and no logprobs. The executor, the buffer and checkpoints take these groups as they take rollouts.

A held-out evaluation, which brings its own sampling, gets completions from another workflow.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory, UserError
from rlx.rollout import workflows
from rlx.rollout.workflows import Generator, Overlong, Prompts, Task, Workflow, encode

_CHOSEN, _REJECTED = 1.0, 0.0  # the rewards of a pair
_WORDS = re.compile(r"<[^<>\s]+>|[^<\s]+|<")  # between which a template may change spaces
_REMEDY = "set data.chat_template to a file whose {% generation %} marks say what is trained on"


class AnswerWorkflow:
    """A workflow whose groups are the answers that rows give.

    Args:
      prompts: of the rows.
      answering: the workflow that evaluations run.
      keys: of the row, in the order of the group's trajectories → their rewards.
      end: the token that ends an answer; `end_token` finds it.
      max_new_tokens: limit of an answer, its end token included; 0: none.
      max_tokens: limit of all trajectories of a group together; 0: none.
    """

    def __init__(
        self,
        prompts: Prompts,
        answering: Workflow,
        keys: Mapping[str, float],
        *,
        end: int,
        max_new_tokens: int = 0,
        max_tokens: int = 0,
    ):
        self._prompts, self._answering, self._keys, self._end = prompts, answering, dict(keys), end
        self._max_new_tokens, self._max_tokens = max_new_tokens, max_tokens

    def group(self, row: Mapping[str, Any], group_id: int, name: str = "") -> Group:
        """Return the group of `row`.

        Raises:
          Overlong: it exceeds a limit; the message names `name`, or else the group.
        """
        name = name or f"group {group_id}"
        prompt = self._prompts.text(row)
        self._prompts.ids(row, name)  # raises Overlong
        trajectories = tuple(
            self._trajectory(row, key, reward, f"{group_id}.{i}", prompt, name)
            for i, (key, reward) in enumerate(self._keys.items())
        )
        total = sum(len(t.tokens) for t in trajectories)
        if 0 < self._max_tokens < total:
            raise Overlong(
                f"the {' and '.join(self._keys)} of {name} have {total} tokens with their prompts, "
                f"train.max_tokens_per_microbatch is {self._max_tokens} and they must share one; "
                f"raise it or shorten the row: {prompt[:60]!r}"
            )
        return Group(group_id, trajectories, row)

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Raise as Prompts.check and `rendered`, and Overlong if answers have too many tokens."""
        self._prompts.check(row, name)
        texts = [rendered(self._prompts, row, row[k], f"the {k} of {name}")[1] for k in self._keys]
        limits = [limit for limit in (self._max_new_tokens, self._max_tokens) if limit]
        most = sum(map(self._prompts.most, texts))
        if self._prompts.wide or (limits and most > min(limits)):
            self.group(row, 0, name)

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the task's row; of completions where the task brings sampling."""
        if task.sampling is None:
            return self.group(task.row, task.group_id)
        return await self._answering.run(fleet, task)

    async def aclose(self) -> None:
        """End what the workflow of evaluations holds."""
        await workflows.close(self._answering)

    def _trajectory(
        self, row: Mapping[str, Any], key: str, reward: float, trajectory_id: str, prompt: str,
        name: str,
    ) -> Trajectory:  # fmt: skip
        answer, what = row[key], f"the {key} of {name}"
        tokens, mask = answered(self._prompts, row, answer, self._end, what)
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        if 0 < self._max_new_tokens < (length := len(tokens) - int(mask.argmax())):
            raise Overlong(
                f"{what} has {length} tokens with its end token, "
                f"sampling.max_new_tokens is {self._max_new_tokens}; shorten or remove it, or "
                f"raise the limit: {text[:60]!r}"
            )
        nothing = np.zeros(len(tokens), np.float32)
        return Trajectory(
            tokens, mask, nothing, np.full(len(tokens), -1, np.int32), reward, "stop",
            trajectory_id, prompt=prompt, completion=text,
        )  # fmt: skip


class Demonstrations(AnswerWorkflow):
    """A workflow for SFT: question + completion → one trajectory."""

    def __init__(
        self, prompts: Prompts, answering: Workflow, key: str = "completion", **limits: int
    ):
        super().__init__(prompts, answering, {key: _CHOSEN}, **limits)


class Preferences(AnswerWorkflow):
    """A workflow for pairs: question + chosen + rejected → two trajectories, rewards 1 and 0."""

    def __init__(
        self,
        prompts: Prompts,
        answering: Workflow,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        **limits: int,
    ):
        keys = {chosen_key: _CHOSEN, rejected_key: _REJECTED}
        if len(keys) < 2:
            raise UserError(
                f"data.chosen_key and data.rejected_key are both {chosen_key!r}; a pair has two "
                "answers, name two keys"
            )
        super().__init__(prompts, answering, keys, **limits)


def rendered(
    prompts: Prompts, row: Mapping[str, Any], answer: Any, name: str
) -> tuple[list[Mapping[str, Any]], str, int, int]:
    """Return a row's conversation with its answer, its text, and the answer's begin and end there.

    The text begins with the prompt that a model is asked with, unless the template has marks. The
    answer is a text, or messages, perhaps with the question's in front.

    Raises:
      UserError: the chat template does not render the answer `name` so, or not all of it.
    """
    asked, marked = prompts.messages(row), prompts.marked
    given = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if given[:-1] == asked[len(asked) - len(given) + 1 :]:
        given = given[-1:]
    if not given or given[-1]["role"] != "assistant" or (len(given) > 1 and not marked):
        what = f"{name} has {len(given)} messages, wanted one of the assistant"
        raise UserError(f"{what}; give each turn a row, or {_REMEDY}")
    text = prompts.render([*asked, *given], name)
    prompt = prompts.render(asked, name, add_generation_prompt=not marked)
    begin = len(prompt)
    if not text.startswith(prompt):
        begin = len(os.path.commonprefix([prompt, text]))  # noqa: RUF071 - of characters
    if begin < len(prompt) and not marked:
        raise UserError(
            f"the chat template asks for {name} by {prompt[-40:]!r}, but renders it as "
            f"{text[begin:][:40]!r}; begin the answer as the prompt ends, or {_REMEDY}"
        )
    said, at, end = " ".join(m["content"] for m in given if m["role"] == "assistant"), len(text), 0
    for word in reversed(_WORDS.findall(said)):
        if (at := text.rfind(word, 0, at)) < 0:
            raise UserError(f"the chat template leaves {word!r} of {name} out; {_REMEDY}")
        end = end or at + len(word)
    space, end = said[len(said.rstrip()) :], max(end, begin)
    return [*asked, *given], text, begin, end + len(space) * text.startswith(space, end)


def answered(
    prompts: Prompts, row: Mapping[str, Any], answer: Any, end: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a row with its answer, up to the token `end`, and which are trained on.

    The whole is tokenised once, since parts have other tokens where they meet; a token of both
    prompt and answer is trained on. Arguments and errors are as of `rendered`.
    """
    messages, text, begin, stop = rendered(prompts, row, answer, name)
    found = prompts.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(found["input_ids"], np.int32)
    begins, ends = np.array(found["offset_mapping"]).reshape(-1, 2).T
    mask = ends > begin
    if prompts.marked:
        marks: Any = prompts.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        mask &= np.array(marks["assistant_masks"], bool)
        if not mask.any():
            raise UserError(f"the chat template marks nothing of {name}; {_REMEDY}")
    ended = np.flatnonzero((ids == end) & (ends > stop))
    last = ended[0] + 1 if ended.size else ((begins < stop) | (ends <= stop)).sum()
    if not ended.size:  # as engines end it
        ids, mask = np.append(ids[:last], np.int32(end)), np.append(mask[:last], True)
        last += 1
    prompts.require_known(ids[:last], name)
    return ids[:last], mask[:last]


def end_token(tokenizer: Any, stops: Sequence[int]) -> int:
    """Return the token that ends an answer, in training as in generation.

    It is the first token after an answer by the chat template at which engines stop; else the
    tokenizer's own end token.

    Args:
      stops: the model's end tokens, at which engines stop.

    Raises:
      UserError: neither is among `stops`, so that learned answers would never end.
    """
    probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    text = Prompts(tokenizer).render(probe, "an answer")
    behind = encode(tokenizer, text.rpartition("answer")[2])
    for token in (*behind, tokenizer.eos_token_id):
        if token in stops:
            return token
    raise UserError(
        f"the chat template ends an answer with {tokenizer.decode(behind[:1])!r} and the tokenizer "
        f"has eos_token={tokenizer.eos_token!r}; neither is an eos_token_id of the model "
        f"({list(stops)}): mend generation_config.json"
    )
