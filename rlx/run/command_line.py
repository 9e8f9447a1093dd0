"""Parse `--config=FILE` of the commands: rlx's own in Python, or AReaL's in YAML.

`rlx.areal` is imported for a YAML file, or an `allocation_mode` of AReaL's, only.
"""

import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli import command, flags
from rlx.launch import allocation


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
        config, values = flags.parse(argv, **options)
    if config is not None and config.get("allocation_mode"):
        _translate_allocation(config)
    return config, values


def _translate_allocation(config: ConfigDict) -> None:
    """Replace an `allocation_mode` of AReaL's by rlx's, and print what changed."""
    try:
        allocation.parse(config.allocation_mode)
    except UserError:
        from rlx.areal import areal_allocation

        config.allocation_mode, changes = areal_allocation.translate(config.allocation_mode)
        for change in changes:
            command.say(f"allocation_mode: {change}", sys.stderr)


def _overrides(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} overrides nothing ({error}); quote as a shell would") from None
