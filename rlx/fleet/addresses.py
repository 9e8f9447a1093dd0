"""Addresses of servers: host:port as given, or from a file that may change during a run."""

import socket
from collections.abc import Sequence
from pathlib import Path

from rlx.base import UserError
from rlx.system.threads import in_thread

FILE = "@"  # before the path of a file


def read_addresses(given: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses given, each once, with the lines of a file in place of its @PATH.

    Blank lines, and text after a #, are ignored.

    Raises:
      UserError: a file cannot be read.
    """
    found: list[str] = []
    for text in given:
        if not text.startswith(FILE):
            found.append(text)
            continue
        try:
            lines = Path(text.removeprefix(FILE)).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the addresses in {text.removeprefix(FILE)}: {error}; make it a text "
                "file with host:port a line"
            ) from None
        found += [line.partition("#")[0].strip() for line in lines]
    return tuple(dict.fromkeys(filter(None, found)))


def split_address(address: str) -> tuple[str, str]:
    """Return host and port of host:port, the host without the brackets of IPv6."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


async def require_name(address: str) -> None:
    """Raise UserError when `address` is not host:port, or no host has this name.

    A resolver that fails itself (EAI_AGAIN) proves nothing.
    """
    host, port = split_address(address)
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"{address!r} is no address of a server; give host:port")
    try:
        await in_thread(socket.getaddrinfo, host, int(port))
    except UnicodeError:
        raise UserError(f"{address}: {host!r} is no name of a host; correct it") from None
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise UserError(
                f"{address}: there is no host named {host!r}; correct the address"
            ) from None
