"""Show findings: tables in a terminal, one plain line each elsewhere."""

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
    """Print findings as they come, a section at a time, and their summary; return them."""
    from rich.console import Console

    console = console or Console(highlight=False)
    every: list[Finding] = []
    plain = _plain(console)
    for area, rows in groupby(findings, key=lambda finding: finding.area):
        section(area, _kept(rows, every), console)
    worst = next((x for x in ("problem", "warning") if any(f.level == x for f in every)), "ok")
    console.print(summary(every), style=None if plain else STYLES[worst], soft_wrap=True)
    return every


def section(area: str, findings: Iterable[Finding], console: "Console") -> None:
    """Print one section: a table once it is complete, or each line as soon as it is found."""
    findings = (Finding(*map(plain, dataclasses.astuple(finding))) for finding in findings)
    if _plain(console):
        for finding in findings:
            console.print(line(finding), markup=False, soft_wrap=True)
    else:
        console.print(_section(plain(area), list(findings), min(console.width, _WIDEST)))


def _kept(findings: Iterable[Finding], every: list[Finding]) -> Iterator[Finding]:
    for finding in findings:
        every.append(finding)
        yield finding


def _plain(console: "Console") -> bool:
    return not console.is_terminal or console.is_dumb_terminal


def line(finding: Finding) -> str:
    """Return one greppable line: level, area and name, what was found, what to change."""
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
                      Text("\n").join(_words(finding, quiet)))  # fmt: skip
    return table


def _words(finding: Finding, style: str) -> Iterator["Text"]:
    from rich.text import Text

    yield Text(finding.found, style=style)
    if finding.remedy:
        yield Text(f"→ {finding.remedy}", style=style or "cyan")
