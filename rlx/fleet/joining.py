"""Servers that join a running fleet: each has an address file in a shared directory.

    rlx.serve --join=DIR ─▶ DIR/HOST:PORT, while it serves ─▶ Joining.look, every second ─▶ Fleet

A file that a killed server has left does no harm: nobody answers there, and the next server that
joins from the same host removes it.
"""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlx.base import UserError
from rlx.fleet.addresses import split_address
from rlx.fleet.tls import Tls
from rlx.system.jsonl import write_atomically

_ANYWHERE = ("", "0.0.0.0", "::")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+")
_ALONE_SECONDS = 2.0  # for a neighbour to accept a connection


@dataclass(frozen=True)
class Joining:
    """Where servers that join are found.

    Attributes:
      directory: holds an address file of each server.
      tls: of these servers; None: plain, as on loopback.
    """

    directory: str
    tls: Tls | None = None

    def look(self) -> tuple[str, ...]:
        """Return host:port of the servers that are there now.

        Raises:
          UserError: the directory cannot be read.
        """
        try:
            return tuple(_in_directory(self.directory))
        except OSError as error:
            raise UserError(
                f"cannot look for servers in fleet.join={self.directory}: "
                f"{error.strerror or error}; give the directory of rlx.serve --join=DIR"
            ) from None


def _in_directory(place: str) -> list[str]:
    paths = sorted(path for path in Path(place).iterdir() if not path.name.startswith("."))
    return [path.name for path in paths if _ADDRESS.fullmatch(path.name)]


def bracketed(host: str, port: int | str) -> str:
    """Return host:port, the host in brackets where it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def announced(directory: str, host: str, port: int) -> Iterator[None]:
    """Have a file in `directory`, which is made, that tells runs of the server at host:port.

    Args:
      host: that the server listens on; for all of this machine's, its name is told.
    """
    host = socket.gethostname() if host in _ANYWHERE else host
    path = Path(directory) / bracketed(host, port)
    write_atomically(path, f"{path.name}\n".encode())
    for other in _in_directory(directory):
        if other != path.name and split_address(other)[0] == host and _nobody_at(other):
            path.with_name(other).unlink(missing_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _nobody_at(address: str) -> bool:
    """Return whether this machine says that nobody listens at `address`."""
    host, port = split_address(address)
    try:
        socket.create_connection((host, int(port)), _ALONE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
