"""`--config=FILE` of the commands: rlx's own in Python, or AReaL's in YAML.

What reads YAML is imported for it alone: its table of keys takes a moment.
"""

import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.cli import command, flags


def parse(argv: list[str], **options: Any) -> tuple[Any, Any]:
    """Return what `flags.parse` does, also of FILE.yaml, or "FILE.yaml:key=value …", of AReaL's."""
    argv = list(argv)
    with tempfile.TemporaryDirectory() as directory:
        for n, argument in enumerate(argv):
            found = re.fullmatch(r"(--config=)?([^=]+\.ya?ml)(?::(.*))?", argument)
            if found and (found[1] or argv[n - 1] == "--config"):
                from rlx.areal import areal_yaml

                text, lost = areal_yaml.convert(found[2], _overrides(found[3] or ""))
                made = Path(directory) / f"{Path(found[2]).stem}.py"
                made.write_text(text)
                argv[n] = f"{found[1] or ''}{made}"
                for line in lost:
                    command.say(f"{found[2]}: {line}", sys.stderr)
        return flags.parse(argv, **options)


def _overrides(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} overrides nothing ({error}); quote as a shell would") from None
