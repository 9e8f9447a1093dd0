"""The numbers that a run is judged by, for terminal and report; a run shows those its records have.

Rollouts have rewards, datasets have losses; held-out rows are answered greedily, or have a loss.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Headline(NamedTuple):
    """A key of a record, and what a line calls it."""

    key: str
    name: str


TRAINED = (
    Headline("task_reward", "reward"),
    Headline("sft_loss", "loss"),
    Headline("pair_loss", "loss"),
    Headline("pair_accuracy", "accuracy"),
    Headline("pair_margin", "margin"),
)
HELD_OUT = (
    Headline("greedy_acc", "greedy"),
    Headline("held_out_sft_loss", "loss"),
    Headline("held_out_pair_loss", "loss"),
    Headline("held_out_pair_accuracy", "accuracy"),
    Headline("held_out_pair_margin", "margin"),
)


def present(
    headlines: Iterable[Headline], records: Iterable[Mapping[str, Any]]
) -> tuple[Headline, ...]:
    """Those that some record has, if only as an unknown value."""
    keys = {key for record in records for key in record}
    return tuple(headline for headline in headlines if headline.key in keys)
