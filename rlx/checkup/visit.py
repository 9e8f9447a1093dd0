"""Everything that is looked at, in order: packages, machine, and a run's config if there is one."""

import os
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from rlx.checkup import machine, packages
from rlx.checkup.findings import Finding


def findings(
    config: ConfigDict | None, workdir: Path, packages_too: bool = True
) -> Iterator[Finding]:
    """The rows, as they are found.

    Args:
      workdir: that the run has or would have.
      packages_too: whether dependencies are imported, which takes a quarter of a minute.
    """
    if packages_too:
        yield from packages.check()
    devices = machine.devices()
    yield from machine.check(workdir, devices)
    if config is None:
        yield machine.check_shared_memory()
        return
    for address in config.fleet.addresses:
        yield machine.judge_address(address, machine.reach(address))
    if isinstance(devices, str):  # without JAX there is nothing more to be found out
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes alone: the devices stay free
    from rlx.checkup import job

    yield from job.check(config, workdir, devices)
