"""Describe each key of a config: the comments in `rlx.config.default`, choices and ranges."""

import ast
import inspect
import textwrap

from rlx import config
from rlx.algorithms.algorithm import FIELDS
from rlx.cli.flags import leaves


def comments() -> dict[str, str]:
    """Return the comment of each key and each part (`model.path`, `model`) that `default` sets."""
    source = textwrap.dedent(inspect.getsource(config.default))
    tree, lines = ast.parse(source), source.splitlines()
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        first, last = lines[node.lineno - 1], lines[(end := node.end_lineno or node.lineno) - 1]
        words = [line.partition("  # ")[2] for line in dict.fromkeys((first, last))]
        for line in lines[end:]:
            if not line.strip().startswith("# "):
                break
            words.append(line.strip()[2:])
        name = ast.unparse(node.targets[0])
        owners = ("reward", "agents") if name.startswith("workers.") else ("",)
        for owner in owners:
            key = name.replace("workers", owner) if owner else name.removeprefix("c.")
            found[key] = " ".join(w for w in words if w and w != "fmt: skip")
    return found


def described() -> dict[str, str]:
    """Return each key → its default, what it may be, and what it is, in a line."""
    words, found = comments(), dict[str, str]()
    for key, default in leaves(config.default()):
        part, _, name = key.rpartition(".")
        said, choices = words.get(key, ""), config.CHOICES.get(key, ())
        may = "" if all(choice in said for choice in choices) else " | ".join(choices)
        if bound := config.RANGES.get(key):
            may = f"in {bound}" if ", " in bound else f"{bound} or more"
        if part == "algorithm" and name in FIELDS:
            field = FIELDS[name]
            default, said = field.default, field.metadata["doc"]
            low, high = field.metadata.get("range", ("", ""))
            may = " | ".join(field.metadata.get("choices", ())) or f"{low} … {high}".strip(" …")
        if not said.startswith("gone"):
            found[key] = f"{key}={default!r}  {f'({may})  ' * bool(may)}{said}"
    return found
