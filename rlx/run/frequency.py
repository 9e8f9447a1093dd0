"""Decide when a run saves, evaluates and exports: by epoch, step and second, whichever comes first.

Pure: the position of a run and its clock come in as arguments. A checkpoint keeps the positions, so
that a continued run is due when the whole one would have been.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ml_collections import ConfigDict

KINDS = ("checkpoint", "eval", "export")


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
      epoch: passes over the data that are complete. epoch_step: train batches since the last was.
      step: train batches, of all epochs.
      seconds: of the run, with those of the processes that it continues.
    """

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    seconds: float = 0.0

    def after(self, prompts: int, rows: int, seconds: float) -> "Position":
        """Return the position one batch later.

        Args:
          prompts: that were taken from the data until then. rows: of the data, ≥ 1.
          seconds: of the run, then.
        """
        epoch = prompts // rows
        epoch_step = self.epoch_step + 1 if epoch == self.epoch else 0
        return Position(epoch, epoch_step, self.step + 1, seconds)

    @property
    def name(self) -> str:
        """Name of the directory with an export of this position."""
        return f"epoch{self.epoch}epochstep{self.epoch_step}globalstep{self.step}"


@dataclass(frozen=True)
class Every:
    """How often something happens; 0: not by this measure."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0


def due(every: Every, last: Position, now: Position) -> bool:
    """Return whether something is due at `now` that happened at `last`.

    Epochs and steps are counted from the run's beginning: every 4 steps is at steps 4, 8, … also
    where one was brought forward by the clock. Seconds are counted from the last time.
    """
    return (
        (every.epochs > 0 and now.epoch // every.epochs > last.epoch // every.epochs)
        or (every.steps > 0 and now.step // every.steps > last.step // every.steps)
        or (every.seconds > 0 and now.seconds - last.seconds >= every.seconds)
    )


def every_of(config: ConfigDict) -> dict[str, Every]:
    """Return how often each kind happens in a run."""
    units = ("epochs", "steps", "seconds")
    return {k: Every(*(config[k][f"every_{unit}"] for unit in units)) for k in KINDS}


def to_host(now: Position, last: Mapping[str, Position]) -> dict[str, Any]:
    """Return what a checkpoint keeps, JSON-able."""
    return {"now": asdict(now), **{kind: asdict(last[kind]) for kind in KINDS}}


def from_host(host: Mapping[str, Any], begun: Position) -> tuple[Position, dict[str, Position]]:
    """Return the position, and where each kind happened last.

    Args:
      host: of `to_host`; empty for a new run. begun: what takes the place of what is not in it.
    """
    found = {kind: Position(**host[kind]) for kind in ("now", *KINDS) if kind in host}
    return found.get("now", begun), {kind: found.get(kind, begun) for kind in KINDS}
