"""Serve a gateway in front of untrained servers, with its API keys and TLS."""

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rlx.agents.online import OnlineOptions, OnlineSessions
from rlx.agents.workflow import gateway_class
from rlx.base import UserError, explained
from rlx.cli import command
from rlx.fleet import tls as fleet_tls
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import Tls
from rlx.launch.local import LocalServers, RunningServers
from rlx.run.tokenizer_files import Served


def read_keys(path: str) -> tuple[str, ...]:
    """Return the API keys in a file, one per line; () for no file, UserError for no keys in it."""
    if not path:
        return ()
    with explained(f"cannot read --keys={path}", "give a text file"):
        keys = tuple(filter(None, map(str.strip, Path(path).read_text().splitlines())))
    if not keys:
        raise UserError(f"--keys={path} has no key; write one per line")
    return keys


def require_guarded(host: str, guarded: bool) -> None:
    """Raise UserError for a host beyond this machine, unless keys and TLS guard it."""
    if not guarded and not fleet_tls.is_loopback(host):
        raise UserError(
            f"--host={host} listens beyond this machine; give --keys=FILE, --tls-cert and "
            "--tls-key, or listen at 127.0.0.1"
        )


@dataclass(frozen=True, slots=True)
class GatewayServer:
    """A gateway's address, API keys and TLS; UserError for a public host without keys and TLS."""

    host: str
    port: int
    keys: tuple[str, ...]  # with a session each; without keys and `online`, all clients share one
    tls: Tls | None
    tool_format: str = ""  # see `tool_calls.Reader`
    online: OnlineOptions | None = None  # options of sessions that an admin makes
    directory: str = "rlx-sessions"  # of their database

    def __post_init__(self) -> None:
        require_guarded(self.host, bool((self.keys or self.online) and self.tls))

    async def serve(
        self, servers: LocalServers | RunningServers, served: Served, name: str
    ) -> None:
        """Connect, answer until SIGINT or SIGTERM; UserError if a server or port fails."""
        make, online, fleet = gateway_class(), None, servers.fleet(image=served.store.get)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(fleet.close)
            await fleet.connect()
            most = Sampling(max_new_tokens=fleet.context)
            if self.online:
                online = OnlineSessions(Path(self.directory), self.online, most)
            gateway = make(
                fleet, served.tokenizer, name=name, tool_format=self.tool_format, host=self.host,
                port=self.port, tls=self.tls, online=online, images=served.images,
            )  # fmt: skip
            stack.push_async_callback(gateway.stop)
            untrained = replace(most, unscored=True)
            for key in self.keys or (() if online else ("",)):
                gateway.sessions.open(untrained, key, endless=True)
            await gateway.start()
            await until_signal(gateway.base_url())


async def until_signal(base_url: str) -> None:
    """Print the address of a server that answers now; wait for SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    command.say(json.dumps({"base_url": base_url, "pid": os.getpid()}))
    await stop.wait()
