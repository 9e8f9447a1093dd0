"""Hand a run over to the scheduler that `scheduler.type` names, where that is not this machine.

Each is a module with `launch`, imported when it is asked for.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

SCHEDULERS = {"ray": "rlx.run.on_ray", "slurm": "rlx.run.slurm_run", "local": "rlx.run.restarts"}


def retries(config: ConfigDict) -> int:
    """Return how often a run on other hosts is begun again at most."""
    return 3 if config.scheduler.retries < 0 else config.scheduler.retries


def launch(config: ConfigDict, workdir: Path, flags: Sequence[str], dry_run: bool) -> int:
    """Start a run in other processes and follow it to its end; return rlx.main's exit status.

    Args:
      config: after `allocated` and `check`.
      workdir: that all hosts see.
      flags: of rlx.main, as the user gave them.
      dry_run: write and say what would be started, and stop.

    Raises:
      UserError: it cannot be started, or has failed; nothing of it is left running.
    """
    module: Any = import_module(SCHEDULERS[config.scheduler.type])
    given = [flag for flag in flags if flag.lstrip("-").partition("=")[0] != "dry_run"]
    return module.launch(config, workdir, given, dry_run)
