"""Addresses of servers: host:port, a file of them, or a directory where servers announce theirs.

    rlx.serve --join=DIR ─▶ DIR/HOST:PORT, while it serves ─▶ Joining.look, every second ─▶ Fleet

A killed server leaves its file in the directory. It does no harm, and the next server that joins
from the same host removes it.
"""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlx.base import UserError, explained
from rlx.fleet.tls import Tls
from rlx.system.host_port import bracketed, refusal, split_address
from rlx.system.jsonl import write_atomically
from rlx.system.threads import in_thread

FILE = "@"  # before the path of a file
_ANYWHERE = ("", "0.0.0.0", "::")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+")
_CONNECT_SECONDS = 2.0


def read_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses without duplicates, each @PATH replaced by the lines of that file.

    Ignores blank lines, and text after a #. UserError if a file cannot be read.
    """
    addresses: list[str] = []
    for text in texts:
        if not text.startswith(FILE):
            addresses.append(text)
            continue
        path = text.removeprefix(FILE)
        remedy = "make it a text file with one host:port per line"
        with explained(f"cannot read the addresses in {path}", remedy):
            lines = Path(path).read_text("utf-8-sig").splitlines()
        addresses += [line.partition("#")[0].strip() for line in lines]
    return tuple(dict.fromkeys(filter(None, addresses)))


async def require_name(address: str) -> None:
    """Raise UserError if `address` is not host:port or the host name does not exist."""
    host, port = split_address(address)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"{address!r} is not the address of a server; give host:port")
    try:
        await in_thread(socket.getaddrinfo, host, int(port))
    except UnicodeError:
        raise UserError(f"{address}: {host!r} is not a valid host name; correct it") from None
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:  # other errors are the resolver's, EAI_AGAIN
            raise UserError(
                f"{address}: there is no host named {host!r}; correct the address"
            ) from None


@dataclass(frozen=True)
class Joining:
    """A directory where servers announce their addresses."""

    directory: str
    tls: Tls | None = None  # files for these servers; None: plain connections on loopback

    def look(self) -> tuple[str, ...]:
        """Return the addresses announced now; UserError if the directory cannot be read."""
        problem = f"cannot look for servers in fleet.join={self.directory}"
        with explained(problem, "give the directory of rlx.serve --join=DIR"):
            return tuple(_announced_in(self.directory))


@contextmanager
def announced(directory: str, host: str, port: int) -> Iterator[None]:
    """Announce the server at host:port in `directory` for the block; make the directory.

    For a server that listens at any host, announce this machine's name.
    """
    host = socket.gethostname() if host in _ANYWHERE else host
    path = Path(directory) / bracketed(host, port)
    write_atomically(path, f"{path.name}\n".encode())
    for other in _announced_in(directory):
        same = other != path.name and split_address(other)[0] == host
        if same and isinstance(refusal(other, _CONNECT_SECONDS), ConnectionRefusedError):
            path.with_name(other).unlink(missing_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _announced_in(directory: str) -> list[str]:
    names = sorted(path.name for path in Path(directory).iterdir())
    return [name for name in names if name[0] != "." and _ADDRESS.fullmatch(name)]
