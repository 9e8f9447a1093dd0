"""A bar for work that is counted: what, how much of it, how long still. Lines where no terminal."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rlx.cli.text import plain

_LINE_SECONDS = 10.0


class Counting:
    """`show(what, done, wanted)` as a bar that redraws itself, or a line every ten seconds.

    Args:
      stream: where to; stderr by default, so that a table on stdout can be piped.
      clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = stream or sys.stderr
        self._clock, self._began, self._shown = clock, 0.0, float("-inf")
        self._what, self._bar, self._task = "", None, None
        if self._stream.isatty():
            self._bar = _bar(self._stream)

    def __enter__(self) -> "Counting":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, what: str, done: int, wanted: int) -> None:
        """`done` of `wanted` are finished; a new `what` begins a new bar."""
        what = plain(what)
        if what != self._what:
            self._what, self._began, self._shown = what, self._clock(), float("-inf")
            if self._bar:
                self._task = self._bar.add_task(what, total=wanted)
        if self._bar:
            self._bar.update(self._task, completed=done, total=wanted)
            return
        now = self._clock()
        if done < wanted and now - self._shown < _LINE_SECONDS:
            return
        self._shown = now
        print(f"{what}  {done:,}/{wanted:,}{self._left(now, done, wanted)}", file=self._stream,
              flush=True)  # fmt: skip

    def _left(self, now: float, done: int, wanted: int) -> str:
        spent = now - self._began
        if not done:
            return ""
        return f"  elapsed {spent:.0f} s  left {spent / done * (wanted - done):.0f} s"


def _bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
