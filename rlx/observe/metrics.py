"""Write a run's numbers to metrics.jsonl, eval.jsonl, gate.jsonl and transcripts.

Records are on disk when a call returns, so a killed run keeps everything up to its last step.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.cli.user_code import words
from rlx.observe import environment
from rlx.observe.hooks import Hooks
from rlx.system import jsonl
from rlx.system.jsonl import append_jsonl, read_jsonl, write_atomically

# Metrics that a run is judged by: a record's key, and its short name in the terminal.
TRAINED = {
    "task_reward": "reward", "sft_loss": "loss", "pair_loss": "loss", "pair_accuracy": "accuracy",
    "pair_margin": "margin",
}  # fmt: skip
HELD_OUT = {
    "greedy_acc": "greedy", "held_out_sft_loss": "loss", "held_out_pair_loss": "loss",
    "held_out_pair_accuracy": "accuracy", "held_out_pair_margin": "margin",
}  # fmt: skip
# Files with one line for each train batch, evaluation, or comparison of engines and trainer, and
# the hook's method that gets the line.
RECORDS = {"metrics.jsonl": "on_step", "eval.jsonl": "on_eval", "gate.jsonl": "on_gate"}
STARTS = "starts.jsonl"  # objects for each start and each end; no line is ever changed


def present(metrics: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the metrics whose key stands in some record, even with an unknown value."""
    keys = {key for record in records for key in record}
    return {key: name for key, name in metrics.items() if key in keys}


class MetricsWriter:
    """Appends a run's records to WORKDIR and passes them to hooks, on the trainer's thread.

    `rollouts/step-000001.jsonl` has sampled transcripts, `environment.json` the place of the first
    start, and `starts.jsonl` settings and environment of each start.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        hooks: Hooks | None = None,  # get each record after it is on disk
        # The next one; records from it on, left by a killed run, are removed. None keeps all.
        first_step: int | None = None,
        place: Mapping[str, Any] | None = None,  # facts that only the caller knows
        config: Mapping[str, Any] | None = None,  # settings of this start
        changed: Iterable[str] = (),  # how they differ from the start before
    ):
        self._workdir, self._hooks = Path(workdir), hooks or Hooks()
        # Lines of records that were set aside.
        self.unreadable = 0 if first_step is None else forget(self._workdir, first_step)
        here = environment.describe(place or {})
        starts = [start for start in read_jsonl(self._workdir / STARTS) if "start" in start]
        self.start, self.environment = len(starts) + 1, here  # number of this start, from 1
        self.before = starts[-1].get("environment", {}) if starts else {}  # of the previous start
        step, path = (first_step or 1) - 1, self._workdir / "environment.json"
        self.note(
            step, start=self.start, time=time.time(), changed=[*changed], config=config or {},
            environment=here,
        )  # fmt: skip
        if not step or not path.exists():
            write_atomically(path, json.dumps(here, indent=2).encode() + b"\n")

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Append the record of a step to one of RECORDS; dict values are allowed."""
        record = jsonl.jsonable(record)
        append_jsonl(self._workdir / name, record)
        self._hooks.tell(RECORDS[name], record["step"], record)

    def note(self, step: int, **facts: Any) -> None:
        """Note in starts.jsonl what this start resumed, or how it ended, after `step`."""
        append_jsonl(self._workdir / STARTS, {"step": step, **facts})

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the transcripts sampled at `step`, a trajectory a line; earlier ones go."""
        lines = b"".join(jsonl.encode(row) for row in rows)
        write_atomically(self._workdir / "rollouts" / f"step-{step:06d}.jsonl", lines)


def note_failure(workdir: Path, _: Any, error: BaseException | None, *__: object) -> None:
    """Note in starts.jsonl the exception that ended a start, if any; for `ExitStack.push`."""
    if error:
        reason = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(UserError):  # the disk is full
            append_jsonl(workdir / STARTS, {"ended": reason, "error": words(error)})


def forget(workdir: str | os.PathLike, first_step: int) -> int:
    """Remove the records of `first_step` and later steps; return the number of unreadable lines."""
    workdir, unreadable = Path(workdir), 0
    for name in RECORDS:
        # The gate is passed again before `first_step`, with the weights of the step before.
        first = first_step - (name == "gate.jsonl")
        unreadable += jsonl.set_aside(workdir / name, first_step=first)
    for path in (workdir / "rollouts").glob("step-*.jsonl"):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) >= first_step:
            path.unlink()
    return unreadable
