"""Parse the flags of a command, and translate AReaL's YAML files and allocations."""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.cli import command
from rlx.launch import allocation
from rlx.run import flags


def parse(argv: list[str], **options: Any) -> tuple[Any, Any]:
    """Parse like `flags.parse`; --config may also be AReaL's "FILE.yaml:key=value …"."""
    with tempfile.TemporaryDirectory() as directory:
        if re.search(r"\.ya?ml\b", " ".join(argv)):
            from rlx.areal import areal_yaml

            argv = areal_yaml.with_python(argv, Path(directory))
        config, values = flags.parse(argv, **options)
    if config is None or not config.get("allocation_mode"):
        return config, values
    try:
        allocation.parse(config.allocation_mode)
    except UserError:
        from rlx.areal import areal_allocation

        config.allocation_mode, changes = areal_allocation.translate(config.allocation_mode)
        for change in changes:
            command.say(f"allocation_mode: {change}", sys.stderr)
    return config, values
