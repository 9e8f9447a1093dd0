"""Plan the processes of a run on several hosts: a command of `rlx.main` or `rlx.serve` for each.

The processes share a directory that all hosts see.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ml_collections import ConfigDict

from rlx.config import default
from rlx.launch import allocation
from rlx.launch.processes import Demand, Process, processes
from rlx.launch.run_secrets import CERTIFICATE, KEY
from rlx.model.directory import resolve
from rlx.run.inputs import INITIAL
from rlx.run.room_options import server_options

ADDRESSES = "servers"  # file of the servers' addresses, host:port per line
_LOCAL_OPTIONS = ("publish_dir", "answer_timeout", "max_restarts", "seed")  # not of rlx.serve
_LOAD_SECONDS = 900.0  # until servers answer


def processes_of(
    config: ConfigDict,
    workdir: Path,
    flags: Sequence[str],
    hosts: Mapping[str, Sequence[str]],
    directory: Path,
    port: int,
    python: str = sys.executable,
) -> tuple[Process, ...]:
    """Return the processes of a run, the trainer's first.

    Servers and trainer 0 need $RLX_FLEET_TOKEN. The caller writes the servers' addresses into
    `directory`/ADDRESSES before trainer 0 starts.

    Args:
      config: after `apply_allocation` and `check`.
      flags: the user's flags of rlx.main.
      hosts, port: see `launch.processes`.
      directory: shared directory with the files of `make_secrets`.

    Raises:
      UserError: the processes do not fit the hosts.
    """
    parsed = allocation.parse(config.allocation_mode) if config.allocation_mode else None
    given = bool(config.fleet.addresses)
    demand = Demand(
        servers=0 if given else config.fleet.num_servers,
        trainers=max(1, config.cluster.processes),
        trainer=config.trainer,
        allocation=parsed,
    )
    model = workdir / INITIAL if config.model.random_init else resolve(config.model.path).resolve()
    server = {k: v for k, v in server_options(config).items() if k not in _LOCAL_OPTIONS} | {
        "model": model,
        "tls_cert": directory / CERTIFICATE,
        "tls_key": directory / KEY,
    }
    own: dict[str, object] = {
        "scheduler.type": "local", "scheduler.retries": 0, "allocation_mode": "",
    }  # fmt: skip
    own |= allocation.settings(parsed) if parsed else {}
    if demand.servers:
        own |= {
            "fleet.addresses": (f"@{directory / ADDRESSES}",),
            "fleet.tls.ca": directory / CERTIFICATE,
            "fleet.connect_seconds": max(config.fleet.connect_seconds, _LOAD_SECONDS),
        }
        if config.fleet.publish == "path":
            if config.fleet.publish_dir == default().fleet.publish_dir:
                own["fleet.publish"] = "stream"  # other hosts cannot read this one's memory
            else:
                server["weight_root"] = Path(config.fleet.publish_dir).absolute()
    plan = processes(
        demand,
        hosts,
        trainer=(
            python, "-m", "rlx.main", *flags, f"--workdir={workdir.absolute()}",
            *(f"--config.{key}={value}" for key, value in own.items()),
        ),
        server=(
            python, "-m", "rlx.serve",
            *(f"--{name.replace('_', '-')}={value}" for name, value in server.items()),
        ),
        port=port,
        seed=config.seed,
    )  # fmt: skip
    if config.online.host != default().online.host or config.online.tls_cert:
        return plan
    listen = {"host": plan[0].host, "tls_cert": directory / CERTIFICATE, "tls_key": directory / KEY}
    own_flags = [f"--config.online.{key}={value}" for key, value in listen.items()]
    return tuple(replace(p, argv=(*p.argv, *own_flags)) if p.role == "trainer" else p for p in plan)
