"""`python -m rlx.tinker --model=DIR --port=8400`: the API of Tinker, for its own client.

It trains LoRA adapters of one base model for many clients, and samples from them by servers that it
starts, or by running ones (--servers). Once it answers it prints one JSON line with its base_url.
SIGTERM or SIGINT ends it.
"""

import asyncio
import os
import tempfile
from functools import partial
from pathlib import Path

from rlx.cli import command
from rlx.doctor import failures
from rlx.engines.engine import EngineOptions
from rlx.fleet import wire
from rlx.fleet.tls import client_tls, server_tls
from rlx.launch.local import servers_of
from rlx.model.directory import at_hand, resolve
from rlx.run import serving
from rlx.tinker.tinker_api import TinkerApi, serve


def main() -> None:
    """Answer until a signal."""
    p = command.Parser("rlx.tinker", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory or hub name of the base")
    p.add_argument("--name", default="", help="of the base for clients; default: --model")
    p.add_argument("--servers", default="", help="running servers of the base: host:port,…")
    p.add_argument("--tls", default="", help="of --servers: ca.pem, or ca.pem,cert.pem,key.pem")
    p.add_argument("--engine", default="jax", choices=("jax", "vllm"), help="engine to start")
    p.add_options(EngineOptions, "slots", "max_model_len")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--budget", type=int, default=8192, help="tokens of a microbatch")
    p.add_argument("--workdir", default="rlx-tinker", help="directory of checkpoints")
    p.add_argument("--host", default="127.0.0.1", help="any but loopback needs --keys and TLS")
    p.add_argument("--port", type=int, default=8400, help="0: any")
    p.add_argument("--keys", default="", help="file with one API key a line; default: any")
    p.add_argument("--tls-cert", default="", help="PEM file: certificate")
    p.add_argument("--tls-key", default="", help="PEM file: its key")
    a = p.parse_args()
    keys, tls = serving.read_keys(a.keys), server_tls(a.tls_cert, a.tls_key, "")
    serving.require_guarded(a.host, bool(keys and tls))
    model = resolve(a.model, "--model").absolute()
    make = partial(
        TinkerApi, names=tuple(dict.fromkeys((a.name or a.model, a.model, str(model)))), keys=keys,
        tokenizer=str(model) if at_hand(a.model) else a.model, directory=Path(a.workdir),
        budget=a.budget,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as logs, servers_of(
        list(filter(None, a.servers.split(","))), model, token=wire.take_token(os.environ),
        tls=client_tls(*[*a.tls.split(","), "", ""][:3]), workdir=logs, engine=a.engine,
        dtype=a.dtype, max_model_len=a.max_model_len, slots=a.slots, publish_dir="/dev/shm",
    ) as servers:  # fmt: skip
        asyncio.run(serve(servers.fleet(), make, model, a.dtype, a.host, a.port, tls))


if __name__ == "__main__":
    command.run(main, explain=failures.explain, teardown=False)
