"""Read addresses of environments that are played in episodes, and make the rows of these."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from rlx.base import UserError, seed_of, unknown
from rlx.environments.reasoning_tasks import SIZES, setting


def address(scheme: str, text: str, defaults: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name, or URL, and options of `NAME?KEY=VALUE&…`; UserError for an unknown key."""
    name, _, query = text.partition("?")
    options = {key: setting(value) for key, value in parse_qsl(query)}
    for key in options.keys() - defaults.keys():
        raise unknown(f"key of {scheme}{name}", key, defaults)
    options = {**defaults, **options}
    for key in ("size", "turns"):
        if not isinstance(options[key], int) or options[key] < 0:
            raise UserError(f"{scheme}{text} has {key}={options[key]!r}; give a number from 0")
    return name.rstrip("/"), options


def rows(
    name: str, text: str, options: Mapping[str, Any], split: str, **more: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode, with its seed; no seed of split `train` is in another split."""
    for number in range(options["size"] or SIZES[split == "train"]):
        seed = seed_of(f"{options['seed']} {split} {number}".encode())
        seed = seed | 1 if split == "train" else seed & ~1
        row = {"question": f"episode {seed} of {name}", "answer": "", "environment": text}
        yield {**row, "seed": seed, **more}
