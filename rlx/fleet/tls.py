"""Require a token and TLS for every connection beyond loopback.

    server   cert + key: what it shows; ca: callers must show a certificate signed by it
    client   ca: who signs the servers' certificates; cert + key: what it shows when asked

All files are PEM and are read once. docs/security.md says how to check them with `openssl`.
"""

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rlx.base import UserError
from rlx.fleet import wire
from rlx.fleet.addresses import split_address

# What gRPC reports of a handshake that can never succeed, and what to change.
_REFUSALS = {
    "CERTIFICATE_VERIFY_FAILED": "set fleet.tls.ca to the CA that signed its certificate",
    "Hostname Verification Check failed": "use a name of the server that is in its certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: give it --tls-cert and --tls-key, or unset "
    "fleet.tls",
}


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files; "" is none. `cert` may hold a chain, the own certificate first."""

    cert: str = ""
    key: str = ""
    ca: str = ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`; of names, localhost alone is such."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, token: str | None, tls: Tls | None) -> None:
    """Raise UserError unless `host` is loopback, or both a token and TLS protect it."""
    if is_loopback(host) or (token and tls):
        return
    missing = " and ".join(["no token is set"] * (not token) + ["there is no TLS"] * (not tls))
    raise UserError(
        f"host={host} listens beyond this machine and {missing}; use 127.0.0.1, or set "
        f"{wire.TOKEN_VARIABLE}, --tls-cert and --tls-key"
    )


def check_address(address: str, token: str | None, tls: Tls | None) -> None:
    """Raise UserError where the token would travel to another machine in clear."""
    if token and not tls and not is_loopback(split_address(address)[0]):
        raise UserError(
            f"{address} is another machine and our token would travel in clear; set fleet.tls.ca "
            "to the CA of its certificate, or tunnel to 127.0.0.1"
        )


def client_tls(ca: str, cert: str, key: str) -> Tls | None:
    """Return the client's files, None for none; raise UserError for half a pair or no CA."""
    if bool(cert) != bool(key) or (cert and not ca):
        raise UserError(
            f"fleet.tls.ca={ca!r}, cert={cert!r}, key={key!r}: cert and key come together, beside "
            "the ca that signs the servers' certificates; set all three, or ca alone"
        )
    return Tls(cert, key, ca) if ca else None


def server_tls(cert: str, key: str, client_ca: str) -> Tls | None:
    """Return the server's files, None for none; raise UserError when one is missing."""
    if bool(cert) != bool(key) or (client_ca and not cert):
        raise UserError(
            f"--tls-cert={cert} --tls-key={key} --tls-client-ca={client_ca}: TLS needs a "
            "certificate and its key; give both, or none of the three"
        )
    return Tls(cert, key, client_ca) if cert else None


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return the credentials of a listening port; raise UserError for files that cannot work."""
    roots = _ca(tls) if tls.ca else None
    return grpc.ssl_server_credentials([_pair(tls)], roots, require_client_auth=bool(roots))


def https(tls: Tls) -> ssl.SSLContext:
    """Return the context of an HTTPS server; raise UserError for files that cannot work."""
    _pair(tls)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca or None)
    context.load_cert_chain(tls.cert, tls.key, password="")
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE
    return context


def channel(address: str, tls: Tls | None, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
    """Return an unconnected channel; raise UserError for files that cannot work."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    key, cert = _pair(tls) if tls.cert else (None, None)
    credentials = grpc.ssl_channel_credentials(_ca(tls), key, cert)
    return grpc.aio.secure_channel(address, credentials, options=options)


def refusal(address: str, details: str) -> UserError | None:
    """Return the error for a TLS handshake that can never succeed; None where it may.

    Args:
      details: of gRPC's UNAVAILABLE.
    """
    for what, remedy in _REFUSALS.items():
        if what in details:
            text = details[details.index(what) :].removesuffix(": OK").rstrip(".")
            return UserError(f"{address} and we cannot agree on TLS ({text}); {remedy}")
    return None


def hint(details: str) -> str:
    """Return what else may be wrong where a server hangs up before its first answer, or "".

    A server does so when it ends, but also on a client without TLS or whose certificate it refuses;
    it says which of them in its own log alone.
    """
    if "Socket closed" not in details:
        return ""
    return "; if it asks for TLS or for a client certificate, set fleet.tls"


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a PEM file") from None


def _ca(tls: Tls) -> bytes:
    content = _read(tls.ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls.ca)
    except (ssl.SSLError, ValueError):
        raise UserError(f"{tls.ca} holds no certificate; give a CA's in PEM") from None
    return content


def _pair(tls: Tls) -> tuple[bytes, bytes]:
    """Return (key, certificate); raise UserError unless they belong together."""
    cert, key = _read(tls.cert), _read(tls.key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", "") or error
        raise UserError(
            f"{tls.cert} and {tls.key} are not a PEM certificate and its plain key ({reason}); "
            "give the two files that were made together"
        ) from None
    return key, cert
