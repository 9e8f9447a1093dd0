"""Turn groups and counters into a run's JSON-able records."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from rlx.algorithms.losses import LOSSES
from rlx.base import Group, Trajectory

BUSY = ("prefill", "decode", "score")  # server spans that compute tokens
# Metrics of rewards and sampling, omitted when training on a dataset.
OF_ROLLOUTS = (
    "task_reward", "kl_reward", "final_reward", "n_nonfinite_kl", "kl_coefficient", "no_eos_ratio",
    "staleness_min", "staleness_mean", "staleness_max", "staleness_histogram",
    "tokens_per_version", "crossed_ratio", "generated_tokens_per_second", "server_busy_seconds",
)  # fmt: skip


def step_record(
    step: int,  # completed train batches, from 1
    metrics: Mapping[str, Any],  # result of `update`
    step_seconds: float,
    generated_tokens: int,  # tokens completed since the last record
    data: str = "rollouts",  # training data of the algorithm; OF_ROLLOUTS is omitted for datasets
    **values: Any,  # further values of the step
) -> dict[str, Any]:
    """Return one line of metrics.jsonl."""
    facts = {
        "step": step, "global_step": step, "step_seconds": step_seconds,
        "generated_tokens_per_second": generated_tokens / step_seconds,
        "consumed_tokens_per_second": metrics["n_valid_tokens"] / step_seconds,
        **values,
    }  # fmt: skip
    record = {**facts, **metrics, **facts}  # a user's statistic cannot replace these
    return {k: v for k, v in record.items() if data == "rollouts" or k not in OF_ROLLOUTS}


def fruitless(record: Mapping[str, Any], minibatches: int) -> str:
    """Return why a recorded step learned nothing; "" if it learned."""
    if bad := [name for name in LOSSES if not isfinite(record.get(name, 0.0))]:
        return f"{bad[0]} is {record[bad[0]]}"
    if record.get("skipped_updates", 0) >= minibatches:
        return f"the gradient's norm is {record['grad_norm']}, so no update was made"
    return "" if record["n_valid_tokens"] else "no token was left to train on"


def transcripts(step: int, groups: Sequence[Group], count: int) -> list[dict[str, Any]]:
    """Return `count` trajectories of a batch, evenly from the best reward to the worst."""
    pairs = [(group, t) for group in groups for t in group.trajectories]
    ranked = sorted(pairs, key=lambda pair: (-pair[1].reward, pair[1].trajectory_id))
    last = len(ranked) - 1
    chosen = {round(i * last / max(1, count - 1)) for i in range(count) if ranked}
    return [_transcript(step, *ranked[i]) for i in sorted(chosen)]


def _transcript(step: int, group: Group, t: Trajectory) -> dict[str, Any]:
    sampled = t.versions >= 0
    more: dict[str, Any] = {"images": list(t.images)} if t.images else {}
    if t.said and t.turn_ids is not None:
        counts = np.unique(t.turn_ids[sampled], return_counts=True)[1].tolist()
        # begin and end of each turn in the completion's text, and its tokens
        more["turns"] = [[*span, n] for span, n in zip(t.said, counts, strict=False)]
    return {
        "step": step, "group_id": group.group_id, "trajectory_id": t.trajectory_id,
        "prompt": t.prompt, "completion": t.completion, **more,
        "reward": t.reward, "stop_reason": t.stop_reason, "answer": group.row.get("answer"),
        "versions": t.versions[sampled].tolist(),
        "logprobs": [round(x, 4) for x in t.behaviour_logprobs[sampled].tolist()],
    }  # fmt: skip
