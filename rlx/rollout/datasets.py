"""Turn one dataset row into a group to train on, without a fleet: SFT and preference pairs.

A group of demonstrations is one trajectory, the answer that the row gives; a pair is two, the
chosen answer and then the rejected one. The answer's tokens and its end token are trained on; no
policy sampled them, so they have version −1 and no logprobs. The executor, the buffer and
checkpoints take these groups as they take rollouts.

A held-out evaluation, which brings its own sampling, gets completions from another workflow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory, UserError
from rlx.fleet.sample import Completion
from rlx.rollout import workflows
from rlx.rollout.workflows import Generator, Overlong, Prompts, Task, Workflow, encode, trajectory

_CHOSEN, _REJECTED = 1.0, 0.0  # the rewards of a pair


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
        text, prompt = self._prompts.text(row), self._prompts.ids(row, name)
        head = np.array(prompt, np.int32)
        trajectories = tuple(
            self._trajectory(head, str(row[key]), key, reward, f"{group_id}.{i}", text, name)
            for i, (key, reward) in enumerate(self._keys.items())
        )
        total = sum(len(t.tokens) for t in trajectories)
        if 0 < self._max_tokens < total:
            raise Overlong(
                f"the {' and '.join(self._keys)} of {name} have {total} tokens with their prompts, "
                f"train.max_tokens_per_microbatch is {self._max_tokens} and they must share one; "
                f"raise it or shorten the row: {text[:60]!r}"
            )
        return Group(group_id, trajectories, row)

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Raise as Prompts.check, and Overlong if the answers of `row` have too many tokens."""
        self._prompts.check(row, name)
        sizes = [len(str(row[key]).encode()) + 1 for key in self._keys]
        prompt = len(self._prompts.text(row).encode()) + 8  # as Prompts.check
        long = 0 < self._max_new_tokens < max(sizes)
        if long or 0 < self._max_tokens < sum(sizes) + len(sizes) * prompt:
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
        self, prompt: np.ndarray, answer: str, key: str, reward: float, trajectory_id: str,
        prompt_text: str, name: str,
    ) -> Trajectory:  # fmt: skip
        tokens = np.array([*encode(self._prompts.tokenizer, answer), self._end], np.int32)
        if 0 < self._max_new_tokens < len(tokens):
            raise Overlong(
                f"the {key} of {name} has {len(tokens)} tokens with its end token, "
                f"sampling.max_new_tokens is {self._max_new_tokens}; shorten or remove it, or "
                f"raise the limit: {answer[:60]!r}"
            )
        given = Completion(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.full(len(tokens), -1, np.int32),
            stop_reason="stop",
        )
        return trajectory(
            prompt, given, reward, trajectory_id, prompt=prompt_text, completion=answer
        )


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


def end_token(tokenizer: Any, stops: Sequence[int]) -> int:
    """Return the token that ends an answer, in training as in generation.

    It is the token that the chat template puts after an answer, if engines stop at it; else the
    tokenizer's own end token.

    Args:
      stops: the model's end tokens, at which engines stop.

    Raises:
      UserError: neither is among `stops`, so that learned answers would never end.
    """
    probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    text = tokenizer.apply_chat_template(probe, tokenize=False)
    behind = encode(tokenizer, text.rpartition("answer")[2])
    for token in (*behind[:1], tokenizer.eos_token_id):
        if token in stops:
            return token
    raise UserError(
        f"the chat template ends an answer with {tokenizer.decode(behind[:1])!r} and the tokenizer "
        f"has eos_token={tokenizer.eos_token!r}; neither is an eos_token_id of the model "
        f"({list(stops)}): mend generation_config.json"
    )
