"""Where servers are: host:port as given, or in a file that may change while a run goes on."""

from collections.abc import Sequence
from pathlib import Path

from rlx.base import UserError

FILE = "@"  # before the path of a file


def read_addresses(given: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses given, each once, with those of a file in place of its @PATH.

    A file has an address a line; blank lines, and what follows a #, do not count.

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
