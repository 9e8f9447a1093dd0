"""Servers behind one interface: those started here, and those that run already.

    with servers_of(addresses, model_dir, …) as servers:   # started, where no address is given
        fleet = servers.fleet(limits=limits)               # waits until started ones are ready

The run, its teacher, evaluations and `rlx.compare` all build their fleets so.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rlx.fleet.addresses import Joining
from rlx.fleet.client import Fleet
from rlx.fleet.scratch import Scratch
from rlx.fleet.tls import Tls
from rlx.launch.local import LocalServers


class RunningServers:
    """Servers at known addresses, which this process neither starts nor stops.

    Args:
      addresses: of Fleet. token, tls: theirs.
      joining: where further ones are found.
      publish_dir: where a private directory for published weights is made; empty: nothing will be
        published.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        publish_dir: str = "",
        joining: Joining | None = None,
    ):
        self._addresses, self._publish_dir = tuple(addresses), publish_dir
        self._options: dict[str, Any] = {"token": token, "tls": tls, "joining": joining}
        self._stack = ExitStack()

    def fleet(self, **options: Any) -> Fleet:
        """Return a client of the servers, not connected yet; `options` are Fleet's."""
        return Fleet(self._addresses, **self._options, **options)

    def __enter__(self) -> "RunningServers":
        if self._publish_dir:
            scratch = self._stack.enter_context(Scratch(self._publish_dir))
            self._options["publish_dir"] = scratch.directory
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()


def servers_of(
    addresses: Sequence[str],
    model: str | os.PathLike,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    joining: Joining | None = None,
    **local: Any,
) -> LocalServers | RunningServers:
    """Return the servers at `addresses`, or where there are none, servers of `model` to start.

    Args:
      token, tls: of the servers at `addresses`; started ones have a token of their own, but where
        others may join.
      joining: where further ones are found; then none has to be there.
      local: further options of LocalServers; of these `publish_dir` counts for both.
    """
    if addresses or (joining and not local["plan"].servers):
        publish_dir = local.get("publish_dir", "")
        return RunningServers(
            addresses, token=token, tls=tls, publish_dir=publish_dir, joining=joining
        )
    return LocalServers(model, token=token if joining else None, joining=joining, **local)
