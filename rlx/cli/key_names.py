"""Suggest a config key for an unknown name, by other packages' names or the nearest of ours.

docs/coming_from.md, which comes with rlx, is the table of those names.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from rlx.base import UserError, nearest, unknown


def configs_home() -> Path:
    """Return the directory that comes with rlx and has `configs/`: of a wheel, else of a clone."""
    wheel = Path(__file__).parents[1] / "embedded"
    return wheel if wheel.is_dir() else wheel.parents[1]


def elsewhere(known: Iterable[str]) -> dict[str, str]:
    """Return other packages' names → a key of `known`, or `--flag`, by the page's tables.

    A name with dots is there by its last part too, where no key ends so. The first row counts.
    """
    keys, names, prefix = set(known), dict[str, str](), ""
    ends = {key.rpartition(".")[2] for key in keys}
    page = configs_home() / "docs/coming_from.md"
    for line in page.read_text(encoding="utf-8").splitlines() if page.exists() else ():
        first, *cells = line.strip("|").split(" | ") if line.startswith("| ") else ("", "")
        if first.strip().startswith("rlx"):  # a heading, perhaps with the section of its keys
            prefix = "".join(_codes(first))
        row_keys = [key if key[:2] == "--" else prefix + key for key in _codes(first)]
        valid = [key for key in row_keys if key.partition("=")[0] in keys or key[:2] == "--"]
        valid = [key for key in valid if "=" not in key] or [key.split("=")[0] for key in valid]
        for cell in cells if valid else ():
            foreign = _codes(cell.partition(": `")[0])  # without the values that may follow
            for n, name in enumerate(code.partition("=")[0] for code in foreign):
                for alias in {name, *{name.rpartition(".")[2]} - ends}:
                    names.setdefault(alias, valid[min(n, len(valid) - 1)])
    return names


def _codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Return the key or `--flag` that a misspelt, short or foreign name stands for; "" for none."""
    name, keys = name.replace("-", "_").lower(), sorted(known)
    names, (section, _, last) = elsewhere(keys), name.rpartition(".")
    siblings = {k.removeprefix(f"{section}."): k for k in keys if k.startswith(f"{section}.")}
    ends = [key.rpartition(".")[2] for key in keys]
    alone = {end: key for end, key in zip(ends, keys, strict=True) if ends.count(end) == 1}
    if name in keys or name in names:
        return name if name in keys else names[name]
    sections = {key.rpartition(".")[0] for key in keys}
    if section and not siblings and (near := nearest(section, sections)):
        return nearest_key(f"{near}.{last}", keys)
    choices = siblings if section else names | alone
    near = nearest(last, choices)
    return choices[near] if near else names.get(last, alone.get(last, ""))


def unknown_key(name: str, known: Iterable[str]) -> UserError:
    """Return the error for a key that is none of `known`, with the one that was meant."""
    if key := nearest_key(name, keys := list(known)):
        return UserError(f"unknown config key {name!r}; did you mean {key!r}?")
    return unknown("config key", name, keys)
