"""Workflows whose trajectories a second fleet scores: a teacher's, or a reward model's.

workflow ─▶ trajectories ─▶ Fleet.score, all at once ─▶ reference_logprobs, or reward + w·value
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rlx.base import Group, Trajectory, UserError
from rlx.fleet.client import Fleet
from rlx.rollout import workflows
from rlx.rollout.datasets import answered
from rlx.rollout.workflow_checks import checked
from rlx.rollout.workflows import Generator, Prompts, Task, Workflow


@dataclass(eq=False)
class Scored:
    """A workflow whose trajectories the fleet `scorer` scores."""

    workflow: Workflow
    scorer: Fleet
    who: ClassVar[str]  # the scorer's name in messages

    @property
    def name(self) -> str:
        """Return the workflow's name."""
        return workflows.name(self.workflow)

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the workflow's group, scored; UserError if the scorer fails or refuses it."""
        group = await checked(self.workflow, fleet, task)
        scored = await asyncio.gather(*(self._scored(t, task) for t in group.trajectories))
        return replace(group, trajectories=tuple(scored))

    async def aclose(self) -> None:
        await workflows.close(self.workflow)

    async def _scored(self, trajectory: Trajectory, task: Task) -> Trajectory:
        raise NotImplementedError

    async def _ask(self, t: Trajectory, tokens: np.ndarray, at: np.ndarray, **options: Any) -> Any:
        """Return the fleet's finite scores at the ascending positions `at`."""
        try:
            scores = (await self.scorer.score(tokens, int(at[0]), **options))[at]
        except ValueError as error:
            raise UserError(f"{self.who} refuses trajectory {t.trajectory_id}: {error}") from error
        except UserError as error:
            raise type(error)(f"{self.who}: {error}") from error
        if not np.isfinite(scores).all():
            raise UserError(
                f"{self.who} gives trajectory {t.trajectory_id} scores that are not finite; "
                "check its weights, or serve it in float32"
            )
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
            asked = self._ask(trajectory, tokens, trained, temperature=self.temperature)
            logprobs[trained] = await asked
        return replace(trajectory, reference_logprobs=logprobs)


@dataclass(eq=False)
class ModelRewarded(Scored):
    """A workflow that adds a reward model's value of the last token to another's rewards."""

    weight: float  # of the value; `reward/model` is logged without it
    prompts: Prompts | None = None  # in the reward model's tokens; None: the policy's
    end: int = 0  # with `prompts`, the token that ends a complete answer
    who = "the reward model"

    async def _scored(self, trajectory: Trajectory, task: Task) -> Trajectory:
        if trajectory.oldest_version < 0:  # a row's own answer, for SFT or a pair
            return trajectory
        tokens = trajectory.tokens
        if self.prompts:
            text, name = trajectory.completion, f"trajectory {trajectory.trajectory_id}"
            tokens, _ = answered(self.prompts, task.row, text, self.end, name)
            tokens = tokens[:-1] if trajectory.truncated else tokens
        last = np.array([len(tokens) - 1])
        value = float((await self._ask(trajectory, tokens, last, values=True))[0])
        info = {**trajectory.info, "reward/model": value}
        given = (trajectory.reward, *trajectory.turn_rewards)
        reward, *turns = (r + self.weight * value for r in given)
        return replace(trajectory, reward=reward, turn_rewards=tuple(turns), info=info)
