"""Check everything a run needs, in order: packages, machine, and its config if there is one.

JAX is imported only after it has answered in another process: a broken driver can hang it.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from rlx.doctor import machine, packages
from rlx.doctor.findings import Finding, attempt
from rlx.fleet.addresses import read_addresses


def findings(
    config: ConfigDict | None, workdir: Path, every_extra: bool = True
) -> Iterator[Finding]:
    """Yield the rows as they are found.

    Args:
      workdir: that the run has or would have.
      every_extra: whether extras are imported that the run does not need; it takes a while.
    """
    yield from packages.check(needed=_needed(config) if config else (), everything=every_extra)
    devices = machine.devices()
    yield from machine.check(workdir, devices)
    if config is None:
        yield machine.check_shared_memory()
        return
    for key in ("fleet", "teacher"):
        name, given = f"{key}.addresses", config[key].addresses
        row, found = attempt("machine", name, partial(read_addresses, given), str)
        if found is None:
            yield row
        for address in found or ():
            yield machine.judge_address(address, machine.reach(address), name)
    if isinstance(devices, str):  # without JAX nothing more can be found out
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes alone: the devices stay free
    from rlx.run import config_checks

    yield from config_checks.check(config, workdir, devices)


def _needed(config: ConfigDict) -> tuple[str, ...]:
    """Return the modules of extras that the run cannot do without."""
    engines = []
    if config.fleet.num_servers and not config.fleet.addresses:
        engines.append(config.fleet.engine)
    if config.teacher.path and not config.teacher.addresses:
        engines.append(config.teacher.engine or config.fleet.engine)
    return ("vllm",) if "vllm" in engines else ()
