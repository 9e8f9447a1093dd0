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
        epoch = prompts // rows
        epoch_step = self.epoch_step + 1 if epoch == self.epoch else 0
        return Position(epoch, epoch_step, self.step + 1, seconds)

    @property
    def name(self) -> str:
        """Directory name of an export at this position."""
        return f"epoch{self.epoch}epochstep{self.epoch_step}globalstep{self.step}"


@dataclass(frozen=True)
class Every:
    """An interval in each unit; 0: unused."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0


def due(every: Every, last: Position, now: Position) -> bool:
    """Return whether an action last done at `last` is due at `now`."""
    # Epochs and steps count from the start of the run, so 4 means 4, 8, …; seconds from `last`.
    return (
        (every.epochs > 0 and now.epoch // every.epochs > last.epoch // every.epochs)
        or (every.steps > 0 and now.step // every.steps > last.step // every.steps)
        or (every.seconds > 0 and now.seconds - last.seconds >= every.seconds)
    )


def every_of(config: ConfigDict) -> dict[str, Every]:
    """Return the interval of each kind."""
    units = ("epochs", "steps", "seconds")
    return {k: Every(*(config[k][f"every_{unit}"] for unit in units)) for k in KINDS}


def to_host(now: Position, last: Mapping[str, Position]) -> dict[str, Any]:
    """Return the JSON-able positions for a checkpoint."""
    return {"now": asdict(now), **{kind: asdict(last[kind]) for kind in KINDS}}


def from_host(host: Mapping[str, Any], begun: Position) -> tuple[Position, dict[str, Position]]:
    """Return the position and the last one of each kind in `host`; `begun` where it has none."""
    found = {kind: Position(**host[kind]) for kind in ("now", *KINDS) if kind in host}
    return found.get("now", begun), {kind: found.get(kind, begun) for kind in KINDS}
