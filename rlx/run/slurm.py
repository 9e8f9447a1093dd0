"""Run a config as one job of Slurm."""

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.command import say
from rlx.launch.processes import table
from rlx.run.on_hosts import processes_of


def launch(config: ConfigDict, workdir: Path, flags: Sequence[str], dry_run: bool) -> int:
    """Say what would run where; as `rlx.run.scheduler.launch`."""
    gpus = tuple(map(str, range(config.scheduler.gpus_per_node)))
    hosts = {f"node{i}": gpus for i in range(config.scheduler.nodes)}
    say(table(processes_of(config, workdir, flags, hosts, workdir / "slurm", 29_400)))
    if not dry_run:
        raise UserError("scheduler.type=slurm is planned, not started yet; add --dry_run")
    return 0
