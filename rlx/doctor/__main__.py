"""`python -m rlx.doctor [--config=FILE --config.x=y]`: check what rlx, or a run, needs to work.

Checks packages and machine, and with a config its model, data and arithmetic; with --cluster the
hosts of --hosts, or of a Slurm job, against this one. Exit status 0 without a problem, 1 with one.
"""

import os
import sys
from pathlib import Path

from rlx.cli import command
from rlx.doctor import failures
from rlx.doctor.findings import status
from rlx.doctor.table import show
from rlx.launch.remote_servers import Machines, table
from rlx.run import flags
from rlx.run.run_checks import findings


def main() -> int:
    """Print the table; return the exit status."""
    config, values = flags.parse(
        sys.argv, config_needed=False, switches={"cluster": "compare hosts in place of this one"},
        workdir="directory the run would have, which all hosts see; default: runs/",
        hosts="with --cluster: a,b,c by names that ssh knows; default: of the Slurm job",
        ssh='with its options, as "ssh -F FILE"', python="of the hosts; default: this one",
    )  # fmt: skip
    if values.cluster:
        python = values.python or sys.executable
        machines = Machines.of(values.hosts, values.ssh or "ssh", python, os.environ)
        checks, _ = machines.check(Path(values.workdir or "runs"))
        command.say(table(checks))
        return int(not all(check.ok for check in checks))
    return status(show(findings(config, Path(values.workdir or "runs"))))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
