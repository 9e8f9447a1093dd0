"""Decide when a run saves, evaluates and exports: by epoch, step or second, whichever comes first.

Checkpoints keep the positions, so a resumed run follows the schedule of an uninterrupted one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ml_collections import ConfigDict

KINDS = ("checkpoint", "eval", "export")


@dataclass(frozen=True)
class Position:
    """How far a run is."""

    epoch: int = 0  # complete passes over the data
    epoch_step: int = 0  # train batches of the current one
    step: int = 0  # train batches of all epochs
    seconds: float = 0.0  # duration of the run, including earlier processes

    def after(self, prompts: int, rows: int, seconds: float) -> "Position":
        """Return the position one batch later, after `prompts` in total from data of `rows`."""
        epoch = max(self.epoch, prompts // rows)  # a batch may have only stragglers
        epoch_step = self.epoch_step + 1 if epoch == self.epoch else 0
        return Position(epoch, epoch_step, self.step + 1, seconds)

    @property
    def name(self) -> str:
        """Directory name of an export at this position."""
        return f"epoch{self.epoch}epochstep{self.epoch_step}globalstep{self.step}"


def due(section: ConfigDict, last: Position, now: Position, clock: bool = True) -> bool:
    """Return whether an action last done at `last` is due at `now`, by a section's `every_` keys.

    Without `clock` its seconds do not count.
    """
    # Epochs and steps count from the start of the run, so 4 means 4, 8, …; seconds from `last`.
    epochs, steps, seconds = section.every_epochs, section.every_steps, section.every_seconds
    return (
        (epochs > 0 and now.epoch // epochs > last.epoch // epochs)
        or (steps > 0 and now.step // steps > last.step // steps)
        or (clock and seconds > 0 and now.seconds - last.seconds >= seconds)
    )


def to_host(now: Position, last: Mapping[str, Position]) -> dict[str, Any]:
    """Return the JSON-able positions for a checkpoint."""
    return {"now": asdict(now), **{kind: asdict(last[kind]) for kind in KINDS}}


def from_host(host: Mapping[str, Any], start: Position) -> tuple[Position, dict[str, Position]]:
    """Return the position and the last one of each kind in `host`; `start` where it has none."""
    positions = {kind: Position(**host[kind]) for kind in ("now", *KINDS) if kind in host}
    return positions.get("now", start), {kind: positions.get(kind, start) for kind in KINDS}
