"""Held-out questions through training's fleet and rewards, without touching its counts."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.base import UserError
from rlx.fleet.engine import Sampling
from rlx.rollout.workflows import Generator, Workflow


async def score(
    workflow: Workflow,
    fleet: Generator,
    rows: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    *,
    concurrency: int = 16,
    priority: int = 0,
    max_failures: int = 8,
    timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """One completion for each row.

    Only `concurrency` questions are in flight, so training keeps most of the fleet. They wait in
    the same queue as training's by default: behind it, a busy fleet would never come to them, and
    the score would be that of much later weights.

    Args:
      sampling: greedy or not; every question gets the seed of `sampling`, or 0.
      priority: of the requests; training's have 0, higher goes first.
      max_failures: attempts that may raise, altogether, before the evaluation does.
      timeout: seconds for one question.

    Returns:
      For each row, in order: index, question, answer, completion, reward, tokens (of the
      completion), stop_reason, versions (lowest and highest that sampled a token).
    """
    scores: list[dict[str, Any]] = [{} for _ in rows]
    todo = iter(range(len(rows)))
    failures = 0
    seed = sampling.seed or 0
    one = dataclasses.replace(sampling, seed=seed)

    async def attempt(index: int) -> dict[str, Any]:
        async with asyncio.timeout(timeout):
            group = await workflow.run(
                fleet, rows[index], group_id=index, seed=seed, sampling=one, n=1, priority=priority
            )
        (found,) = group.trajectories
        versions = found.versions[found.versions >= 0]
        return {
            "index": index,
            "question": found.prompt,
            "answer": rows[index].get("answer"),
            "completion": found.completion,
            "reward": found.reward,
            "tokens": found.num_trained,
            "stop_reason": found.stop_reason,
            "versions": [int(versions.min()), int(versions.max())] if versions.size else [],
        }

    async def answer_some() -> None:
        nonlocal failures
        for index in todo:
            while not scores[index]:
                try:
                    scores[index] = await attempt(index)
                except UserError:
                    raise
                except Exception:
                    failures += 1
                    if failures > max_failures:
                        raise

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(rows))):
                group.create_task(answer_some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return scores
