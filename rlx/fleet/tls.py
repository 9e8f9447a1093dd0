"""Who may talk to whom: loopback is free, everything else needs a token and TLS.

    server   cert + key: what it shows; ca: callers must show a certificate signed by it
    client   ca: who signs the servers' certificates; cert + key: what it shows when asked

All files are PEM and are read once. A wrong one is found where it is given, and a refused
handshake is explained: gRPC alone would only say UNAVAILABLE, again and again.
"""

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rlx.base import UserError
from rlx.fleet import wire

_LOOK_SECONDS = 2.0  # for one handshake that finds out why gRPC's failed
_WRONG_PURPOSE, _NOT_YET_VALID, _EXPIRED = 26, 9, 10  # OpenSSL's X509_V_ERR_*


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files; "" is none. `cert` may hold a chain, the own certificate first."""

    cert: str = ""
    key: str = ""
    ca: str = ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`; a name other than localhost is not."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, token: str | None, tls: Tls | None) -> None:
    """Refuses to listen where others can connect, unless they need a token and TLS hides it."""
    if is_loopback(host) or (token and tls):
        return
    missing = " and ".join(["no token is set"] * (not token) + ["there is no TLS"] * (not tls))
    raise UserError(
        f"host={host} listens beyond this machine and {missing}; use 127.0.0.1, or set "
        f"{wire.TOKEN_VARIABLE}, --tls-cert and --tls-key"
    )


def check_address(address: str, token: str | None, tls: Tls | None) -> None:
    """Refuses to send a token to another machine in clear."""
    if token and not tls and not is_loopback(_split(address)[0]):
        raise UserError(
            f"{address} is another machine and our token would travel in clear; set fleet.tls.ca "
            "to the CA of its certificate, or tunnel to 127.0.0.1"
        )


async def require_name(address: str) -> None:
    """Raise UserError when `address` is not host:port, or its host has no such name.

    A resolver that is out of order itself (EAI_AGAIN) proves nothing.
    """
    host, port = _split(address)
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"{address!r} is no address of a server; give host:port")
    try:
        await asyncio.get_running_loop().getaddrinfo(host, int(port))
    except UnicodeError:
        raise UserError(f"{address}: {host!r} is no name of a host; correct it") from None
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise UserError(
                f"{address}: there is no host named {host!r}; correct the address"
            ) from None


def client_tls(ca: str, cert: str, key: str) -> Tls | None:
    """The client's files, None for none of them; raises UserError for half a pair or no CA."""
    if bool(cert) != bool(key) or (cert and not ca):
        raise UserError(
            f"fleet.tls.ca={ca!r}, cert={cert!r}, key={key!r}: cert and key come together, beside "
            "the ca that signs the servers' certificates; set all three, or ca alone"
        )
    return Tls(cert, key, ca) if ca else None


def server_tls(cert: str, key: str, client_ca: str) -> Tls | None:
    """The server's files, None for none of them; raises UserError when one is missing."""
    if bool(cert) != bool(key) or (client_ca and not cert):
        raise UserError(
            f"--tls-cert={cert} --tls-key={key} --tls-client-ca={client_ca}: TLS needs a "
            "certificate and its key; give both, or none of the three"
        )
    return Tls(cert, key, client_ca) if cert else None


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """What a listening port needs; raises UserError for files that cannot work."""
    _check_pair(tls, server=True)
    if tls.ca:
        _check_ca(tls.ca)
    pair = (_read(tls.key), _read(tls.cert))
    roots = _read(tls.ca) if tls.ca else None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=bool(roots))


def channel(address: str, tls: Tls | None, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
    """An unconnected channel; raises UserError for files that cannot work."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    _check_ca(tls.ca)
    key = cert = None
    if tls.cert:
        _check_pair(tls, server=False)
        key, cert = _read(tls.key), _read(tls.cert)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), key, cert)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def why_refused(address: str, tls: Tls | None) -> UserError | None:
    """Why `address` and we cannot agree on TLS; None when we can, or when nobody answers.

    Looks twice: a server that is just ending hangs up on anyone.
    """
    first = await _look(address, tls)
    if first is None or await _look(address, tls) is None:
        return None
    return UserError(f"{address} {first}")


async def _look(address: str, tls: Tls | None) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if tls is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(tls.ca)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key, password="")
    host, port = _split(address)
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                if tls is None:
                    return "speaks TLS and we do not; set fleet.tls.ca to the CA of its certificate"
                welcome = await reader.read(1)  # HTTP/2's settings, after our certificate was seen
            finally:
                writer.close()
    except ssl.SSLCertVerificationError as error:
        return _untrusted(error)
    except ssl.SSLError as error:
        if tls is None:
            return None
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "does not speak TLS; start it with --tls-cert and --tls-key, or unset fleet.tls"
        return _unwanted(tls) if "ALERT" in (error.reason or "") else None
    except (OSError, TimeoutError, ValueError):
        return None
    return None if welcome else _unwanted(tls)


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    text = error.verify_message.rstrip(".")
    if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
        return f"shows a certificate we cannot take: {text}; renew it, or set the clock"
    if "mismatch" in text:
        return f"shows a certificate of another host: {text}; use a name that is in it"
    return f"shows a certificate we do not trust: {text}; set fleet.tls.ca to the CA that signed it"


def _unwanted(tls: Tls) -> str:
    if tls.cert:
        return (
            f"refuses our client certificate {tls.cert}; set fleet.tls.cert and fleet.tls.key to "
            "a valid one signed by its --tls-client-ca"
        )
    return "asks for a client certificate; set fleet.tls.cert and fleet.tls.key"


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a PEM file") from None


def _check_ca(path: str) -> None:
    _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, ValueError):
        raise UserError(f"{path} holds no certificate; give a CA's in PEM") from None
    ends = [ssl.cert_time_to_seconds(str(ca["notAfter"])) for ca in context.get_ca_certs()]
    if ends and max(ends) < time.time():
        raise UserError(f"the CA in {path} has expired; give a valid one")


def _check_pair(tls: Tls, *, server: bool) -> None:
    """Raises UserError unless `cert` and `key` belong together and are valid today.

    The dates are found by a handshake in memory in which both sides are these files and the
    certificate is its own authority.
    """
    for path in (tls.cert, tls.key):
        _read(path)
    sides = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        try:
            context.load_cert_chain(tls.cert, tls.key, password="")
            context.load_verify_locations(tls.cert)
        except (ssl.SSLError, ValueError) as error:
            if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
                what = f"the key {tls.key} is not that of the certificate {tls.cert}"
            else:
                what = f"{tls.cert} and {tls.key} are not a PEM certificate and its plain key"
            raise UserError(f"{what}; give the two files that were made together") from None
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        verifier = (protocol is ssl.PROTOCOL_TLS_CLIENT) is server
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED if verifier else ssl.CERT_NONE
        sides.append(context)
    try:
        _shake(*sides)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _WRONG_PURPOSE:
            what = f"is not one for a {'server' if server else 'client'}"
        else:
            what = f"cannot be used: {error.verify_message}"
        raise UserError(f"the certificate {tls.cert} {what}; give another") from None


def _shake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake between two contexts in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    for side in sides * 4:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
