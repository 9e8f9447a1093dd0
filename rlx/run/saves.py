"""Write what a run keeps: checkpoints, HF directories and its report, beside the steps that follow.

At most one checkpoint and one HF directory are under way. A full disk is told of and ends nothing:
the next save may find room.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlx.base import DiskFull, UserError
from rlx.config import default
from rlx.doctor import memory
from rlx.observe.run_report import write_report
from rlx.run.export import prune
from rlx.run.frequency import Position, due, every_of, to_host
from rlx.run.parts import Parts, disk_warning
from rlx.run.room_options import as_json, sizes_of
from rlx.train import checkpoint
from rlx.train.contract import State


class Saves:
    """Saves of one run, called from the thread of its loop.

    Attributes:
      step: of the last whole checkpoint. last: kind of `frequency.KINDS` → where it happened last.
      disk: the threads that write; whoever made this shuts them down.
    """

    def __init__(self, parts: Parts, step: int, phase: Callable[..., AbstractContextManager[None]]):
        """Take a run's parts and the step they begin at; `phase(name, step=…)` times a save."""
        self.step, self.last, self.disk = step, {**parts.last}, ThreadPoolExecutor(4, "disk")
        self._parts, self._phase, self._every = parts, phase, every_of(parts.config)
        self._checkpoint: list[Future] = []  # its files that are being written
        self._hf: Future | None = None

    def due(self, kind: str, now: Position) -> bool:
        """Return whether a checkpoint, eval or export is due now; it counts as made then."""
        every = self._every[kind]
        if kind == "checkpoint" and self._checkpoint:  # the clock alone waits for that one
            every = replace(every, seconds=0.0)
        if found := due(every, self.last[kind], now):
            self.last[kind] = now
        return found

    def save(self, state: State, now: Position) -> None:
        """Begin to save a checkpoint of everything, and the HF directory of a run.

        Raises:
          DiskFull: it would not fit.
        """
        parts, config = self._parts, self._parts.config
        self.end()
        with self._phase("checkpoint", step=now.step):
            self.last["checkpoint"] = now
            host, groups = parts.executor.state()
            finish = checkpoint.begin(
                parts.workdir / "checkpoints",
                now.step,
                partial(parts.update.save, state=state),
                parts.update.state_bytes,
                {
                    "step": now.step,
                    "elapsed_seconds": parts.elapsed(),
                    "positions": to_host(now, self.last),
                    "executor": host,
                    "config": as_json(config),
                    "model": parts.update.model.to_hf(),
                    "lora_base": parts.export.base.hex(),
                },
                groups,
                keep=config.checkpoint.keep,
                beside=memory.exported(sizes_of(config, parts.inputs.model_config)),
            )
            saved = self.disk.submit(self._write, finish)
            published = parts.export.save(parts.workdir, state, self.disk.submit, saved)
            self._checkpoint = [saved, *published]

    def end_if_written(self) -> None:
        """End the save under way where all its files are there."""
        if all(file.done() for file in self._checkpoint):
            self.end()

    def end(self) -> None:
        """Wait for the save under way, if there is one; then the run can be looked at."""
        if not self._checkpoint:
            return
        with self.told_if_full():
            self.end_or_fail()
            if text := disk_warning(self._parts.config, self._parts.workdir, self._parts.inputs):
                self._parts.progress.message(text)
        with suppress(OSError, UserError):  # a page must not end a run
            self.show()

    def end_or_fail(self) -> None:
        """Wait for the save under way, if there is one, and tell hooks of it; raise DiskFull."""
        if not self._checkpoint:
            return
        files, self._checkpoint = self._checkpoint, []
        with self._phase("checkpoint"):
            futures.wait(files)  # where one fails, the others end before the next save begins
            directory, *_ = [file.result() for file in files]
        self.step = checkpoint.step_of(directory)
        self._parts.hooks.tell("on_checkpoint", self.step, directory)

    def export(self, state: State, now: Position) -> None:
        """Begin to write an HF directory that stays, named by the position."""
        self.end_export()
        with self._phase("export", step=now.step):
            path = self._parts.workdir / "exports" / now.name
            self._hf = self._parts.export.write(path, state, self.disk.submit)

    def end_export(self) -> None:
        """Wait for the export under way, if there is one."""
        under_way, self._hf = self._hf, None
        with self.told_if_full():
            if under_way:
                under_way.result()
                prune(self._parts.workdir / "exports", self._parts.config.export.keep)

    def show(self) -> Path | None:
        """Write the timeline and the report of the steps there are; return the report's path."""
        self._parts.timeline.save(self._parts.workdir / "timeline.json")
        there = (self._parts.workdir / "metrics.jsonl").exists()
        return write_report(self._parts.workdir, default().to_dict()) if there else None

    @contextmanager
    def told_if_full(self) -> Iterator[None]:
        """Tell of a disk that is full, and go on."""
        try:
            yield
        except DiskFull as error:
            self._parts.progress.message(f"{error}; training goes on until the next is due")

    def _write(self, finish: Callable[[], Path]) -> Path:
        """Write a checkpoint, in a thread; return its directory."""
        with self._parts.timeline.span("trainer", "save", track="disk"):
            return finish()
