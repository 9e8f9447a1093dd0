"""Workflows whose trajectories others score: a teacher's or reward model's fleet, or judges.

workflow ─▶ trajectories ─▶ Fleet.score, all at once ─▶ reference_logprobs, or reward + w·value
                            Judge.grade ──────────────▶ reward + w·score
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rlx.base import Group, Trajectory, UserError, with_images
from rlx.rollout import workflows
from rlx.rollout.datasets import answered_tokens
from rlx.rollout.workflow_checks import checked_group
from rlx.rollout.workflows import Generator, Prompts, Task, Workflow
from rlx.system.threads import run_all

# Agents, and names of their workflows, whose rows do not hold what the model was asked.
_WITHOUT_QUESTION = ("online", "OpenEnvAgent", "TextArenaAgent")


@dataclass(eq=False)
class Scored:
    """A workflow whose trajectories `scorer` scores: a fleet, or judges."""

    workflow: Workflow
    scorer: Any
    who: ClassVar[str]  # the scorer's name in messages

    @property
    def name(self) -> str:
        return workflows.name(self.workflow)

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the workflow's group, scored; UserError if the scorer fails or refuses it."""
        group = await checked_group(self.workflow, fleet, task)
        scored = await run_all(*(self._scored(t, task) for t in group.trajectories))
        return replace(group, trajectories=tuple(scored))

    async def aclose(self) -> None:
        await workflows.close(self.workflow)

    async def _scored(self, trajectory: Trajectory, task: Task) -> Trajectory:
        raise NotImplementedError

    async def _ask(self, t: Trajectory, tokens: np.ndarray, at: np.ndarray, **options: Any) -> Any:
        """Return the fleet's finite scores at the ascending positions `at`."""
        try:
            sequence = with_images(tokens, t.images)
            scores = (await self.scorer.score(sequence, int(at[0]), **options))[at]
        except ValueError as error:
            raise UserError(f"{self.who} refuses trajectory {t.trajectory_id}: {error}") from error
        except UserError as error:
            raise type(error)(f"{self.who}: {error}") from error
        if not np.isfinite(scores).all():
            problem = f"{self.who} gives trajectory {t.trajectory_id} scores that are not finite"
            raise UserError(f"{problem}; check its weights, or serve it in float32")
        return scores


@dataclass(eq=False)
class TeacherScored(Scored):
    """A workflow that adds the teacher's log-probabilities to the student's trajectories."""

    temperature: float
    who = "the teacher"

    async def _scored(self, trajectory: Trajectory, task: Task) -> Trajectory:
        if task.sampling is not None:  # an evaluation, which is not trained on
            return trajectory
        tokens = trajectory.tokens
        trained = np.flatnonzero(trajectory.loss_mask[1:]) + 1  # nothing comes before token 0
        logprobs = np.zeros(len(tokens), np.float32)
        if trained.size:
            scores = self._ask(trajectory, tokens, trained, temperature=self.temperature)
            logprobs[trained] = await scores
        return replace(trajectory, reference_logprobs=logprobs)


@dataclass(eq=False)
class ModelRewarded(Scored):
    """A workflow that adds a reward model's value of the last token to another's rewards."""

    weight: float  # of the value; `reward/model` is logged without it
    prompts: Prompts | None = None  # in the reward model's tokens; None: the policy's
    end: int = 0  # with `prompts`, the token that ends a complete answer
    who = "the reward model"

    def __post_init__(self) -> None:
        if self.prompts and self.name.partition(" ")[0] in _WITHOUT_QUESTION:
            problem = (
                "reward.model has another tokenizer or chat template than the policy, and rows"
            )
            raise UserError(f"{problem} of {self.name} hold no question; give it the policy's")

    async def _scored(self, trajectory: Trajectory, task: Task) -> Trajectory:
        if trajectory.oldest_version < 0:  # a row's own answer, for SFT or a pair
            return trajectory
        tokens = trajectory.tokens
        if self.prompts:
            text, name = trajectory.completion, f"trajectory {trajectory.trajectory_id}"
            tokens, *_ = answered_tokens(self.prompts, task.row, text, self.end, name)
            tokens = tokens[:-1] if trajectory.truncated else tokens
        last = np.array([len(tokens) - 1])
        value = float((await self._ask(trajectory, tokens, last, values=True))[0])
        return _with_reward(trajectory, self.weight * value, {"reward/model": value})


@dataclass(eq=False)
class JudgeRewarded(Scored):
    """A workflow that adds the score of language models to another's rewards."""

    weight: float  # of the score; `reward/judge` is logged without it
    question_key: str = "question"  # of each row's text or chat messages
    who = "the judge"

    async def aclose(self) -> None:
        await workflows.close(self.workflow)
        await self.scorer.aclose()

    async def _scored(self, trajectory: Trajectory, task: Task) -> Trajectory:
        if trajectory.oldest_version < 0:  # a row's own answer, for SFT or a pair
            return trajectory
        key = "" if trajectory.agent in _WITHOUT_QUESTION else self.question_key
        question = task.row.get(key, trajectory.prompt)
        if not isinstance(question, str):
            question = "\n".join(f"{message['role']}: {message['content']}" for message in question)
        answer = task.row.get("answer")
        reference = "" if answer is None else str(answer)
        info = await self.scorer.grade(question, trajectory.completion, reference)
        return _with_reward(trajectory, self.weight * info["reward/judge"], info)


def _with_reward(trajectory: Trajectory, more: float, info: Mapping[str, float]) -> Trajectory:
    """Return a trajectory with `more` reward, for each of its turns too."""
    reward, *turns = (r + more for r in (trajectory.reward, *trajectory.turn_rewards))
    info = {**trajectory.info, **info}
    if "run_reward" in info:
        info["run_reward"] += more
    return replace(trajectory, reward=reward, turn_rewards=tuple(turns), info=info)
