"""Turn a dataset row into a group to train on, without sampling: SFT and preference pairs.

A demonstration is one trajectory; a pair is two, the chosen answer first. Their tokens are the
rendered conversation up to the answer's end token, with version −1 and no logprobs.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory, UserError
from rlx.rollout import workflows
from rlx.rollout.workflows import Generator, Overlong, Prompts, Task, Workflow, encode

_WORDS = re.compile(r"<[^<>\s]+>|[^<\s]+|<")  # templates may change the spaces between them
_REMEDY = "set data.chat_template to a file whose {% generation %} marks say what is trained on"


@dataclass(eq=False)
class AnswerWorkflow:
    """A workflow whose groups are answers from the row."""

    prompts: Prompts
    answering: Workflow  # for evaluations, which sample
    # Of the row's answers: a completion; or the chosen one, reward 1, and the rejected one, 0.
    keys: Sequence[str]
    _: KW_ONLY
    end: int  # the token that ends an answer, from `end_token`
    max_new_tokens: int = 0  # of an answer with its end token; 0: no limit
    max_tokens: int = 0  # of a group in total; 0: no limit

    def __post_init__(self) -> None:
        if len(set(self.keys)) < len(self.keys):
            problem = f"data.chosen_key and data.rejected_key are both {self.keys[0]!r}"
            raise UserError(f"{problem}; give each answer of a pair its own key")

    def group(self, row: Mapping[str, Any], group_id: int, name: str = "") -> Group:
        """Return the group of `row`; raise Overlong, which shows `name`, above a limit."""
        name = name or f"group {group_id}"
        prompt = self.prompts.text(row)
        self.prompts.ids(row, name)  # raises Overlong
        trajectories = []
        for i, key in enumerate(self.keys):
            answer, what = row[key], f"the {key} of {name}"
            tokens, mask, images = answered_tokens(self.prompts, row, answer, self.end, what)
            text = answer if isinstance(answer, str) else answer[-1]["content"]
            if 0 < self.max_new_tokens < (length := len(tokens) - int(mask.argmax())):
                raise Overlong(
                    f"{what} has {length} tokens with its end token, "
                    f"sampling.max_new_tokens is {self.max_new_tokens}; shorten or remove it, or "
                    f"raise the limit: {text[:60]!r}"
                )
            trajectories.append(Trajectory(
                tokens, mask, np.zeros(len(tokens), np.float32),
                np.full(len(tokens), -1, np.int32), 1.0 - i, "stop", f"{group_id}.{i}",
                prompt=prompt, completion=text, images=images,
            ))  # fmt: skip
        total = sum(len(t.tokens) for t in trajectories)
        if 0 < self.max_tokens < total:
            raise Overlong(
                f"the {' and '.join(self.keys)} of {name} have {total} tokens with their prompts, "
                f"train.max_tokens_per_microbatch is {self.max_tokens} and they must share one; "
                f"raise it or shorten the row: {prompt[:60]!r}"
            )
        return Group(group_id, tuple(trajectories), row)

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Check a row's prompt and answers, as `Prompts.check`."""
        self.prompts.check(row, name)
        texts = [
            rendered_row(self.prompts, row, row[k], f"the {k} of {name}")[1] for k in self.keys
        ]
        limits = [limit for limit in (self.max_new_tokens, self.max_tokens) if limit]
        most = sum(map(self.prompts.most_tokens, texts))
        if self.prompts.may_lack_embeddings or (limits and most > min(limits)):
            self.group(row, 0, name)

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the task's row; sampled completions for an evaluation's task."""
        if task.sampling is None:
            return self.group(task.row, task.group_id)
        return await self.answering.run(fleet, task)

    async def aclose(self) -> None:
        await workflows.close(self.answering)


def rendered_row(
    prompts: Prompts,
    row: Mapping[str, Any],
    answer: Any,  # a text, or messages, which may repeat the question's
    name: str,  # of the answer, for errors
) -> tuple[list[Mapping[str, Any]], str, int, int]:
    """Return a row's messages with its answer, their text, and the answer's start and end in it.

    UserError if the text does not begin with the prompt, or lacks some of the answer.
    """
    question, marked = prompts.messages(row), prompts.marked
    reply = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if reply[:-1] == question[len(question) - len(reply) + 1 :]:
        reply = reply[-1:]
    if not reply or reply[-1]["role"] != "assistant" or (len(reply) > 1 and not marked):
        what = f"{name} has {len(reply)} messages, wanted one of the assistant"
        raise UserError(f"{what}; give each turn a row, or {_REMEDY}")
    text = prompts.render([*question, *reply], name)
    prompt = prompts.render(question, name, add_generation_prompt=not marked)
    begin = len(prompt)
    if not text.startswith(prompt):
        begin = len(os.path.commonprefix([prompt, text]))  # noqa: RUF071 - of characters
    if begin < len(prompt) and not marked:
        raise UserError(
            f"the chat template ends the prompt of {name} with {prompt[-40:]!r}, but renders the "
            f"answer as {text[begin:][:40]!r}; begin the answer as the prompt ends, or {_REMEDY}"
        )
    words, at, end = " ".join(m["content"] for m in reply if m["role"] == "assistant"), len(text), 0
    for word in reversed(_WORDS.findall(words)):
        if (at := text.rfind(word, 0, at)) < 0:
            raise UserError(f"the chat template leaves {word!r} of {name} out; {_REMEDY}")
        end = end or at + len(word)
    space, end = words[len(words.rstrip()) :], max(end, begin)
    return [*question, *reply], text, begin, end + len(space) * text.startswith(space, end)


def answered_tokens(
    prompts: Prompts, row: Mapping[str, Any], answer: Any, end: int, name: str
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the tokens of a row with its answer, up to the token `end`, loss mask and images."""
    messages, text, begin, stop = rendered_row(prompts, row, answer, name)
    short, (text, images) = len(text), prompts.expanded(text, messages)
    begin, stop = begin + len(text) - short, stop + len(text) - short
    # Tokenised as a whole, because tokens may span prompt and answer; those are trained on.
    encoding = prompts.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(encoding["input_ids"], np.int32)
    begins, ends = np.array(encoding["offset_mapping"]).reshape(-1, 2).T
    mask = ends > begin
    if prompts.marked:
        marks: Any = prompts.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        mask &= np.array(marks["assistant_masks"], bool)
        if not mask.any():
            raise UserError(f"the chat template marks nothing of {name}; {_REMEDY}")
    places = np.flatnonzero((ids == end) & (ends > stop))
    last = places[0] + 1 if places.size else ((begins < stop) | (ends <= stop)).sum()
    if not places.size:  # engines would end it with this token
        ids, mask = np.append(ids[:last], np.int32(end)), np.append(mask[:last], True)
        last += 1
    prompts.require_known(ids[:last], name)
    return ids[:last], mask[:last], images


def end_token(tokenizer: Any, stops: Sequence[int]) -> int:
    """Return the token that ends an answer, in training as in generation.

    It is the first of the model's end tokens `stops` that the chat template puts after an answer,
    else `eos_token`. UserError if that is no end token, so that trained models would never stop.
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
        f"({list(stops)}); correct generation_config.json"
    )
