"""`python -m rlx.cluster up --hosts=a,b,c --model=DIR`: servers on machines that have ssh.

`status` shows what runs, `down` ends it. Flags after -- go to rlx.serve.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command, findings
from rlx.launch import remote_servers


def main(argv: Sequence[str], serve: Sequence[str] = ("-m", "rlx.serve")) -> int:
    """Check, start, show or end; return the exit status."""
    cut = argv.index("--") if "--" in argv else len(argv)
    p = command.Parser("rlx.cluster", description=__doc__, allow_abbrev=False)
    p.add_argument("action", choices=("up", "status", "down"))
    p.add_argument("--hosts", default="", help="a,b,c, by names that ssh knows")
    p.add_argument("--shared", default="cluster", help="a directory that all hosts see")
    p.add_argument("--model", default="", help="HF directory that all hosts see")
    count, port = command.number(0), command.number(0, most=65535)
    p.add_argument("--servers", type=count, default=0, help="on each host; 0: one a GPU, or one")
    p.add_argument("--port", type=port, default=0, help="of a host's first server; 0: any")
    p.add_argument("--metrics-port", type=port, default=0, help="likewise, for Prometheus; 0: none")
    p.add_argument("--ssh", default="ssh", help='with its options, as "ssh -F FILE"')
    p.add_argument("--python", default=sys.executable, help="of the hosts")
    a = p.parse_args(argv[:cut])
    shared = Path(a.shared).absolute()
    if a.action == "down":
        return remote_servers.down(shared)
    if a.action == "status":
        shown, well = remote_servers.status(shared)
        command.say(shown)
        return int(not well)
    if not a.model:
        raise UserError("--model is missing; give the HF directory to serve")
    machines = remote_servers.Machines.of(a.hosts, a.ssh, a.python, os.environ)
    first = (a.port, a.metrics_port)
    checks, reports = machines.check(shared, first, a.servers)
    command.say(remote_servers.table(checks))
    if findings.status(checks):
        return 1
    served = (*serve, f"--model={a.model}", *argv[cut + 1 :])
    servers = remote_servers.servers(machines, shared, reports, a.servers, first, served)
    remote_servers.up(machines, shared, servers)
    command.say(remote_servers.status(shared)[0])
    return 0


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]))
