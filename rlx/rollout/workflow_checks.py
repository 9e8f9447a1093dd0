"""Check the groups that workflows make, and try users' workflows before a run begins."""

import asyncio
import copy
import numbers
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory, UserError, malformed
from rlx.cli import user_code
from rlx.fleet.sample import Completion
from rlx.rewards import reward_pool
from rlx.rollout import workflows
from rlx.rollout.attempts import describe
from rlx.rollout.workflows import Generator, Task, Workflow
from rlx.system.threads import run_alone

DRY_SECONDS = 60.0  # of a dry run, which waits for no model
_ARRAYS = ("tokens", "loss_mask", "behaviour_logprobs", "versions")
_OPTIONAL = ("turn_ids", "reference_logprobs", "kept_sizes", "kept")
_TEXTS = ("stop_reason", "trajectory_id", "agent", "prompt", "completion")


class TrajectoryError(RuntimeError):
    """A group that cannot be trained on; the message shows workflow, row and reason."""


async def checked_group(
    workflow: Workflow, fleet: Generator, task: Task, max_tokens: int = 0
) -> Group:
    """Return a task's group; raise TrajectoryError if it is unfit or above `max_tokens` > 0."""
    # The workflow gets a copy of the row, because checkpoints hold the row as it was read.
    try:
        group = await workflow.run(fleet, replace(task, row=copy.deepcopy(dict(task.row))))
    except SystemExit as error:  # which would end the loop of all attempts
        raise RuntimeError(f"SystemExit: {error}").with_traceback(error.__traceback__) from None
    if problem := _wrong(group, task, max_tokens):
        name, row = workflows.name(workflow), describe(task.row)
        raise TrajectoryError(f"workflow {name} gave, for row {row}, {problem}")
    return replace(group, row=task.row)


def dry_run(workflow: Workflow, row: Mapping[str, Any], name: str, token: int) -> None:
    """Let `workflow` make a group of answers of one `token` each; raise UserError if it fails."""

    async def once() -> None:
        try:
            await checked_group(workflow, _OneToken(token), Task(row, 0, 0))
        finally:
            await workflows.close(workflow)

    try:
        run_alone(once(), "dry run", DRY_SECONDS)
    except Exception as error:
        run = type(workflow).run
        why = str(error) if isinstance(error, TrajectoryError) else user_code.where(error, run)
        what = f"workflow {name} failed in a dry run on row {describe(row)}"
        raise UserError(f"{what}: {why}") from error


class _OneToken:
    """A fleet whose answers are one token of version 0."""

    def __init__(self, token: int):
        self._token = np.array([token], np.int32)

    async def generate(self, prompt_tokens: Any, sampling: Any, n: int, **_: Any) -> list:
        """Return `n` answers; raise TypeError unless the prompt is a list of token ids."""
        await asyncio.sleep(0)  # lets a workflow that retries for ever time out
        prompt = np.asarray(prompt_tokens)
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise TypeError(f"generate takes token ids of a prompt, not {prompt_tokens!r}"[:100])
        return [Completion(self._token, np.zeros(1, np.float32), self._token * 0, "stop")] * n


def _wrong(group: Any, task: Task, max_tokens: int) -> str:
    """Return why an object is not the group of a task; empty if it is."""
    if not isinstance(group, Group):
        return f"a {type(group).__name__}, not a Group"
    if group.group_id != task.group_id:
        return f"group {group.group_id}, not {task.group_id}"
    for t in group.trajectories:
        if not isinstance(t, Trajectory):
            return f"a {type(t).__name__}, not a Trajectory"
        if problem := _unfit(t, max_tokens):
            return f"trajectory {t.trajectory_id} with {problem}"
    ids = [t.trajectory_id for t in group.trajectories]
    if len({i.partition(".")[0] for i in ids}) != 1 or len(set(ids)) < len(ids):
        return f'trajectories {ids[:4]}, not of ids "{{group_id}}.{{sample}}" each'
    return ""


def _unfit(trajectory: Trajectory, max_tokens: int) -> str:
    """Return why a trajectory cannot be trained on; empty if it can."""
    rewards = (trajectory.reward, *trajectory.turn_rewards)
    if wrong := [problem for reward in rewards if (problem := reward_pool.problem(reward))]:
        return f"the reward {wrong[0]}"
    for name in (*_ARRAYS, *(each for each in _OPTIONAL if getattr(trajectory, each) is not None)):
        if not isinstance(array := getattr(trajectory, name), np.ndarray) or array.ndim != 1:
            return f"{name} that are not a one-dimensional array: {str(array)[:60]!r}"
    if texts := [name for name in _TEXTS if not isinstance(getattr(trajectory, name), str)]:
        return f"{texts[0]} that is not text: {str(getattr(trajectory, texts[0]))[:60]!r}"
    for name, value in trajectory.info.items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real | np.bool_):
            return f"info[{name!r}] that is not a number: {str(value)[:60]!r}"
    if problem := malformed(trajectory):
        return f"inconsistent shapes: {problem}"
    if not np.isfinite(trajectory.behaviour_logprobs).all():
        return "behaviour_logprobs that are not finite"
    if 0 < max_tokens < (length := len(trajectory.tokens)):
        return (
            f"{length} tokens, training has room for {max_tokens} (train.max_tokens_per_microbatch "
            "and the largest of train.row_buckets); raise them, or let the workflow stop earlier"
        )
    return ""
