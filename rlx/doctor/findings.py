"""Rows of the doctor's table: what a check found, and what to change."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

from rlx.base import UserError

LEVELS = ("ok", "absent", "warning", "problem")  # from good to bad
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One row.

    Attributes:
      area: the table's section: packages | machine | model | data | config | memory.
      name: what was looked at.
      level: ok | absent (not there and not needed) | warning (it may be slow or fail) | problem (a
        run cannot work).
      found: in words.
      remedy: what to change; empty where nothing has to be.
    """

    area: str
    name: str
    level: str
    found: str
    remedy: str = ""

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is not one of {', '.join(LEVELS)}")


def attempt(
    area: str, name: str, function: Callable[[], _T], found: Callable[[Any], str]
) -> tuple[Finding, _T | None]:
    """Call `function`; return the row of its outcome, and its value or None where it raises."""
    try:
        value = function()
    except Exception as error:
        return problem(area, name, error), None
    return Finding(area, name, "ok", found(value)), value


def problem(area: str, name: str, error: Exception) -> Finding:
    """Return the row of a check that raised an error.

    A UserError says what to change. The row of another error has the line that raised it, so that
    the other rows are shown all the same.
    """
    if isinstance(error, UserError):
        text, _, remedy = str(error).rpartition("; ")
        return Finding(area, name, "problem", text or remedy, remedy if text else "")
    words = " ".join(str(error).split())[:200]
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{PurePath(place.filename).name}:{place.lineno}"
    what = f"{type(error).__name__} in {where}: {words}"
    return Finding(area, name, "problem", what, "not foreseen: tell those who make rlx")


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with which a run cannot work."""
    return [finding for finding in findings if finding.level == "problem"]


def status(findings: Iterable[Finding]) -> int:
    """Return the exit status: 0 without a problem, 1 with one."""
    return int(bool(problems(findings)))


def summary(findings: Iterable[Finding]) -> str:
    """Return `1 problem, 2 warnings, 14 ok`."""
    levels = [finding.level for finding in findings]
    counts = {level: levels.count(level) for level in ("problem", "warning")}
    parts = [f"{n} {level}{'s' * (n > 1)}" if n else f"no {level}" for level, n in counts.items()]
    return ", ".join([*parts, f"{levels.count('ok')} ok"])
