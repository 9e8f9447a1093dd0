"""Require a token and TLS for every connection beyond loopback.

    server   cert + key: its own; ca: signs the certificates that callers must have
    client   ca: signs the servers' certificates; cert + key: its own, if servers require one

All files are PEM and are read once. docs/security.md shows how to check them with `openssl`.
"""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from rlx.base import UserError, explained
from rlx.fleet import wire
from rlx.system.host_port import split_address

_REFUSALS = {  # gRPC's text for a handshake that can never succeed → remedy
    "CERTIFICATE_VERIFY_FAILED": "set fleet.tls.ca to the CA that signed its certificate",
    "Hostname Verification Check failed": "use a name of the server that is in its certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: give it --tls-cert, or unset fleet.tls",
}
# A server hangs up on a client without TLS, or with a certificate that it refuses, and logs why.
HUNG_UP = "; if it asks for TLS or for a client certificate, set fleet.tls"


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files, "": none. `cert` may hold a chain, its own certificate first."""

    cert: str = ""
    key: str = ""
    ca: str = ""


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, token: str | None, tls: Tls | None) -> None:
    """Raise UserError unless `host` is loopback, or both a token and TLS protect it."""
    if is_loopback(host) or (token and tls):
        return
    raise UserError(
        f"host={host} listens beyond this machine, which needs a token and TLS; use 127.0.0.1, or "
        f"set {wire.TOKEN_VARIABLE}, --tls-cert and --tls-key"
    )


def check_address(address: str, token: str | None, tls: Tls | None) -> None:
    """Raise UserError if the token would be sent to another machine unencrypted."""
    if token and not tls and not is_loopback(split_address(address)[0]):
        raise UserError(
            f"{address} is another machine and the token would be sent unencrypted; set "
            "fleet.tls.ca to the CA of its certificate, or tunnel to 127.0.0.1"
        )


def client_tls(ca: str, cert: str, key: str) -> Tls | None:
    """Return the client's files, None for none; raise UserError if one is missing."""
    if bool(cert) != bool(key) or (cert and not ca):
        raise UserError(
            f"fleet.tls.ca={ca!r}, cert={cert!r}, key={key!r}: cert and key need each other and "
            "the CA of the servers' certificates; set all three, or only ca"
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
    """Return the credentials of a listening port; raise UserError for unusable files."""
    cert, key, ca = read_files(tls)
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=bool(ca))


def https(tls: Tls) -> ssl.SSLContext:
    """Return the context of an HTTPS server; raise UserError for unusable files."""
    read_files(tls)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca or None)
    context.load_cert_chain(tls.cert, tls.key, password="")
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE
    return context


def channel(address: str, tls: Tls | None, ca: bytes = b"") -> grpc.aio.Channel:
    """Return an unconnected channel, with `ca` for that of `tls`; UserError for unusable files."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
    cert, key, tls_ca = read_files(tls)
    credentials = grpc.ssl_channel_credentials(ca or tls_ca, key, cert)
    return grpc.aio.secure_channel(address, credentials, options=wire.CHANNEL_OPTIONS)


def refusal(address: str, details: str) -> UserError | None:
    """Return the error for a TLS handshake that can never succeed by gRPC's `details`, or None."""
    for what in filter(details.__contains__, _REFUSALS):
        text = details[details.index(what) :].removesuffix(": OK").rstrip(".")
        return UserError(f"TLS handshake with {address} failed ({text}); {_REFUSALS[what]}")
    return None


def read_files(tls: Tls) -> list[bytes | None]:
    """Return certificate, key and CA, None for ""; raise UserError for unusable files."""
    contents: list[bytes | None] = []
    for path in (tls.cert, tls.key, tls.ca):
        with explained(f"cannot read {path}", "give a PEM file"):
            contents.append(Path(path).read_bytes() if path else None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    wrong, remedy = f"{tls.ca} has no certificate", "give the CA's in PEM"
    try:
        if tls.ca:
            context.load_verify_locations(tls.ca)
        wrong = f"{tls.cert} and {tls.key} are not a PEM certificate and its unencrypted key"
        remedy = "give two files that belong together"
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise UserError(f"{wrong} ({getattr(error, 'reason', '') or error}); {remedy}") from None
    return contents
