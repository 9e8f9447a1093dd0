"""Rows of the doctor's table: the result of a check, and its remedy."""

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
    """One row."""

    area: str  # section of the table: packages | machine | model | data | config | memory
    name: str  # subject of the check
    level: str  # ok | absent (not needed) | warning (slow, may fail) | problem (cannot work)
    found: str  # result, one sentence
    remedy: str = ""  # change to make; empty if none is needed

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is not one of {', '.join(LEVELS)}")


def advised(area: str, name: str, found: str, remedy: str = "") -> Finding:
    """Return a row that is a warning if it has a remedy, else ok."""
    return Finding(area, name, "warning" if remedy else "ok", found, remedy)


def attempt(
    area: str, name: str, function: Callable[[], _T], found: Callable[[Any], str]
) -> tuple[Finding, _T | None]:
    """Call `function`; return the row of its outcome, and its value or None if it raises."""
    try:
        value = function()
    except Exception as error:
        return problem(area, name, error), None
    return Finding(area, name, "ok", found(value)), value


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
