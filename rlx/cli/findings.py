"""Rows of a table of checks: results with remedies, and how a terminal shows them."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from rlx.base import UserError
from rlx.cli.text import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Of levels, from good to bad.
STYLES = {"ok": "green", "absent": "bright_black", "warning": "yellow", "problem": "bold red"}
_WIDEST = 120  # characters of a table
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One row."""

    area: str  # section of the table, such as machine or config, or a host
    name: str  # subject of the check
    level: str  # ok | absent (not needed) | warning (slow, may fail) | problem (cannot work)
    result: str  # result, one sentence
    remedy: str = ""  # change to make; empty if none is needed


def advised(area: str, name: str, result: str, remedy: str = "") -> Finding:
    """Return a row that is a warning if it has a remedy, else ok."""
    return Finding(area, name, "warning" if remedy else "ok", result, remedy)


def attempt(
    area: str, name: str, function: Callable[[], _T], describe: Callable[[Any], str]
) -> tuple[Finding, _T | None]:
    """Call `function`; return the row of its outcome, and its value or None if it raises."""
    try:
        value = function()
    except Exception as error:
        return problem(area, name, error), None
    return Finding(area, name, "ok", describe(value)), value


def problem(area: str, name: str, error: Exception) -> Finding:
    """Return the row of a check that raised an error."""
    if isinstance(error, UserError):
        text, _, remedy = str(error).rpartition("; ")
        return Finding(area, name, "problem", text or remedy, remedy if text else "")
    words = " ".join(str(error).split())[:200]
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{PurePath(place.filename).name}:{place.lineno}"
    what = f"{type(error).__name__} in {where}: {words}"
    return Finding(area, name, "problem", what, "this is a bug of rlx; please report it")


def problems(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "problem"]


def status(findings: Iterable[Finding]) -> int:
    """Return the exit status: 1 if there is a problem, else 0."""
    return int(bool(problems(findings)))


def summary(findings: Iterable[Finding]) -> str:
    """Return `1 problem, 2 warnings, 14 ok`."""
    levels = [finding.level for finding in findings]
    counts = {level: levels.count(level) for level in ("problem", "warning")}
    parts = [f"{n} {level}{'s' * (n > 1)}" if n else f"no {level}" for level, n in counts.items()]
    return ", ".join([*parts, f"{levels.count('ok')} ok"])


def show(findings: Iterable[Finding], console: "Console | None" = None) -> list[Finding]:
    """Print findings section by section, then a summary; return them."""
    from rich.console import Console

    console = console or Console(highlight=False)
    every: list[Finding] = []
    for area, rows in groupby(findings, key=lambda finding: finding.area):
        every += section(area, rows, console)
    worst = next((x for x in ("problem", "warning") if any(f.level == x for f in every)), "ok")
    console.print(summary(every), style=None if _plain(console) else STYLES[worst], soft_wrap=True)
    return every


def section(area: str, findings: Iterable[Finding], console: "Console") -> list[Finding]:
    """Print one section, a table or a line for each finding as it comes; return the findings."""
    rows, shown = list[Finding](), list[Finding]()
    for finding in findings:
        rows.append(finding)
        shown.append(Finding(*map(plain, astuple(finding))))
        if _plain(console):
            console.print(line(shown[-1]), markup=False, soft_wrap=True)
    if not _plain(console):
        console.print(_section(plain(area), shown, min(console.width, _WIDEST)))
    return rows


def _plain(console: "Console") -> bool:
    return not console.is_terminal or console.is_dumb_terminal


def line(finding: Finding) -> str:
    """Return one greppable line: level, area, name, result, remedy."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:8}{finding.area}: {finding.name}: {finding.result}{remedy}"


def _section(area: str, rows: list[Finding], width: int) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.ROUNDED, show_header=False, title=Text(area, style="bold"), title_justify="left",
        width=width, border_style="bright_black", padding=(0, 1),
    )  # fmt: skip
    table.add_column(width=7, no_wrap=True)
    table.add_column(width=16)
    table.add_column(ratio=1)
    for finding in rows:
        style = STYLES[finding.level]
        quiet = style if finding.level == "absent" else ""
        text = Text(finding.result, style=quiet)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style=quiet or "cyan")
        name = Text(finding.name, style=quiet or "bold")
        table.add_row(Text(finding.level, style=style), name, text)
    return table
