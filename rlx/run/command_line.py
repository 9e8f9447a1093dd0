"""Parse `--config=FILE` of the commands: rlx's own in Python, or AReaL's in YAML.

`rlx.areal` is imported for a YAML file, or an `allocation_mode` of AReaL's, only.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli import command
from rlx.launch import allocation
from rlx.run import flags


def parse(argv: list[str], **options: Any) -> tuple[Any, Any]:
    """Return what `flags.parse` does, also of FILE.yaml, or "FILE.yaml:key=value …", of AReaL's."""
    with tempfile.TemporaryDirectory() as directory:
        if re.search(r"\.ya?ml\b", " ".join(argv)):
            from rlx.areal import areal_yaml

            argv = areal_yaml.with_python(argv, Path(directory))
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
