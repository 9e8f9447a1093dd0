"""Print findings: as tables in a terminal, else one line each."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rlx.cli.text import plain
from rlx.doctor.findings import Finding, summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

STYLES = {"ok": "green", "absent": "bright_black", "warning": "yellow", "problem": "bold red"}
_WIDEST = 120


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
    found, shown = list[Finding](), list[Finding]()
    for finding in findings:
        found.append(finding)
        shown.append(Finding(*map(plain, dataclasses.astuple(finding))))
        if _plain(console):
            console.print(line(shown[-1]), markup=False, soft_wrap=True)
    if not _plain(console):
        console.print(_section(plain(area), shown, min(console.width, _WIDEST)))
    return found


def _plain(console: "Console") -> bool:
    return not console.is_terminal or console.is_dumb_terminal


def line(finding: Finding) -> str:
    """Return one greppable line: level, area, name, result, remedy."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:8}{finding.area}: {finding.name}: {finding.found}{remedy}"


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
        table.add_row(Text(finding.level, style=style), Text(finding.name, style=quiet or "bold"),
                      Text("\n").join(_found(finding, quiet)))  # fmt: skip
    return table


def _found(finding: Finding, style: str) -> Iterator["Text"]:
    from rich.text import Text

    yield Text(finding.found, style=style)
    if finding.remedy:
        yield Text(f"→ {finding.remedy}", style=style or "cyan")
