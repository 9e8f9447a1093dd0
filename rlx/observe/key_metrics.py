"""The numbers a run is judged by, in the terminal and in its report.

Rollouts have rewards, datasets have losses; held-out rows are answered greedily or have a loss. A
run shows the numbers that its records have.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class KeyMetric(NamedTuple):
    """A record's key and the short name that a line of the terminal gives it."""

    key: str
    name: str


TRAINED = (
    KeyMetric("task_reward", "reward"),
    KeyMetric("sft_loss", "loss"),
    KeyMetric("pair_loss", "loss"),
    KeyMetric("pair_accuracy", "accuracy"),
    KeyMetric("pair_margin", "margin"),
)
HELD_OUT = (
    KeyMetric("greedy_acc", "greedy"),
    KeyMetric("held_out_sft_loss", "loss"),
    KeyMetric("held_out_pair_loss", "loss"),
    KeyMetric("held_out_pair_accuracy", "accuracy"),
    KeyMetric("held_out_pair_margin", "margin"),
)


def present(
    metrics: Iterable[KeyMetric], records: Iterable[Mapping[str, Any]]
) -> tuple[KeyMetric, ...]:
    """Return the metrics whose key stands in some record, even with an unknown value."""
    keys = {key for record in records for key in record}
    return tuple(metric for metric in metrics if metric.key in keys)
