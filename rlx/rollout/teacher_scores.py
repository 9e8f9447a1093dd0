"""A workflow whose trajectories a teacher scores, for distillation.

    workflow ─▶ trajectories ─▶ Fleet.score of the teacher, all at once ─▶ reference_logprobs

Evaluations, which bring their own sampling, are not trained on and so not scored.
"""

import asyncio
import dataclasses
from typing import Any, Protocol

import numpy as np

from rlx.base import Group, Trajectory, UserError
from rlx.rollout import workflows
from rlx.rollout.workflow_checks import checked
from rlx.rollout.workflows import Generator, Task, Workflow


class Scorer(Protocol):
    """The teacher's fleet, as far as it is used here."""

    async def score(self, tokens: Any, first: int, *, temperature: float = 1.0) -> np.ndarray: ...


class TeacherScored:
    """A workflow that adds the teacher's log-probabilities to another workflow's trajectories.

    Args:
      workflow: of the student.
      teacher: a fleet whose model has the same vocabulary.
      temperature: of training, so that teacher and student are compared as they are sampled.
    """

    def __init__(self, workflow: Workflow, teacher: Scorer, temperature: float):
        self._workflow, self._teacher, self._temperature = workflow, teacher, temperature
        self.name = workflows.name(workflow)

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the workflow's group, with `reference_logprobs` unless the task brings sampling.

        Raises:
          UserError: no teacher is alive, it refuses a trajectory, or its numbers are not finite.
        """
        group = await checked(self._workflow, fleet, task)
        if task.sampling is not None:
            return group
        scored = await asyncio.gather(*(self._scored(t) for t in group.trajectories))
        return dataclasses.replace(group, trajectories=tuple(scored))

    async def aclose(self) -> None:
        """End what the workflow holds."""
        await workflows.close(self._workflow)

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        trained = np.flatnonzero(trajectory.loss_mask[1:]) + 1  # nothing comes before token 0
        logprobs = np.zeros(len(trajectory.tokens), np.float32)
        if trained.size:
            scores = await self._score(trajectory, int(trained[0]))
            logprobs[trained] = scores[trained]
            if not np.isfinite(logprobs).all():
                raise UserError(
                    f"the teacher gives trajectory {trajectory.trajectory_id} log-probabilities "
                    "that are not finite; check its weights, or serve it in float32"
                )
        return dataclasses.replace(trajectory, reference_logprobs=logprobs)

    async def _score(self, trajectory: Trajectory, first: int) -> np.ndarray:
        try:
            return await self._teacher.score(
                trajectory.tokens, first, temperature=self._temperature
            )
        except ValueError as error:
            name = trajectory.trajectory_id
            raise UserError(f"the teacher does not score trajectory {name}: {error}") from error
        except UserError as error:
            raise type(error)(f"the teacher: {error}") from error
