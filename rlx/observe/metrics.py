"""A run's numbers on disk: metrics.jsonl, eval.jsonl, transcripts, TensorBoard.

The loop owns one MetricsWriter. What is written is whole when a call returns, so a killed
run keeps everything up to its last step.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.observe import environment
from rlx.observe.jsonl import (
    append_jsonl,
    encode,
    jsonable,
    set_aside,
    truncate_jsonl,
    write_atomically,
)

RECORDS = ("metrics.jsonl", "eval.jsonl", "gate.jsonl")  # every line has the step it is of


class MetricsWriter:
    """Appends a run's records to WORKDIR.

    Files: `metrics.jsonl` (an object a step), `eval.jsonl` (an object an evaluation),
    `rollouts/step-000001.jsonl` (sampled transcripts), `tensorboard/` (event files),
    `environment.json` (where the run ran). Not thread-safe: the trainer's thread writes.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        tensorboard: bool = True,
        first_step: int | None = None,
        place: Mapping[str, Any] | None = None,
    ):
        """`first_step`: the next step to be written. Records of that step and later ones,
        left by a run that was killed after its checkpoint, are removed. None keeps all.
        `place`: what environment.json has beside what every process knows of itself."""
        self._workdir = Path(workdir)
        self.unreadable = 0  # lines of records that were set aside
        if first_step is not None:
            self.unreadable = forget(self._workdir, first_step)
        environment.write(self._workdir, place or {})
        self._events = None
        if tensorboard:
            self._events = _open_events(self._workdir / "tensorboard", first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one step. `record["step"]` counts from 1; dict values are allowed."""
        self._write("metrics.jsonl", record, None)

    def write_eval(self, record: Mapping[str, Any]) -> None:
        """Appends one evaluation: `step`, `version`, `greedy_acc`, `num_questions`, …"""
        self._write("eval.jsonl", record, "eval")

    def write_gate(self, record: Mapping[str, Any]) -> None:
        """Appends one comparison of engines and trainer: `step`, `max_delta`, `mean_delta`, …"""
        named = {f"server_{i}": v for i, v in enumerate(record.get("servers", {}).values())}
        self._write("gate.jsonl", record, "gate", {**record, "servers": named})

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the transcripts sampled at `step`, a trajectory a line, replacing any before."""
        lines = b"".join(encode(row) for row in rows)
        write_atomically(self._workdir / "rollouts" / f"step-{step:06d}.jsonl", lines)

    def close(self) -> None:
        """Flushes and closes the event file; later calls of `write` fail."""
        if self._events:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(
        self,
        name: str,
        record: Mapping[str, Any],
        section: str | None,
        drawn: Mapping[str, Any] | None = None,
    ) -> None:
        """Append `record`; boards get `drawn`, whose names are the same in every run."""
        append_jsonl(self._workdir / name, jsonable(record))
        if self._events:
            self._events.add(record["step"], jsonable(drawn or record), section)


def forget(workdir: str | os.PathLike, first_step: int) -> int:
    """Remove what WORKDIR's records say of `first_step` and later steps.

    The gate is passed again before `first_step`, with the weights of the step before.

    Returns:
      How many lines could not be read; they are beside their files now (`set_aside`).
    """
    workdir, unreadable = Path(workdir), 0
    for name in RECORDS:
        unreadable += set_aside(workdir / name)
        truncate_jsonl(workdir / name, first_step - (name == "gate.jsonl"))
    for path in sorted((workdir / "rollouts").glob("step-*.jsonl")):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) >= first_step:
            path.unlink()
    return unreadable


def _open_events(directory: Path, first_step: int | None) -> Any:
    from rlx.observe.tensorboard import EventFile  # tensorboardX takes a moment to import

    try:
        return EventFile(directory, first_step)
    except OSError as error:
        raise UserError(
            f"cannot write {directory}: {error.strerror or error}; free some space or "
            "set observe.tensorboard=False"
        ) from error
