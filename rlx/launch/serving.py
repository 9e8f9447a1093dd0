"""A fleet for one model: servers that are started for it, or running ones that are given it."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from ml_collections import ConfigDict

from rlx.fleet.client import Fleet, Limits
from rlx.fleet.tls import client_tls
from rlx.launch.local import LocalServers, servers_plan
from rlx.run.inputs import server_options


class Serving:
    """The fleet's `connect` for one model: servers are started before, and ended after.

    Those at `fleet.addresses` are given the model, whatever they serve; its shapes must be theirs,
    and `token` is for them alone.
    """

    def __init__(self, config: ConfigDict, directory: Path, workdir: Path, token: str | None):
        self._config, self._directory, self._token = config, directory, token
        self._servers: LocalServers | None = None
        fleet = config.fleet
        if not fleet.addresses:
            cores = sorted(os.sched_getaffinity(0))
            self._servers = LocalServers(
                directory,
                workdir=workdir,
                plan=servers_plan(cores, fleet.num_servers, fleet.threads),
                **server_options(config),
            )

    def __enter__(self) -> Callable[[], Awaitable[Fleet]]:
        if self._servers:
            self._servers.start()
            try:
                self._servers.wait()
            except BaseException:
                self._servers.stop()
                raise

        async def connect() -> Fleet:
            c = self._config
            limits = Limits.of(c.fleet, c.rollout.request_timeout_seconds)
            if self._servers:
                fleet = self._servers.fleet(limits=limits)
            else:
                tls = client_tls(**c.fleet.tls)
                fleet = Fleet(c.fleet.addresses, token=self._token, tls=tls, limits=limits)
            await fleet.connect()
            if not self._servers:
                try:
                    await fleet.publish(0, self._directory, "stream")
                except BaseException:
                    await fleet.close()
                    raise
            return fleet

        return connect

    def __exit__(self, *_) -> None:
        if self._servers:
            self._servers.stop()
