"""A run's numbers on disk: metrics.jsonl, eval.jsonl, gate.jsonl, transcripts.

The loop owns one MetricsWriter. Records are on disk when a call returns, so a killed run keeps
everything up to its last step.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlx.observe import environment
from rlx.observe.hooks import Hooks
from rlx.system.jsonl import (
    append_jsonl,
    encode,
    jsonable,
    read_jsonl,
    set_aside,
    write_atomically,
)

# Files whose every line has the step it is of, and what hooks are told of it: one a train batch, an
# evaluation, a comparison of engines and trainer.
RECORDS = {"metrics.jsonl": "on_step", "eval.jsonl": "on_eval", "gate.jsonl": "on_gate"}
STARTS = "starts.jsonl"  # an object for each start, one for the end; no line is ever changed


class MetricsWriter:
    """Appends a run's records to WORKDIR, and tells the run's hooks.

    Files: `metrics.jsonl` (an object a step), `eval.jsonl` (an object an evaluation),
    `rollouts/step-000001.jsonl` (sampled transcripts), `environment.json` (where the run began),
    `starts.jsonl` (settings and environment of each start). Not thread-safe: the trainer's thread
    writes.

    Attributes:
      start: number of this start, from 1; the loop adds it to the record of each step.
      environment: of this start. before: of the start before; empty where there was none.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        hooks: Hooks | None = None,
        first_step: int | None = None,
        place: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        changed: Iterable[str] = (),
    ):
        """Open WORKDIR's files.

        Args:
          hooks: what is told of each record after it is on disk.
          first_step: the next step to be written. Records of that step and later ones, left by a
            run that was killed after its checkpoint, are removed. None keeps all.
          place: facts for environment.json that only the caller knows.
          config: settings of this start. changed: what differs in them from the start before.
        """
        self._workdir, self._hooks = Path(workdir), hooks or Hooks()
        self.unreadable = 0  # lines of records that were set aside
        if first_step is not None:
            self.unreadable = forget(self._workdir, first_step)
        here = environment.describe(place or {})
        starts = [each for each in read_jsonl(self._workdir / STARTS) if "start" in each]
        self.start, self.environment = len(starts) + 1, here
        self.before = starts[-1].get("environment", {}) if starts else {}
        begun, path = (first_step or 1) - 1, self._workdir / "environment.json"
        append_jsonl(
            self._workdir / STARTS,
            {"start": self.start, "step": begun, "time": time.time(), "changed": [*changed],
             "config": config or {}, "environment": here},
        )  # fmt: skip
        if not begun or not path.exists():
            write_atomically(path, json.dumps(here, indent=2).encode() + b"\n")

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Append the record of a step to one of RECORDS; dict values are allowed."""
        record = jsonable(record)
        append_jsonl(self._workdir / name, record)
        self._hooks.tell(RECORDS[name], record["step"], record)

    def end(self, step: int) -> None:
        """Note in starts.jsonl that the run has done all it wants, after `step`."""
        append_jsonl(self._workdir / STARTS, {"step": step, "ended": "finished"})

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the transcripts sampled at `step`, a trajectory a line; earlier ones go."""
        lines = b"".join(encode(row) for row in rows)
        write_atomically(self._workdir / "rollouts" / f"step-{step:06d}.jsonl", lines)


def forget(workdir: str | os.PathLike, first_step: int) -> int:
    """Remove what WORKDIR's records say of `first_step` and later steps.

    The gate is passed again before `first_step`, with the weights of the step before.

    Returns:
      How many lines could not be read; `set_aside` moved them to a file of their own.
    """
    workdir, unreadable = Path(workdir), 0
    for name in RECORDS:
        first = first_step - (name == "gate.jsonl")
        unreadable += set_aside(workdir / name, first_step=first)
    for path in sorted((workdir / "rollouts").glob("step-*.jsonl")):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) >= first_step:
            path.unlink()
    return unreadable
