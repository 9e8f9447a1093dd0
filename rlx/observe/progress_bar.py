"""Show counted work as a bar with its remaining time, or as lines where there is no terminal."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich import progress
from rich.console import Console
from rich.progress import TextColumn

from rlx.cli.text import plain

_LINE_SECONDS = 10.0


class ProgressBar:
    """Shows `done` of `wanted` as rich's bar, or as a line every ten seconds.

    Args:
      stream: stderr by default, so that a table on stdout can be piped.
      clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = stream or sys.stderr
        self._clock, self._began, self._shown = clock, 0.0, float("-inf")
        self._what, self._task = "", progress.TaskID(0)
        self._bar = progress.Progress(
            TextColumn("{task.description}", markup=False), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), TextColumn("left"),
            progress.TimeRemainingColumn(), console=Console(file=self._stream),
            disable=not self._stream.isatty(),
        )  # fmt: skip

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, what: str, done: int, wanted: int) -> None:
        """Show that `done` of `wanted` are finished; a new `what` begins a new bar."""
        what, now = plain(what), self._clock()
        if what != self._what:
            self._what, self._began, self._shown = what, now, float("-inf")
            self._task = self._bar.add_task(what, total=wanted)
        self._bar.update(self._task, completed=done, total=wanted)
        if self._bar.disable and (done >= wanted or now - self._shown >= _LINE_SECONDS):
            self._shown, spent = now, now - self._began
            left = spent / done * (wanted - done) if done else 0.0
            times = f"  elapsed {spent:.0f} s  left {left:.0f} s" if done else ""
            print(f"{what}  {done:,}/{wanted:,}{times}", file=self._stream, flush=True)
