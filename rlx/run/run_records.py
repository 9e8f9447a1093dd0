"""Make a run's records: pure functions from groups and counters to JSON-able values."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from rlx.algorithms.losses import LOSSES
from rlx.base import Group, Trajectory
from rlx.fleet.client import PublishReport

BUSY = ("prefill", "decode", "score")  # server spans in which the engine computes tokens
# Metrics of rewards and sampling; meaningless where a dataset is trained on.
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
      step: train batches done, from 1.
      metrics: of `update`. seconds: of each phase of this step. counters: of the executor, totals;
        `publish_record` of the last publish that is over; `busy_seconds` of the fleet, and of the
        teacher's where there is one.
      version: the newest version that every live server has acknowledged.
      generated_tokens: finished since the last record.
      data: what the algorithm is trained on; of a dataset OF_ROLLOUTS is left out.
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
    record = {**own, **metrics, **own}  # whatever a user's statistic is called
    left_out = () if data == "rollouts" else OF_ROLLOUTS
    return {name: value for name, value in record.items() if name not in left_out}


def fruitless(record: Mapping[str, Any], minibatches: int) -> str:
    """Return why a step of a record taught nothing; empty where it did."""
    if bad := [name for name in LOSSES if not isfinite(record.get(name, 0.0))]:
        return f"{bad[0]} is {record[bad[0]]}"
    if record.get("skipped_updates", 0) >= minibatches:
        return f"the gradient's norm is {record['grad_norm']}, so no update was made"
    return "" if record["n_valid_tokens"] else "no token was left to train on"


def publish_record(report: PublishReport) -> dict[str, float]:
    """Return what a publish cost, as metrics.

    Bytes sent to all servers (none by path), seconds from the arrays to the last acknowledgement,
    and the longest time in which a server decoded no token.
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
        # where each turn's words begin and end in the completion, and its tokens
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
    """Return the mean over servers of the seconds their engines spent on tokens."""
    each = [
        sum(end - start for name, start, end in server if name in BUSY) / 1e9 for server in spans
    ]
    return sum(each) / max(1, len(each))
