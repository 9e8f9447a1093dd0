"""Held-out questions through training's fleet and rewards, without touching its counts."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.base import Unavailable
from rlx.fleet.requests import Sampling
from rlx.rollout.attempts import Patience
from rlx.rollout.workflows import Generator, Workflow


async def score(
    workflow: Workflow,
    fleet: Generator,
    rows: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    *,
    concurrency: int = 16,
    priority: int = 0,
    patience: Patience | None = None,
    timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """One completion for each row.

    Only `concurrency` questions are in flight, so training keeps most of the fleet. They wait in
    the same queue as training's by default: behind it, a busy fleet would never come to them, and
    the score would be that of much later weights. A question that fails is asked again when the
    others are done; after its last attempt it has the reward 0.

    Args:
      sampling: greedy or not; every question gets the seed of `sampling`, or 0.
      priority: of the requests; training's have 0, higher goes first.
      patience: its attempts and pauses; no number of failures ends an evaluation.
      timeout: seconds for one question.

    Returns:
      For each row, in order: index, question, answer, completion, reward, tokens (of the
      completion), stop_reason, versions (lowest and highest that sampled a token). Of a row that
      failed: index, answer, reward, and error, which is the last exception.

    Raises:
      Unavailable: no answer can be had at all, so there is nothing to score.
    """
    patience = patience or Patience()
    scores: list[dict[str, Any]] = [{} for _ in rows]
    seed = sampling.seed or 0
    one = dataclasses.replace(sampling, seed=seed)

    async def attempt(index: int) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout) as limit:
                group = await workflow.run(
                    fleet, rows[index], group_id=index, seed=seed, sampling=one, n=1,
                    priority=priority,
                )  # fmt: skip
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"it took longer than {timeout:g} s") from None
            raise
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
        for index in todo:
            try:
                scores[index] = await attempt(index)
            except Unavailable:
                raise
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task and task.cancelling():
                    raise
                failure = {"index": index, "answer": rows[index].get("answer"), "reward": 0.0}
                scores[index] = {**failure, "error": error}

    left: Sequence[int] = range(len(rows))
    for failed in range(patience.attempts):
        if failed:
            await asyncio.sleep(patience.back_off(failed))
        todo = iter(left)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(left))):
                    group.create_task(answer_some())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if not (left := [index for index in left if "error" in scores[index]]):
            break
    return scores
