"""Show a run as a live panel, counted work as a bar, or lines where there is no terminal.

Messages scroll above the panel, in a notebook below it.
"""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich import box, progress, progress_bar
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlx.cli.text import divide_cells, duration, number, plain, sparkline
from rlx.cli.user_code import words
from rlx.observe.charts import mean
from rlx.observe.metrics import HELD_OUT, TRAINED, present

PHASE_COLORS = {
    "wait": "yellow", "train": "green", "publish": "magenta", "pack": "cyan", "proximal": "blue",
    "checkpoint": "red", "eval": "bright_blue", "gate": "bright_cyan",
}  # fmt: skip
_PHASE_STYLES = {
    "finished": "bold green", "stopped": "bold red", "interrupted": "bold yellow",
    "failed": "bold red", "unknown": "bold yellow",
}  # fmt: skip
_PAPER = "<pre style=\"line-height:normal;font-family:'DejaVu Sans Mono',monospace\">{code}</pre>"
_RECENT = 20  # steps whose mean gives the remaining time
_LINE_SECONDS = 10.0


class Progress:
    """Shows a run's progress; a context manager. Safe to call from any thread."""

    def __init__(
        self, total_steps: int, console: Console | None = None, *,
        title: str = "",  # name of the run
        clock: Callable[[], float] = time.monotonic,  # seconds
        log: Path | None = None,  # file that gets each message too, with its time
    ):  # fmt: skip
        self._log, self._total = log, total_steps
        self._console = console or Console(highlight=False)
        self._live: Live | _NotebookPanel | None = None
        if self._console.is_jupyter:  # rich would make a display of each line
            self._console = Console(force_jupyter=False, force_terminal=False, width=100)
            self._live = _NotebookPanel(self._render)
        self._title, self._clock, self._lock = plain(title), clock, threading.RLock()
        self._history: list[Mapping[str, Any]] = []
        self._evals: list[Mapping[str, Any]] = []
        self._updated, self.begin = clock(), dict[str, Any]()  # of a resumed run, its last step
        self._phase = ("starting", self._updated)
        unicode = (self._console.encoding or "").lower().startswith("utf")
        self._panel = self._console.is_terminal and unicode and not self._console.is_dumb_terminal

    def __enter__(self) -> "Progress":
        if self._panel:
            self._live = Live(get_renderable=self._render, console=self._console)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error:
            self._keep(f"ended by {words(error)}")
        done = self._history and self._history[-1]["step"] >= self._total
        stopped = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"
        self.phase("finished" if done else stopped)
        if self._live:
            self._live.stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the record of a finished step, as written to metrics.jsonl."""
        with self._lock:
            self._history.append(record)
            self._updated = self._clock()
        self._show(self._step_line(record))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show the record of a held-out evaluation, as written to eval.jsonl."""
        with self._lock:
            self._evals.append(record)
        self._show(self._evaluation_line(record))

    def phase(self, name: str) -> None:
        """Set the trainer's phase."""
        with self._lock:
            self._phase = (name, self._clock())

    def doing(self) -> tuple[int, str, float]:
        """Return the last finished step, the phase, and its seconds."""
        with self._lock:
            name, since = self._phase
            step = self._history[-1].get("step", 0) if self._history else 0
            return step, name, self._clock() - since

    def age(self) -> float:
        """Return the seconds since the last finished step, or since the start."""
        return self._clock() - self._updated

    def panel(self, metrics: list, evals: list, phase: str, seconds: float, age: float) -> Panel:
        """Return the panel of another process's run, by its records, the last `age` seconds old."""
        now = self._clock()
        self._history, self._evals, self._updated = metrics, evals, now - age
        self._phase = (phase, now - seconds)
        return self._render()

    def message(self, text: str) -> None:
        """Print `text`, never as markup, above the panel."""
        self._keep(text)
        self._line(text)

    def _keep(self, text: str) -> None:
        if self._log:
            with contextlib.suppress(OSError), open(self._log, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain(text)}\n")

    def _show(self, line: str) -> None:
        if self._live:
            self._live.refresh()
        else:
            self._line(line)

    def _line(self, text: str) -> None:
        self._console.print(Text(plain(text)), soft_wrap=True)

    def _remaining(self) -> float | None:
        """Return the seconds to the last step at the recent pace; None before the second step."""
        typical = mean([r.get("step_seconds") for r in self._history[1:][-_RECENT:]])
        if typical is None:
            return None
        left = self._total - self._history[-1]["step"]
        return max(0.0, left * typical - min(self.age(), typical))  # a run may hang, or have ended

    def _elapsed(self) -> float:
        last = (self._history or [self.begin])[-1].get("elapsed_seconds")
        running = self._phase[0] not in _PHASE_STYLES
        return (last or 0.0) + (self.age() if running or not last else 0.0)

    def _step_line(self, record: Mapping[str, Any]) -> str:
        """Return one greppable line: each field is its name, a space, its value."""
        seconds = sorted(record.get("seconds", {}).items(), key=lambda item: -(item[1] or 0))
        phases = ", ".join(f"{name} {number(value)}" for name, value in seconds[:4])
        sampled = "staleness_mean" in record  # absent where no policy sampled what was trained on
        most, generated = number(record.get("staleness_max")), "generated_tokens_per_second"
        last = self._evals[-1] if self._evals else {}
        held_out = [  # `held-out 0.345`, losses as `held-out-loss 0.0412`
            f"held-out{'' if key == 'greedy_acc' else f'-{name}'} {number(last[key])}"
            for key, name in present(HELD_OUT, [last]).items()
        ]
        fields = [
            f"step {record['step']}/{self._total}",
            f"epoch {record.get('epoch', 0)}",
            *(f"{name} {number(record[k])}" for k, name in present(TRAINED, [record]).items()),
            *held_out,
            *([f"staleness {number(record['staleness_mean'])} (max {most})"] if sampled else []),
            f"tokens {number(record.get('n_tokens'))}",
            *([f"generated/s {number(record[generated])}"] if generated in record else []),
            f"trained/s {number(record.get('consumed_tokens_per_second'))}",
            *([f"mfu {number(record['mfu'])}"] if "mfu" in record else []),
            f"seconds {number(record.get('step_seconds'))}" + (f" ({phases})" if phases else ""),
            *(f"{name} {record.get(name, 0)}" for name in ("failed", "skipped", "dropped")),
            f"elapsed {duration(record.get('elapsed_seconds'))}",
            f"left {duration(self._remaining())}",
        ]
        return "  ".join(fields)

    def _evaluation_line(self, record: Mapping[str, Any]) -> str:
        further = [key for key in record if key.endswith("_acc") and key not in HELD_OUT]
        scores = [*present(HELD_OUT, [record]), *further]
        fields = [
            f"eval {record.get('step', 0)}/{self._total}",
            *(f"{key} {number(record[key])}" for key in scores),
            f"questions {number(record.get('num_questions'))}",
            *([f"failed {record['failed']}"] if record.get("failed") else []),
            f"version {record.get('version', '–')}",
            f"seconds {number(record.get('seconds'))}",
        ]
        return "  ".join(fields)

    def _render(self) -> Panel:
        width = min(self._console.width, 120)
        with self._lock:
            rows = self._rows(max(width - 4, 20) - 11)
            parts = self._head()
            name, since = self._phase
            elapsed = "" if name in _PHASE_STYLES else duration(self._clock() - since)
        if rows:
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True, min_width=9)
            grid.add_column(no_wrap=True, overflow="ellipsis")
            for label, value in rows:
                grid.add_row(Text(label, style="dim"), value)
            parts += [Text(), grid]
        title = Text.assemble(("rlx", "bold"), f" · {self._title}" if self._title else "")
        state = Text(f"{name} {elapsed}".strip(), style=_PHASE_STYLES.get(name, "cyan"))
        return Panel(
            Group(*parts), box=box.ROUNDED, width=width, border_style="bright_black",
            title=title, title_align="left", subtitle=state, subtitle_align="right",
        )  # fmt: skip

    def _head(self) -> list[Any]:
        last = (self._history or [self.begin])[-1]
        step = last.get("step", 0)
        bar = Table.grid(padding=(0, 1, 0, 0), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        styles: Any = {"complete_style": "cyan", "finished_style": "green"}
        share = f"{100 * step / max(self._total, 1):.0f}%"
        bar.add_row(
            Text(f"step {step}/{self._total}", style="bold"),
            progress_bar.ProgressBar(self._total, step, **styles), Text(share, style="bold"),
        )  # fmt: skip
        times = f"elapsed {duration(self._elapsed())}"
        if step < self._total:
            times += f" · left {duration(self._remaining())}"
        about = f"epoch {last.get('epoch', 0)} · version {last.get('version', 0)}"
        if last.get("step_seconds") is not None and self._console.width >= 66:
            about += f" · {duration(last['step_seconds'])}/step"
        line = Table.grid(expand=True)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, justify="right")
        line.add_row(Text(about, style="dim"), Text(times))
        return [bar, line]

    def _rows(self, width: int) -> list[tuple[str, Text]]:
        """Return label and value of each line of the panel; `width` cells for the value."""
        rows = []
        for key, name in present(TRAINED, self._history).items():
            rows.append((name, _trend(self._history, key, "green", width)))
        for key, name in present(HELD_OUT, self._evals).items():
            note = f"{name}, step {self._evals[-1].get('step', 0)}"
            rows.append(("held-out", _trend(self._evals, key, "cyan", width, note)))
        if not self._history:
            return rows
        last = self._history[-1]
        column = 19 if width >= 60 else 12
        lags = {"staleness_mean": "mean", "staleness_max": "max", "behaviour_kl": "KL"}
        if staleness := _facts(last, lags, column):
            rows.append(("staleness", staleness))
        rates = (("generated", "generated"), ("consumed", "trained"))
        speeds = {f"{key}_tokens_per_second": name for key, name in rates}
        rows.append(("tokens/s", _facts(last, {**speeds, "mfu": "MFU"}, column)))
        if last.get("seconds"):
            rows.append(("a step", _phase_bar(last["seconds"], width)))
        states = ("accepted", "rejected", "failed", "skipped", "dropped")
        names = {"running": "live", **{name: name for name in states}}
        rows.append(("prompts", _facts(last, names, column=1)))
        return rows


class ProgressBar:
    """Shows `done` of `total` as rich's bar, or as a line every ten seconds."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = stream or sys.stderr  # so that a table on stdout can be piped
        self._clock, self._began, self._shown = clock, 0.0, float("-inf")
        self._what, self._task = "", progress.TaskID(0)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeElapsedColumn(),
            progress.TextColumn("left"), progress.TimeRemainingColumn(),
            console=Console(file=self._stream), disable=not self._stream.isatty(),
        )  # fmt: skip

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are finished; a new `what` begins a new bar."""
        what, now = plain(what), self._clock()
        if what != self._what:
            self._what, self._began, self._shown = what, now, float("-inf")
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, completed=done, total=total)
        if self._bar.disable and (done >= total or now - self._shown >= _LINE_SECONDS):
            self._shown, elapsed = now, now - self._began
            left = elapsed / done * (total - done) if done else 0.0
            times = f"  elapsed {elapsed:.0f} s  left {left:.0f} s" if done else ""
            print(f"{what}  {done:,}/{total:,}{times}", file=self._stream, flush=True)


class _NotebookPanel:
    """Shows the panel in the output of a notebook's cell, as rich's `Live` in a terminal."""

    def __init__(self, render: Callable[[], Panel]):
        self._render, self._handle = render, None

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(self, display_id=True)

    def refresh(self) -> None:
        if self._handle:
            self._handle.update(self)

    stop = refresh

    def _repr_html_(self) -> str:
        paper = Console(record=True, file=io.StringIO(), width=120, force_jupyter=False)
        paper.print(self._render())
        return paper.export_html(inline_styles=True, code_format=_PAPER)


def _trend(records: list[Any], key: str, color: str, width: int, note: str = "") -> Text:
    """Return the last value of a metric, which a record has, and a sparkline of all."""
    values = [record.get(key) for record in records]
    line = Text.assemble((f"{number(values[-1]):<6}", f"bold {color}"), "  ")
    room = width - 8 - (len(note) + 2 if note else 0)
    line.append(sparkline(values, room), style=color)
    if note and room > 0:
        line.append(f"  {note}", style="dim")
    return line


def _facts(record: Mapping[str, Any], names: Mapping[str, str], column: int) -> Text:
    """Return numbers in columns, each followed by its name."""
    line = Text()
    for key, name in names.items():
        if record.get(key) is not None:
            bad = name in ("failed", "skipped", "dropped") and record[key]
            line.append(number(record[key]), style="bold red" if bad else "bold")
            line.append(f" {name}", style="dim")
            line.append(" " * max(2, column - line.cell_len % column))
    line.rstrip()
    return line


def _phase_bar(seconds: Mapping[str, float | None], width: int) -> Text:
    """Return a bar of the step's phases, longest first, and its legend."""
    phases = sorted(((v or 0.0, k) for k, v in seconds.items()), reverse=True)
    counts = divide_cells([value for value, _ in phases], max(8, min(28, width - 46)))
    line = Text()
    for (_, name), count in zip(phases, counts, strict=True):
        line.append("▅" * count, style=PHASE_COLORS.get(name, "white"))
    for value, name in phases:
        entry = f"{name} {duration(value)}"
        if line.cell_len + len(entry) + 2 > width:
            break
        line.append("  ").append(name, style=PHASE_COLORS.get(name, "white"))
        line.append(f" {duration(value)}", style="dim")
    return line
