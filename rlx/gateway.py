"""`python -m rlx.gateway --model=DIR`: the HTTP APIs of OpenAI and Anthropic, for any client.

It starts one local server, or uses running ones (--servers). Once it answers it prints one JSON
line, `{"base_url": …, "pid": …}`. SIGTERM or SIGINT ends it. Anthropic's clients take the same
base_url.
"""

import asyncio
import os
import tempfile

from rlx.agents.online import OnlineOptions
from rlx.cli import command
from rlx.doctor import failures
from rlx.engines.engine import EngineOptions
from rlx.fleet import wire
from rlx.fleet.tls import client_tls, server_tls
from rlx.launch.local import servers_of
from rlx.model.directory import resolve
from rlx.run import serving


def main() -> None:
    """Answer until a signal."""
    p = command.Parser("rlx.gateway", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory or hub name")
    p.add_argument("--servers", default="", help="running servers of the model: host:port,…")
    p.add_argument("--tls", default="", help="of --servers: ca.pem, or ca.pem,cert.pem,key.pem")
    p.add_argument("--engine", default="jax", choices=("jax", "vllm"), help="engine to start")
    p.add_options(EngineOptions, "slots", "max_model_len")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--chat-template", default="", help="a file; default: the model's own")
    p.add_argument("--tool-format", default="", help="docs/agents.md; default: the template's")
    p.add_argument("--name", default="", help="of the model; default: its directory's")
    p.add_argument("--host", default="127.0.0.1", help="any but loopback needs --keys and TLS")
    p.add_argument("--port", type=int, default=8000, help="0: any")
    p.add_argument("--keys", default="", help="file with one API key a line; default: any")
    p.add_argument("--admin-key", default="", help="a file; sessions by HTTP: docs/online.md")
    p.add_argument("--sessions", default="rlx-sessions", help="directory of the sessions' database")
    p.add_argument("--idle-seconds", type=float, default=3600, help="of silence ends a session")
    p.add_argument("--tls-cert", default="", help="PEM file: certificate")
    p.add_argument("--tls-key", default="", help="PEM file: its key")
    a = p.parse_args()
    tls = server_tls(a.tls_cert, a.tls_key, "")
    given = (serving.read_keys(a.keys), tls, a.tool_format, OnlineOptions.from_flags(a), a.sessions)
    gateway_server = serving.GatewayServer(a.host, a.port, *given)
    from rlx.run.tokenizer_files import Served

    model = resolve(a.model, "--model", weights=not a.servers)
    served = Served.load(model, a.chat_template)
    with tempfile.TemporaryDirectory() as workdir, servers_of(
        list(filter(None, a.servers.split(","))), model, token=wire.take_token(os.environ),
        tls=client_tls(*[*a.tls.split(","), "", ""][:3]), workdir=workdir, engine=a.engine,
        dtype=a.dtype, max_model_len=a.max_model_len, slots=a.slots,
    ) as servers:  # fmt: skip
        asyncio.run(gateway_server.serve(servers, served, a.name or model.name))


if __name__ == "__main__":
    command.run(main, explain=failures.explain, teardown=False)
