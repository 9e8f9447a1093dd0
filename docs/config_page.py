"""Makes the reference of the config: every key with its default, range, unit and words.

Words are the comments in `rlx.config.default`, choices and ranges those that `rlx.config.check`
goes by, and keys of `config.algorithm` the fields of `Algorithm`. A key without words is an error.
"""

from ml_collections import ConfigDict

from rlx import config
from rlx.algorithms.algorithm import FIELDS
from rlx.cli.key_words import comments
from rlx.train.optimizer_options import OPTIMIZERS

UNITS = {
    "seconds": "s",
    "tokens": "tokens",
    "gb": "GB",
    "steps": "steps",
    "len": "tokens",
    "epochs": "epochs",
}
OF_OPTIMIZER = {  # what OptimizerOptions takes
    "name": " \\| ".join(f"`{name}`" for name in OPTIMIZERS),
    **dict.fromkeys(("b1", "b2"), "0 … 1, 1 excluded"),
    **dict.fromkeys(("learning_rate", "warmup_steps", "eps", "weight_decay", "clip_norm"), "≥ 0"),
}
TYPES = {
    bool: "`True` \\| `False`",
    int: "whole number",
    float: "number",
    str: "text",
    tuple: "tuple",
}


def interval(text: str) -> str:
    """Return a range of RANGES in words: `[0, 1)` → `0 … 1, 1 excluded`."""
    low, _, high = text.strip("()[]").partition(", ")
    if not high or high == "inf":
        return f"{'>' if text[0] == '(' else '≥'} {low}"
    excluded = [end for end, out in ((low, text[0] == "("), (high, text[-1] == ")")) if out]
    return f"{low} … {high}" + "".join(f", {end} excluded" for end in excluded)


def values(key: str, default: object) -> str:
    """Return what a key may be: its choices, its range or its type, and its unit."""
    part, _, name = key.rpartition(".")
    if key in config.CHOICES:
        return " \\| ".join(f"`{choice}`" if choice else '`""`' for choice in config.CHOICES[key])
    if part == "optimizer" and name in OF_OPTIMIZER:
        return OF_OPTIMIZER[name]
    known = (
        interval(config.RANGES[key]) if key in config.RANGES else TYPES.get(type(default), "object")
    )
    unit = UNITS.get(name.rpartition("_")[2], "") if type(default) in (int, float) else ""
    return f"{known} {unit}".strip() if key in config.RANGES else known + f", {unit}" * bool(unit)


def written(value: object) -> str:
    """Return a default as a flag would give it."""
    if isinstance(value, tuple) and len(value) > 8:
        return f"`({value[0]}, …, {value[-1]})`"
    return f"`{value!r}`".replace("|", "\\|").replace("'", '"')


def fields() -> list[str]:
    """Return the rows of `config.algorithm` but its preset."""
    rows = []
    for name, field in FIELDS.items():
        low, high = field.metadata.get("range", (None, None))
        number = (
            f"{low:g} … {high:g}".replace("inf", "∞").replace("-∞ … ∞", "number")
            if low is not None
            else "text"
        )
        chosen = " \\| ".join(f"`{choice}`" for choice in field.metadata.get("choices", ()))
        kind = TYPES[bool] if field.type in (bool, "bool") else chosen or number
        words = field.metadata["doc"].replace("|", "\\|")
        rows.append(f"| `{name}` | {written(field.default)} | {kind} | {words} |")
    return rows


def page() -> str:
    """Return the page.

    Raises:
      ValueError: a key or part has no comment; it is named.
    """
    words = comments()
    out, order = [HEAD], list(words)  # as the source has them; a ConfigDict is sorted

    def part(tree: ConfigDict, prefix: str) -> None:
        def place(key: str) -> int:
            return order.index(prefix + key) if prefix + key in words else len(order)

        keys = sorted((k for k in tree if not isinstance(tree[k], ConfigDict)), key=place)
        if prefix:
            out.append(f"\n## {prefix[:-1]}\n\n{sentence(described(words, prefix[:-1]))}\n")
        out.append("| key | default | values | what it is |\n|---|---|---|---|")
        for key in keys:
            name = prefix + key
            if (prefix == "algorithm." and key != "preset") or words.get(name, "").startswith(
                "gone"
            ):
                continue
            cells = [f"`{key}`", written(tree[key]), values(name, tree[key]),
                     described(words, name).replace("|", "\\|").replace("*", "\\*")]  # fmt: skip
            out.append(f"| {' | '.join(cells)} |")
        if prefix == "algorithm.":
            out.extend(fields())
        for key in sorted((k for k in tree if isinstance(tree[k], ConfigDict)), key=place):
            part(tree[key], f"{prefix}{key}.")

    part(config.default(), "")
    return "\n".join(out) + "\n"


def described(words: dict[str, str], key: str) -> str:
    """Return the words of a key."""
    if not words.get(key):
        raise ValueError(f"rlx/config.py says nothing of {key}; give it a comment in default()")
    return words[key]


def sentence(words: str) -> str:
    """Return a part's comment as a sentence."""
    first = words.split()[0]
    start = f"`{first.rstrip(':')}`:" if "=" in first else first[0].upper() + first[1:]
    return start + words[len(first) :] + "." * (words[-1] != ".")


HEAD = """# Every key of the config

Each is a flag of `python -m rlx.main`: `--config.rollout.max_staleness=0`. A file in `configs/`
starts from these defaults and sets what differs. This page is made from
[rlx/config.py](../rlx/config.py), which checks the values before anything starts: choices and
ranges below are those that it goes by; what depends on several keys it says in one line.
"""
