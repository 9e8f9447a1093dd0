"""Builds the workflow that a command line names, and the records of its samples for a file."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rlx.agents import loading, trajectories
from rlx.agents.workflow import AgentWorkflow
from rlx.base import Group, Trajectory, UserError
from rlx.rollout.workflows import RLVR, Workflow


def build(name: str, kwargs: Mapping[str, Any], **shared: Any) -> tuple[Workflow, bool]:
    """Build a workflow of rlx, or one that runs an agent class.

    Args:
      name: of either, as `loading.load_class` takes it; empty: RLVR.
      kwargs: of its constructor, from the user.
      shared: what a workflow may take besides, by name: prompts, tokenizer, sampling, n,
        reward_pool, system_prompt, question_key, workers, limits, process_per_run. One of rlx gets
        those that its constructor names.

    Returns:
      (the workflow, whether it uses the reward pool).

    Raises:
      UserError: no such class, or neither, or it does not take the arguments.
    """
    cls = loading.load_class(name) if name else RLVR
    if loading.kind(cls) == "agent":
        own = ("tokenizer", "sampling", "n", "system_prompt", "question_key", "workers", "limits",
               "process_per_run")  # fmt: skip
        given = {key: shared[key] for key in own if key in shared}
        return AgentWorkflow(name, kwargs=kwargs, **given), False
    takes = inspect.signature(cls).parameters
    given = {key: value for key, value in shared.items() if key in takes}
    workflow = loading.instance(cls, {**given, **kwargs})
    return workflow, "reward_pool" in given and "reward_pool" not in kwargs


def samples(group: Group, count: int) -> list[list[Trajectory]]:
    """Return the trajectories of each of `count` samples, by their ids `"{group_id}.{sample}"`.

    Raises:
      UserError: the workflow gave another number of samples.
    """
    found = [list(own) for _, own in groupby(group.trajectories, _sample_of)]
    if len(found) != count:
        raise UserError(
            f"the workflow gave {len(found)} samples where n={count} were asked for; its "
            'trajectory_id must be "{group_id}.{sample}", with .0, .1, … for parts of one'
        )
    return found


def record(parts: Sequence[Trajectory], tokenizer: Any) -> dict[str, Any]:
    """Return one sample for a file of samples; an agent's has `turns`, as the model saw them.

    The completion is the last turn's. The reward of a run that gave its completions rewards is
    that of the latest one that has one (`trajectories.outcome`).
    """
    last = parts[-1]
    found = {
        "completion": last.completion,
        "reward": last.info.get("run_reward", last.reward),
        "tokens": sum(part.num_trained for part in parts),
        "stop_reason": last.stop_reason,
    }
    turns = [turn for part in parts for turn in trajectories.turns(part)]
    if not last.agent and len(turns) == 1:
        return found
    words = tokenizer.decode(turns[-1].completion, skip_special_tokens=True)
    texts = [
        {"prompt": tokenizer.decode(t.prompt), "completion": tokenizer.decode(t.completion)}
        for t in turns
    ]
    return {**found, "completion": words, "turns": texts}


def _sample_of(trajectory: Trajectory) -> tuple[str, ...]:
    return tuple(trajectory.trajectory_id.split(".")[:2])
