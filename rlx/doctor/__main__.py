"""`python -m rlx.doctor [--config=FILE --config.x=y]`: check what rlx, or a run, needs to work.

Checks packages and machine, and with a config its model, data and arithmetic. Exit status 0
without a problem, 1 with one.
"""

import sys
from pathlib import Path

from rlx.cli import command, flags
from rlx.doctor import failures
from rlx.doctor.findings import status
from rlx.doctor.table import show
from rlx.run.run_checks import findings


def main() -> int:
    """Print the table; return the exit status."""
    config, values = flags.parse(
        sys.argv, config_needed=False, workdir="directory the run would have; default: runs/"
    )
    return status(show(findings(config, Path(values.workdir or "runs"))))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
