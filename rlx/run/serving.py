"""Serve HTTP in front of untrained servers: flags, servers, API keys, TLS, and the gateway."""

import asyncio
import json
import os
import signal
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.agents.online import OnlineOptions, OnlineSessions
from rlx.agents.workflow import gateway_class
from rlx.base import UserError, explained
from rlx.cli import command
from rlx.cli.hangs import reported_here
from rlx.engines.engine import EngineOptions
from rlx.fleet import wire
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import Tls, client_tls, https, is_loopback, server_tls
from rlx.launch.local import servers_of
from rlx.run.tokenizer_files import Served
from rlx.system.host_port import bracketed


def add_flags(p: command.Parser, port: int) -> None:
    """Add the flags of a model's servers and of what answers in front of them."""
    p.add_argument("--model", required=True, help="HF directory or hub name")
    p.add_argument("--name", default="", help="of the model for clients; default: its own")
    p.add_argument("--servers", default="", help="running servers of the model: host:port,…")
    p.add_argument("--tls", default="", help="of --servers: ca.pem, or ca.pem,cert.pem,key.pem")
    p.add_argument("--engine", default="jax", choices=("jax", "vllm"), help="engine to start")
    p.add_options(EngineOptions, "slots", "max_model_len")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--host", default="127.0.0.1", help="any but loopback needs --keys and TLS")
    p.add_argument("--port", type=command.number(0, most=65535), default=port, help="0: any")
    p.add_argument("--keys", default="", help="file with one API key a line; default: any")
    p.add_argument("--tls-cert", default="", help="PEM file: certificate")
    p.add_argument("--tls-key", default="", help="PEM file: its key")


def parse(p: command.Parser, *names: str) -> Namespace:
    """Return the flags; UserError for some that have no use with the others.

    `names` are further flags of servers to start, which running servers have decided.
    """
    a = p.parse_args()
    if a.servers:
        why = "is for a server to start, and --servers run already"
        refuse_given(p, a, ("engine", "slots", "max_model_len", *names), why)
    else:
        refuse_given(p, a, ("tls",), "is for --servers, and there are none")
    return a


def refuse_given(p: command.Parser, a: Namespace, names: Sequence[str], why: str) -> None:
    """Raise UserError, which says `why`, if a flag of `names` is not at its default."""
    for name in names:
        if getattr(a, name) != p.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}={getattr(a, name)} {why}; drop it")


@contextmanager
def fleet_of(
    a: Namespace, model: Path, image: Callable[[str], bytes] | None = None, **local: Any
) -> Iterator[Fleet]:
    """Yield the fleet of the flags' running servers; without them, of servers of `model`.

    `image` returns the file of a prompt's image, `local` are options of servers to start.
    """
    with tempfile.TemporaryDirectory() as workdir, servers_of(
        list(filter(None, a.servers.split(","))), model, token=wire.take_token(os.environ),
        tls=client_tls(*[*a.tls.split(","), "", ""][:3]), workdir=workdir, engine=a.engine,
        dtype=a.dtype, max_model_len=a.max_model_len, slots=a.slots, **local,
    ) as servers:  # fmt: skip
        yield servers.fleet(image=image)


def guards(a: Namespace, others: bool = False) -> tuple[tuple[str, ...], Tls | None]:
    """Return the API keys, one in each line of a file, and TLS of the flags.

    UserError for a host beyond this machine without TLS and keys, if there are no `others`.
    """
    keys = tuple[str, ...]()
    if a.keys:
        with explained(f"cannot read --keys={a.keys}", "give a text file"):
            text = Path(a.keys).read_text("utf-8-sig")
        keys = tuple(filter(None, map(str.strip, text.splitlines())))
        if not keys:
            raise UserError(f"--keys={a.keys} has no key; write one per line")
    tls = server_tls(a.tls_cert, a.tls_key, "")
    if not ((keys or others) and tls) and not is_loopback(a.host):
        remedy = "give --keys=FILE, --tls-cert and --tls-key, or listen at 127.0.0.1"
        raise UserError(f"--host={a.host} listens beyond this machine; {remedy}")
    return keys, tls


async def serve_gateway(
    a: Namespace, fleet: Fleet, served: Served, name: str, keys: tuple[str, ...], tls: Tls | None,
    by_admin: OnlineOptions | None,
) -> None:  # fmt: skip
    """Connect `fleet`, answer until SIGINT or SIGTERM; UserError if a server or port fails.

    Each key has a session. Without keys and sessions made `by_admin`, all clients share one.
    """
    make, online = gateway_class(), None
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.close)
        await fleet.connect()
        most = Sampling(max_new_tokens=fleet.context)
        if by_admin:
            online = OnlineSessions(Path(a.sessions), by_admin, most)
        gateway = make(
            fleet, served.tokenizer, name=name, tool_format=a.tool_format, host=a.host,
            port=a.port, tls=tls, online=online, images=served.images,
        )  # fmt: skip
        stack.push_async_callback(gateway.stop)
        for key in keys or (() if online else ("",)):
            gateway.sessions.open(replace(most, unscored=True), key, endless=True)
        await gateway.start()
        await until_signal(gateway.base_url())


async def answer(make: Callable[[Any], Any], host: str, port: int, tls: Tls | None) -> None:
    """Serve an aiohttp application, made of its outermost middleware, until SIGINT or SIGTERM."""
    from rlx.agents.http_listener import HttpListener

    listener = HttpListener()
    port = await listener.open(make(listener.watch), host, port, https(tls) if tls else None)
    try:
        await until_signal(f"http{'s' if tls else ''}://{bracketed(host, port)}")
    finally:
        await listener.close()


async def until_signal(base_url: str) -> None:
    """Print the address of a server that answers now; wait for SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    command.say(json.dumps({"base_url": base_url, "pid": os.getpid()}))
    with reported_here("the loop of all requests"):
        await stop.wait()
