"""Write checkpoints, HF directories and the report of a run in the background.

At most one checkpoint and one HF directory are written at a time. A full disk is reported and does
not end the run: the next save may fit.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from rlx.base import DiskFull, UserError
from rlx.config import default
from rlx.doctor import memory
from rlx.observe.run_report import write_report
from rlx.run.export import prune
from rlx.run.frequency import Position, due, to_host
from rlx.run.parts import Parts, disk_warning
from rlx.run.room_options import as_json
from rlx.train import checkpoint
from rlx.train.contract import State


class Saves:
    """Saves of one run, called from the thread of its loop."""

    def __init__(self, parts: Parts, step: int, phase: Callable[..., AbstractContextManager[None]]):
        """Take a run's parts and first step; `phase(name, step=…)` times a save."""
        # Of the last complete checkpoint, and of the last of each kind; the owner ends `disk`.
        self.step, self.last, self.disk = step, {**parts.last}, ThreadPoolExecutor(4, "disk")
        self._parts, self._phase = parts, phase
        self._checkpoint: list[Future] = []  # files being written
        self._exporting: Future | None = None
        self._exported = self.last["export"]  # of the last whole one, which a checkpoint names

    def due(self, kind: str, now: Position) -> bool:
        """Return whether a checkpoint, eval or export is due now, and count it as done."""
        clock = kind != "checkpoint" or not self._checkpoint  # it waits for the current save
        if is_due := due(self._parts.config[kind], self.last[kind], now, clock):
            self.last[kind] = now
        return is_due

    def save(self, state: State, now: Position) -> None:
        """Begin to save a checkpoint and its HF directory; raise DiskFull if they cannot fit."""
        parts, config = self._parts, self._parts.config
        self.end()
        with self._phase("checkpoint", step=now.step):
            self.last["checkpoint"] = now
            if not self._exporting or self._exporting.done():
                self._exported = self.last["export"]
            host = {
                "step": now.step, "elapsed_seconds": parts.elapsed(),
                "positions": to_host(now, {**self.last, "export": self._exported}),
                "executor": parts.executor.state(), "config": as_json(config),
                "model": parts.update.model.to_hf(), "lora_base": parts.export.base_digest.hex(),
            }  # fmt: skip
            finish = checkpoint.begin(
                parts.workdir / "checkpoints", now.step, partial(parts.update.save, state=state),
                parts.update.state_bytes, host, keep=config.checkpoint.keep,
                beside=memory.exported(parts.sizes),
            )  # fmt: skip
            saved = self.disk.submit(self._write, finish)
            published = parts.export.save(parts.workdir, state, self.disk.submit, saved)
            self._checkpoint = [saved, *published]

    def end_if_written(self) -> None:
        """End the current save if all its files are written."""
        if all(file.done() for file in self._checkpoint):
            self.end()

    def end(self) -> None:
        """Wait for the current save, if any; then write the report."""
        if not self._checkpoint:
            return
        with self.report_full_disk():
            self.end_or_fail()
            if text := disk_warning(self._parts.sizes, self._parts.workdir):
                self._parts.progress.message(text)
        with suppress(OSError, UserError):  # a failed report must not end the run
            self.show()

    def end_or_fail(self) -> None:
        """Wait for the current save, if any, and call hooks; raise DiskFull if it failed so."""
        if not self._checkpoint:
            return
        files, self._checkpoint = self._checkpoint, []
        with self._phase("checkpoint"):
            wait(files)  # even after a failure, all end before the next save
            directory, sums, *_ = [file.result() for file in files]
        self.step = checkpoint.step_of(directory)
        weights = {"version": self.step, "sums": sums, "adapters": False}
        self._parts.journal.append("weights", weights)
        self._parts.hooks.tell("on_checkpoint", self.step, directory)

    def export(self, state: State, now: Position) -> None:
        """Begin to write a permanent HF directory, named after the position."""
        self.end_export()
        with self._phase("export", step=now.step):
            path = self._parts.workdir / "exports" / now.name
            self._exporting = self._parts.export.write(path, state, self.disk.submit)

    def end_export(self) -> None:
        """Wait for the current export, if any."""
        under_way, self._exporting = self._exporting, None
        with self.report_full_disk():
            if under_way:
                under_way.result()
                prune(self._parts.workdir / "exports", self._parts.config.export.keep)

    def show(self) -> Path | None:
        """Write the timeline and the report; return the report's path."""
        self._parts.timeline.save(self._parts.workdir / "timeline.json")
        has_metrics = (self._parts.workdir / "metrics.jsonl").exists()
        return write_report(self._parts.workdir, default().to_dict()) if has_metrics else None

    @contextmanager
    def report_full_disk(self) -> Iterator[None]:
        """Report a full disk instead of raising DiskFull."""
        try:
            yield
        except DiskFull as error:
            self._parts.progress.message(f"{error}; training continues until the next save")

    def _write(self, finish: Callable[[], Path]) -> Path:
        with self._parts.timeline.span("trainer", "save", track="disk"):
            return finish()
