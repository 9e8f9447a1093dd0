"""`rlx status WORKDIR`: where a run stands, from its files; `watch -n5` in front repeats it."""

import time
from pathlib import Path

from rlx.cli import command


def main() -> None:
    """Print the progress, the state, the parts and the last messages of a run."""
    parser = command.Parser("rlx.status", description=__doc__, allow_abbrev=False)
    parser.add_argument("workdir", type=Path, help="the --workdir of a run")
    workdir = parser.parse_args().workdir
    from rich.console import Console

    from rlx.observe.run_status import status

    for part in status(workdir, time.time()):
        Console(highlight=False).print(part, soft_wrap=True)


if __name__ == "__main__":
    command.run(main)
