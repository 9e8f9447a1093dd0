"""Check packages, the machine, and a run's config."""

import dataclasses
import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path

from ml_collections import ConfigDict

from rlx.agents import loading
from rlx.base import leaves
from rlx.cli import user_code
from rlx.cli.findings import Finding, attempt
from rlx.doctor import machine, packages
from rlx.fleet.addresses import read_addresses
from rlx.observe import writers
from rlx.observe.hooks import Hooks
from rlx.run.allocate import apply_allocation, changed_environment, gpus, share
from rlx.system.host_port import refusal
from rlx.train.hosts import Cluster

_REACH_SECONDS = 3.0
SEAMS = (  # keys of the config that may name user code
    "algorithm.loss", "algorithm.advantage", "reward.name", "reward.terms", "rollout.workflow",
    "rollout.workflow_kwargs.tools", "data.dataset", "observe.writers", "sandbox.kind",
)  # fmt: skip


def findings(config: ConfigDict | None, workdir: Path) -> Iterator[Finding]:
    """Yield rows for the doctor's table."""
    engines = []  # engines of servers that the run starts
    if config and config.fleet.num_servers and not config.fleet.addresses:
        engines.append(config.fleet.engine)
    if config and config.teacher.path and not config.teacher.addresses:
        engines.append(config.teacher.engine or config.fleet.engine)
    yield from packages.check(needed=tuple({"vllm"} & {*engines}))
    devices = machine.devices()
    yield from machine.check(workdir, devices)
    if config is None:
        return
    if config.allocation_mode:
        allocated = partial(_allocate, config, devices)
        row, result = attempt("config", "allocation", allocated, itemgetter(2))
        yield row
        config, devices, _ = result or (config, devices, "")
    place = partial(Cluster.of, os.environ, **config.cluster)
    row, cluster = attempt("config", "cluster", place, lambda c: f"{c}; {c.source}".rstrip("; "))
    if cluster is None or cluster.count > 1:
        yield row
    options = {name: value for name, value in leaves(config) if name.endswith(".addresses")}
    for name, addresses in options.items():
        row, entries = attempt("machine", name, partial(read_addresses, addresses), str)
        if entries is None:
            yield row
        for address in entries or ():
            yield machine.judge_address(address, str(refusal(address, _REACH_SECONDS) or ""), name)
    if isinstance(devices, str):  # the next checks need JAX
        return
    # Only shapes are computed, so the devices stay free.
    with changed_environment({"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}):
        yield from user_plugins(config)
        # Imports JAX, which answered in another process above: a broken driver can hang it.
        from rlx.run import config_checks

        yield from config_checks.check(config, workdir, devices)


def _allocate(
    config: ConfigDict, devices: machine.Devices | str
) -> tuple[ConfigDict, machine.Devices | str, str]:
    """Return the allocated config, the trainer's devices, and a sentence about both."""
    config = apply_allocation(config)
    shares = share(config, gpus(), config.cluster.processes)
    if shares is None:
        return config, devices, f"{config.allocation_mode}; no GPU here"
    owners = {f"server {i}": ids for i, ids in enumerate(shares.servers)}
    owners["trainer"] = shares.trainer
    shown = "; ".join(f"{who}: GPU {', '.join(ids)}" for who, ids in owners.items())
    if not isinstance(devices, str):
        devices = dataclasses.replace(devices, count=len(shares.trainer))
    return config, devices, f"{config.allocation_mode}; {shown}"


def user_plugins(config: ConfigDict) -> Iterator[Finding]:
    """Yield a row for each user plug-in of a config: its place or its error."""
    for key in SEAMS:
        section, name, *argument = key.split(".")
        value = config[section].get(name)
        if argument:
            value = loading.parse_kwargs(value, f"{section}.{name}").get(*argument)
        for each in value if isinstance(value, tuple | list) else (value,):
            entry = each[0] if isinstance(each, tuple) else each  # reward.terms have weights
            board = key == "observe.writers" and entry != "tensorboard"
            if board or (isinstance(entry, str) and user_code.is_own(entry)):
                yield attempt("plugged in", key, partial(_load, key, entry), str)[0]
    if config.data.chat_template not in ("", "none"):  # a file, checked with the model
        yield Finding("plugged in", "data.chat_template", "ok", config.data.chat_template)


def _load(key: str, entry: str) -> str:
    """Return `mine.py:score (FILE, line N)` for the object that `entry` names."""
    if key == "observe.writers":
        Hooks(pairs := writers.load([entry]))  # raises UserError for an unknown hook
        plugin = pairs[0][1]
    else:
        plugin = user_code.find(key, entry)
    thing = plugin if inspect.isroutine(plugin) or inspect.isclass(plugin) else type(plugin)
    with suppress(OSError, TypeError):  # made by code, not by a file
        return f"{entry} ({inspect.getfile(thing)}, line {inspect.getsourcelines(thing)[1]})"
    return entry
