"""`python -m rlx.doctor [--config=FILE --config.x=y]`: check what rlx, or a run, needs to work.

Checks packages and machine, and with a config its model, data and arithmetic. With --cluster it
compares the hosts of --hosts, or of a Slurm job, with this one. With --compile-for=h100:16 it
compiles trainer and JAX servers for GPUs that are not here: memory, time and communication of each
program. Exit status 0 without a problem, 1 with one.
"""

import os
import sys
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.cli.findings import show, status
from rlx.doctor import failures
from rlx.launch.remote_servers import Machines, table
from rlx.run import flags
from rlx.run.run_checks import findings


def main() -> int:
    """Print the table; return the exit status."""
    config, values = flags.parse(
        sys.argv, config_needed=False, switches={"cluster": "compare hosts in place of this one",
                  "scan": "with --compile-for: compile several meshes, and say which is fastest"},
        workdir="directory the run would have, which all hosts see; default: runs/",
        hosts="with --cluster: a,b,c by names that ssh knows; default: of the Slurm job",
        compile_for="GPUs to compile the trainer for, such as h100:16 or a100:2x8; none is needed",
        ssh='with its options, as "ssh -F FILE"', python="of the hosts; default: this one",
    )  # fmt: skip
    owners = {"hosts": "cluster", "ssh": "cluster", "python": "cluster", "scan": "compile_for"}
    for flag, owner in owners.items():
        if getattr(values, flag) and not getattr(values, owner):
            raise UserError(f"--{flag} does nothing without --{owner}; add that, or leave it out")
    if values.cluster:
        python = values.python or sys.executable
        machines = Machines.of(values.hosts, values.ssh or "ssh", python, os.environ)
        checks, _ = machines.check(Path(values.workdir or "runs"))
        command.say(table(checks))
        return status(checks)
    if values.compile_for:
        if config is None:
            raise UserError("--compile-for without --config; give the run's config")
        from rlx.run import compile_for

        compile_for.set_up(os.environ)
        compiled = compile_for.scan if values.scan else compile_for.findings
        return status(show(compiled(config, values.compile_for)))
    return status(show(findings(config, Path(values.workdir or "runs"))))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
