"""`python -m rlx.main --config=configs/arithmetic.py`: one training run.

With --dry_run it is only checked, as by rlx.doctor: exit status 0 when nothing is wrong, else 1.
With a scheduler, that says what would be started, and writes it down.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.config import check
from rlx.doctor import failures
from rlx.run import flags
from rlx.run.allocate import apply_allocation
from rlx.system.workdir_lock import chosen_workdir
from rlx.train.hosts import Cluster


def main() -> int:
    """Parse, check, and hand over to the loop; return the exit status."""
    config, values = flags.parse(
        sys.argv,
        switches={"dry_run": "check everything the run needs, print what was found, and stop"},
        workdir="directory of the run; default: under runs/",
    )
    workdir = Path(values.workdir or "runs")
    local = config.scheduler.type == "local"
    if values.dry_run and local:
        from rlx.cli.findings import show, status
        from rlx.run.run_checks import findings

        return status(show(findings(config, workdir)))
    first = True
    with suppress(UserError):  # the keys of processes that are started below, or a mistake
        first = not Cluster.of(os.environ, **config.cluster).index
    with chosen_workdir(values.workdir, values.config, first) as workdir:
        config = apply_allocation(config, workdir=workdir)
        check(config)  # before JAX, which takes a moment to import
        from rlx.run import loop, scheduler, trainers

        if not local or config.scheduler.retries > 0:
            return scheduler.launch(config, workdir, sys.argv[1:], values.dry_run)
        with trainers.spawn_local_ranks(config) as config:
            return 0 if loop.run(config, workdir).complete else command.INTERRUPTED


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
