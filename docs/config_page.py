"""Make the reference of the config: every key with its default, values, unit and help.

All text comes from the declarations in `rlx.config.SECTIONS`.
"""

from dataclasses import Field

from rlx import config

UNITS = {
    "seconds": "s",
    "tokens": "tokens",
    "gb": "GB",
    "steps": "steps",
    "len": "tokens",
    "epochs": "epochs",
}
TYPES = {
    bool: "`True` \\| `False`",
    int: "whole number",
    float: "number",
    str: "text",
    tuple: "tuple",
}


def interval(text: str) -> str:
    """Return a range in a reader's form: `[0, 1)` → `0 … 1, 1 excluded`."""
    low, _, high = text.strip("()[]").partition(", ")
    if low == "-inf":
        return "number"
    if not high or high == "inf":
        return f"{'>' if text[0] == '(' else '≥'} {low}"
    excluded = [end for end, out in ((low, text[0] == "("), (high, text[-1] == ")")) if out]
    return f"{low} … {high}" + "".join(f", {end} excluded" for end in excluded)


def values(name: str, field: Field) -> str:
    """Return the allowed values of a key: its choices, its range or its type, and its unit."""
    given, kind = field.metadata["values"], type(field.default)
    if isinstance(given, tuple):
        return " \\| ".join(f"`{choice}`" if choice else '`""`' for choice in given)
    unit = UNITS.get(name.rpartition("_")[2], "") if kind in (int, float) else ""
    if given:
        return f"{interval(given)} {unit}".strip()
    return TYPES.get(kind, "object") + f", {unit}" * bool(unit)


def written(value: object) -> str:
    """Return a default in a flag's form."""
    if isinstance(value, tuple) and len(value) > 8:
        return f"`({value[0]}, …, {value[-1]})`"
    return f"`{value!r}`".replace("|", "\\|").replace("'", '"')


def page() -> str:
    """Return the page.

    Raises:
      ValueError: a key or section has no help; the message names it.
    """
    out = [HEAD]
    for section, (doc, fields) in config.SECTIONS.items():
        if section:
            out.append(f"\n## {section}\n\n{doc}\n")
        out.append("| key | default | values | what it is |\n|---|---|---|---|")
        for name, field in fields.items():
            words = field.metadata["doc"].replace("|", "\\|").replace("*", "\\*")
            if not words or (section and not doc):
                raise ValueError(f"{section}.{name} has no help; give it one where it is declared")
            cells = (f"`{name}`", written(field.default), values(name, field), words)
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


HEAD = """# Every key of the config

Each key is a flag of `python -m rlx.main`, for example `--config.rollout.max_staleness=0`. A file
in `configs/` starts from these defaults and changes some. This page is written from the
declarations in [rlx/config.py](../rlx/config.py), which checks choices and ranges before anything
starts.
"""
