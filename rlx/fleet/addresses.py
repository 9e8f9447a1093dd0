"""Addresses of servers: host:port as given, or from a file that may change during a run."""

from collections.abc import Sequence
from pathlib import Path

from rlx.base import UserError

FILE = "@"  # before the path of a file


def read_addresses(given: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses given, each once, with the lines of a file in place of its @PATH.

    Blank lines, and text after a #, are ignored.

    Raises:
      UserError: a file cannot be read.
    """
    found: list[str] = []
    for text in given:
        if not text.startswith(FILE):
            found.append(text)
            continue
        try:
            lines = Path(text.removeprefix(FILE)).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the addresses in {text.removeprefix(FILE)}: {error}; make it a text "
                "file with host:port a line"
            ) from None
        found += [line.partition("#")[0].strip() for line in lines]
    return tuple(dict.fromkeys(filter(None, found)))
