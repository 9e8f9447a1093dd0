"""Turn groups and counters into a run's JSON-able records."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from rlx.algorithms.losses import LOSSES
from rlx.base import Group, Trajectory
from rlx.fleet.client import PublishReport

BUSY = ("prefill", "decode", "score")  # server spans that compute tokens
# Metrics of rewards and sampling, omitted when training on a dataset.
OF_ROLLOUTS = (
    "task_reward", "kl_reward", "final_reward", "n_nonfinite_kl", "kl_coefficient", "no_eos_ratio",
    "staleness_min", "staleness_mean", "staleness_max", "staleness_histogram",
    "tokens_per_version", "generated_tokens_per_second", "server_busy_seconds",
)  # fmt: skip


def step_record(
    step: int,
    metrics: Mapping[str, Any],
    seconds: Mapping[str, float],
    counters: Mapping[str, Any],
    *,
    version: int,
    epoch: int,
    step_seconds: float,
    elapsed_seconds: float,
    generated_tokens: int,
    data: str = "rollouts",
) -> dict[str, Any]:
    """Return one line of metrics.jsonl.

    Args:
      step: completed train batches, from 1.
      metrics: result of `update`. seconds: phase → seconds in this step. counters: totals of the
        executor, the last `publish_record`, and `busy_seconds` of the fleet and the teacher.
      version: newest version that every live server has acknowledged.
      generated_tokens: tokens completed since the last record.
      data: training data of the algorithm; OF_ROLLOUTS is omitted for datasets.
    """
    own = {
        "step": step,
        "global_step": step,
        "epoch": epoch,
        "version": version,
        "step_seconds": step_seconds,
        "elapsed_seconds": elapsed_seconds,
        "seconds": dict(seconds),
        "generated_tokens_per_second": generated_tokens / step_seconds,
        "consumed_tokens_per_second": metrics["n_valid_tokens"] / step_seconds,
        **counters,
    }
    record = {**own, **metrics, **own}  # a user's statistic cannot replace these
    left_out = () if data == "rollouts" else OF_ROLLOUTS
    return {name: value for name, value in record.items() if name not in left_out}


def fruitless(record: Mapping[str, Any], minibatches: int) -> str:
    """Return why a recorded step learned nothing; "" if it learned."""
    if bad := [name for name in LOSSES if not isfinite(record.get(name, 0.0))]:
        return f"{bad[0]} is {record[bad[0]]}"
    if record.get("skipped_updates", 0) >= minibatches:
        return f"the gradient's norm is {record['grad_norm']}, so no update was made"
    return "" if record["n_valid_tokens"] else "no token was left to train on"


def publish_record(report: PublishReport) -> dict[str, float]:
    """Return the metrics of a publish.

    Bytes sent to all servers (0 by path), seconds until the last acknowledgement, and the longest
    pause of a server's decoding.
    """
    return {
        "publish_bytes": report.sent_bytes,
        "publish_seconds": report.seconds,
        "publish_stall_seconds": report.stall_seconds,
    }


def transcripts(step: int, groups: Sequence[Group], count: int) -> list[dict[str, Any]]:
    """Return `count` trajectories of a batch, evenly from the best reward to the worst."""
    found = [(group, t) for group in groups for t in group.trajectories]
    ranked = sorted(found, key=lambda pair: (-pair[1].reward, pair[1].trajectory_id))
    if count < 1 or not ranked:
        return []
    last = len(ranked) - 1
    chosen = {round(i * last / max(1, count - 1)) for i in range(count)}
    return [_transcript(step, *ranked[i]) for i in sorted(chosen)]


def _transcript(step: int, group: Group, trajectory: Trajectory) -> dict[str, Any]:
    sampled = trajectory.versions >= 0
    turns: dict[str, Any] = {}
    if trajectory.said and trajectory.turn_ids is not None:
        counts = np.unique(trajectory.turn_ids[sampled], return_counts=True)[1].tolist()
        # begin and end of each turn in the completion's text, and its tokens
        turns["turns"] = [[*span, n] for span, n in zip(trajectory.said, counts, strict=False)]
    return {
        "step": step,
        "group_id": group.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "prompt": trajectory.prompt,
        "completion": trajectory.completion,
        **turns,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "answer": group.row.get("answer"),
        "versions": trajectory.versions[sampled].tolist(),
        "logprobs": [round(x, 4) for x in trajectory.behaviour_logprobs[sampled].tolist()],
    }


def busy_seconds(spans: Iterable[Iterable[tuple[str, int, int]]]) -> float:
    """Return the mean seconds that servers spent computing tokens."""
    each = [
        sum(end - start for name, start, end in server if name in BUSY) / 1e9 for server in spans
    ]
    return sum(each) / max(1, len(each))
