"""A run's numbers on disk: metrics.jsonl, eval.jsonl, gate.jsonl, transcripts, TensorBoard.

The loop owns one MetricsWriter. Records are on disk when a call returns, so a killed run keeps
everything up to its last step.
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
        """Open WORKDIR's files.

        Args:
          tensorboard: write event files too.
          first_step: the next step to be written. Records of that step and later ones, left by a
            run that was killed after its checkpoint, are removed. None keeps all.
          place: facts for environment.json that only the caller knows.
        """
        self._workdir = Path(workdir)
        self.unreadable = 0  # lines of records that were set aside
        if first_step is not None:
            self.unreadable = forget(self._workdir, first_step)
        environment.write(self._workdir, place or {})
        self._events = (
            _open_events(self._workdir / "tensorboard", first_step) if tensorboard else None
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step. `record["step"]` counts from 1; dict values are allowed."""
        self._write("metrics.jsonl", record)

    def write_eval(self, record: Mapping[str, Any]) -> None:
        """Append one evaluation: `step`, `version`, `greedy_acc`, `num_questions`, …"""
        self._write("eval.jsonl", record, "eval")

    def write_gate(self, record: Mapping[str, Any]) -> None:
        """Append one comparison of engines and trainer: `step`, `max_delta`, `mean_delta`, …"""
        record = jsonable(record)
        append_jsonl(self._workdir / "gate.jsonl", record)
        if self._events:  # addresses differ between runs; boards get names that do not
            servers = record.get("servers", {}).values()
            named = {f"server_{index}": value for index, value in enumerate(servers)}
            self._events.add(record["step"], {**record, "servers": named}, "gate")

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the transcripts sampled at `step`, a trajectory a line; earlier ones go."""
        lines = b"".join(encode(row) for row in rows)
        write_atomically(self._workdir / "rollouts" / f"step-{step:06d}.jsonl", lines)

    def close(self) -> None:
        """Flush and close the event file; later calls of `write` fail."""
        if self._events:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, record: Mapping[str, Any], section: str | None = None) -> None:
        record = jsonable(record)
        append_jsonl(self._workdir / name, record)
        if self._events:
            self._events.add(record["step"], record, section)


def forget(workdir: str | os.PathLike, first_step: int) -> int:
    """Remove what WORKDIR's records say of `first_step` and later steps.

    The gate is passed again before `first_step`, with the weights of the step before.

    Returns:
      How many lines could not be read; `set_aside` moved them to a file of their own.
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
