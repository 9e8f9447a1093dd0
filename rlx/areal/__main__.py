"""`python -m rlx.areal FILE.yaml [key=value …] > configs/mine.py`: AReaL's YAML as a config.

Overrides are AReaL's. Keys without an equivalent become comments, and are listed on stderr.
"""

import sys

from rlx.areal import areal_yaml
from rlx.base import UserError
from rlx.cli import command


def main() -> None:
    """Print the config."""
    if len(sys.argv) < 2 or "=" in sys.argv[1] or sys.argv[1].startswith("-"):
        raise UserError("no file; python -m rlx.areal FILE.yaml [key=value …] > configs/mine.py")
    text, gaps = areal_yaml.convert(sys.argv[1], sys.argv[2:])
    command.say(text)
    command.say("\n".join(gaps), sys.stderr)


if __name__ == "__main__":
    command.run(main)
