"""Make the secrets that a run's hosts share, in a directory that all of them see.

    token       the servers' bearer token
    cert.pem    the servers' self-signed certificate, with key.pem
    bundle.pem  cert.pem and this machine's trusted certificates, for clients that call others too

They are new at each start, in files of mode 0600 in a directory of mode 0700.
"""

import re
import secrets
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command

TOKEN, CERTIFICATE, KEY, BUNDLE = "token", "cert.pem", "key.pem", "bundle.pem"


def make_secrets(directory: Path, hosts: Sequence[str]) -> None:
    """Write the files for servers on `hosts`, names or addresses; UserError if openssl fails."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    for name in (TOKEN, CERTIFICATE, KEY, BUNDLE):
        (directory / name).unlink(missing_ok=True)
    (directory / TOKEN).touch(0o600, exist_ok=False)
    (directory / TOKEN).write_text(secrets.token_urlsafe(32))
    ip = re.compile(r"[\d.]+|.*:.*")
    kinds = {host: "IP" if ip.fullmatch(host) else "DNS" for host in hosts}
    names = ",".join(f"{kind}:{host}" for host, kind in kinds.items())
    openssl = (
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "366", "-subj", "/CN=rlx", "-addext", f"subjectAltName={names}",
        "-keyout", str(directory / KEY), "-out", str(directory / CERTIFICATE),
    )  # fmt: skip
    try:
        subprocess.run(openssl, check=True, capture_output=True, text=True, umask=0o077)
    except FileNotFoundError:
        raise UserError(
            "openssl, which makes the servers' certificate, is missing; install it, or start "
            "servers with your own certificates and set fleet.addresses and fleet.tls"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        problem = f"openssl made no certificate for {names}: {lines[-1]}"
        raise UserError(f"{problem}; give hosts' names or addresses") from None
    path = ssl.get_default_verify_paths().cafile
    trusted = Path(path).read_bytes() if path else b""
    (directory / BUNDLE).touch(0o600)
    (directory / BUNDLE).write_bytes(trusted + b"\n" + (directory / CERTIFICATE).read_bytes())


if __name__ == "__main__":  # in a job, DIR HOST …
    command.run(lambda: make_secrets(Path(sys.argv[1]), sys.argv[2:]))
