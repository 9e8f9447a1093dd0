"""Addresses of the form host:port; an IPv6 host is in brackets."""

import socket


def split_address(address: str) -> tuple[str, str]:
    """Split host:port; remove the brackets of an IPv6 host."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def bracketed(host: str, port: int | str) -> str:
    """Return host:port; put an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect(address: str, seconds: float) -> socket.socket:
    """Return a connection to host:port; OSError, or ValueError for another port than a number."""
    host, port = split_address(address)
    return socket.create_connection((host, int(port)), seconds)


def refusal(address: str, seconds: float) -> Exception | None:
    """Return why a connection to host:port fails; None if it works."""
    try:
        connect(address, seconds).close()
    except (OSError, ValueError, OverflowError) as error:
        return error
    return None
