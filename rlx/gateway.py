"""`python -m rlx.gateway --model=DIR`: the HTTP APIs of OpenAI and Anthropic, for any client.

It starts one local server, or uses running ones (--servers). Once it answers it prints one JSON
line, `{"base_url": …, "pid": …}`. SIGTERM or SIGINT ends it. Anthropic's clients take the same
base_url.
"""

import asyncio

from rlx.agents.online import OnlineOptions
from rlx.cli import command
from rlx.doctor import failures
from rlx.model.directory import resolve
from rlx.run import serving


def main() -> None:
    """Answer until a signal."""
    p = command.Parser("rlx.gateway", description=__doc__, allow_abbrev=False)
    serving.add_flags(p, port=8000)
    p.add_argument("--chat-template", default="", help="a file; default: the model's own")
    p.add_argument("--tool-format", default="", help="docs/agents.md; default: the template's")
    p.add_argument("--admin-key", default="", help="a file; sessions by HTTP: docs/online.md")
    p.add_argument("--sessions", default="rlx-sessions", help="directory of the sessions' database")
    seconds = command.number(0, float)
    p.add_argument("--idle-seconds", type=seconds, default=3600, help="of silence ends a session")
    a = serving.parse(p, "dtype")
    if not (by_admin := OnlineOptions.from_flags(a)):
        serving.refuse_given(p, a, ("sessions", "idle_seconds"), "needs --admin-key")
    guards = serving.guards(a, bool(by_admin))
    from rlx.run.tokenizer_files import Served

    model = resolve(a.model, "--model", weights=not a.servers)
    served = Served.load(model, a.chat_template)
    with serving.fleet_of(a, model, served.store.get) as fleet:
        name = a.name or model.name
        asyncio.run(serving.serve_gateway(a, fleet, served, name, *guards, by_admin))


if __name__ == "__main__":
    command.run(main, explain=failures.explain, teardown=False)
