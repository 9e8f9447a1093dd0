"""Servers, or Ray, on hosts with ssh and nothing else: started, shown, ended.

SHARED/cluster.json names what was started; SHARED/servers has the address files of rlx.serve,
SHARED/secrets their token and certificate, SHARED/logs what they write.
"""

import json
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.fleet import wire
from rlx.fleet.addresses import split_address
from rlx.fleet.joining import bracketed
from rlx.launch import run_secrets
from rlx.launch.exit_reason import last_words
from rlx.launch.machines import HOME, Machines, aligned
from rlx.observe.jsonl import read_json, write_atomically

STATE = "cluster.json"
READY_SECONDS, LOOK_SECONDS, STOP_SECONDS = 600.0, 3.0, 40.0


@dataclass(frozen=True)
class Remote:
    """A process on a host.

    Attributes:
      argv, env: its command, to be started. log: file that it writes to.
      address: host:port at which it answers; port 0: its log tells.
      pid, begun: of host_agent.start; 0 and "": it has not been started.
    """

    host: str
    name: str
    address: str
    log: str
    argv: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    pid: int = 0
    begun: str = ""


def servers(
    machines: Machines,
    shared: Path,
    found: Mapping[str, Any],
    each: int,
    port: int,
    serve: Sequence[str],
) -> list[Remote]:
    """Return the servers to start, with new secrets: `each` a host, 0: one a GPU, or one.

    Args:
      found: host → what `look` found there. port: of a host's first server; 0: any.
      serve: what follows Python, as -m rlx.serve --model=DIR.
    """  # fmt: skip
    made, secret = [], shared / "secrets"
    addresses = {host: machines.address(host) for host in machines.hosts}
    run_secrets.make_secrets(secret, tuple(addresses.values()))
    token = (secret / run_secrets.TOKEN).read_text()
    common = (f"--join={shared / 'servers'}", f"--tls-cert={secret / run_secrets.CERTIFICATE}",
              f"--tls-key={secret / run_secrets.KEY}")  # fmt: skip
    for host, address in addresses.items():
        gpus = len(found[host]["gpus"])
        for index in range(each or gpus or 1):
            env = {"PYTHONPATH": HOME, "PYTHONUNBUFFERED": "1", wire.TOKEN_VARIABLE: token}
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = str(index % gpus)
            flags = (*common, f"--host={address}", f"--port={port and port + index}")
            made.append(Remote(
                host, f"server {index}", bracketed(address, 0),
                str(shared / "logs" / f"{host}-{index}.log"), [machines.python, *serve, *flags],
                env,
            ))  # fmt: skip
    return made


def ray_nodes(machines: Machines, shared: Path, port: int) -> list[Remote]:
    """Return a node of Ray for each host; the first has the head, at `port`."""
    made, head = [], bracketed(machines.address(machines.hosts[0]), port)
    for host in machines.hosts:
        first = host == machines.hosts[0]
        argv = [
            machines.python, "-m", "ray.scripts.scripts", "start", "--block",
            "--disable-usage-stats", f"--node-ip-address={machines.address(host)}",
            *(["--head", f"--port={port}"] if first else [f"--address={head}"]),
        ]  # fmt: skip
        name, log = "Ray's head" if first else "Ray", str(shared / "logs" / f"{host}-ray.log")
        made.append(Remote(host, name, head, log, argv, {"PYTHONPATH": HOME}))
    return made


def up(machines: Machines, shared: Path, wanted: Sequence[Remote]) -> None:
    """Start processes, and return when all answer.

    Raises:
      UserError: something was started here and not ended, or a process ends at its start, with
        its last words; then nothing is left running.
    """
    if (shared / STATE).exists():
        raise UserError(f"{shared} has servers already; python -m rlx.cluster down ends them")
    requests = {h: {"commands": [*map(asdict, of_host)]} for h, of_host in by_host(wanted).items()}
    answers, started = machines.ask("start", requests), []
    for host, of_host in by_host(wanted).items():
        if not isinstance(answers[host], UserError):
            pairs = zip(of_host, answers[host], strict=True)
            started += [replace(one, argv=(), env=None, **found) for one, found in pairs]
    write(machines, shared, started)
    try:
        for host, answer in answers.items():
            if isinstance(answer, UserError):
                raise UserError(f"{host}: {answer}")
        write(machines, shared, _ready(machines, started))
    except BaseException:
        down(shared)
        raise


def _ready(machines: Machines, started: Sequence[Remote]) -> Sequence[Remote]:
    """Return processes with their ports when all answer; raise UserError when one has ended."""
    end, look = time.monotonic() + READY_SECONDS, time.monotonic() + LOOK_SECONDS
    while not all(_answers(one.address) for one in started):
        started = [_located(one) for one in started]
        if time.monotonic() > look:
            for one, runs in zip(started, _alive(machines, started), strict=True):
                if not runs or time.monotonic() > end:
                    said = last_words(_lines(one.log)) or f"its log is {one.log}"
                    raise UserError(f"{one.host}: {one.name} ended or is not ready: {said}")
            look = time.monotonic() + LOOK_SECONDS
        time.sleep(0.1)
    return started


def read(shared: Path) -> tuple[Machines, list[Remote]]:
    """Return what `up` has started in `shared`; raise UserError where that is nothing."""
    found = read_json(shared / STATE)
    if not found:
        raise UserError(f"nothing was started in --shared={shared}; python -m rlx.cluster up does")
    machines = Machines(tuple(found["hosts"]), found["ssh"], found["python"])
    return machines, [Remote(**one) for one in found["processes"]]


def write(machines: Machines, shared: Path, started: Sequence[Remote]) -> None:
    """Write down what has been started in `shared`."""
    state = {**asdict(machines), "processes": [asdict(one) for one in started]}
    write_atomically(shared / STATE, json.dumps(state, indent=2).encode())


def status(shared: Path) -> tuple[str, bool]:
    """Return a line for each process and how a run takes them, and whether all answer."""
    machines, started = read(shared)
    states = [
        f"✗ ended, or its host does not answer: {one.log}" if not runs
        else "✓ answers" if _answers(one.address) else "✗ does not answer"
        for one, runs in zip(started, _alive(machines, started), strict=True)
    ]  # fmt: skip
    rows = [(one.host, one.name, one.address, str(one.pid), state)
            for one, state in zip(started, states, strict=True)]  # fmt: skip
    shown = aligned([("host", "what", "address", "process", "state"), *rows])
    if (shared / "servers").exists():
        shown.append(f"a run with them: {_run_command(shared)}")
    return "\n".join(shown), all(state.startswith("✓") for state in states)


def down(shared: Path) -> int:
    """Return 0 once what `up` started has ended; servers finish what they have, for a while.

    Raises:
      UserError: a host did not answer; what runs there is still in the list.
    """
    machines, started = read(shared)
    asked = {h: {"processes": [*map(asdict, of_host)], "seconds": STOP_SECONDS}
             for h, of_host in by_host(started).items()}  # fmt: skip
    answers = machines.ask("stop", asked)
    failed = {h: a for h, a in answers.items() if isinstance(a, UserError) or any(a)}
    for one in started:
        if one.host not in failed:
            (shared / "servers" / one.address).unlink(missing_ok=True)
    if failed:
        write(machines, shared, [one for one in started if one.host in failed])
        host, why = next(iter(failed.items()))
        raise UserError(f"{host}: {why}; what runs there is left, the same command tries again")
    (shared / STATE).unlink()
    return 0


def _run_command(shared: Path) -> str:
    secret = shared / "secrets"
    flags = {"discover": "dir", "join": shared / "servers", "num_servers": 0, "publish": "stream",
             "tls.ca": secret / run_secrets.CERTIFICATE}  # fmt: skip
    given = " ".join(shlex.quote(f"--config.fleet.{key}={value}") for key, value in flags.items())
    token = f'{wire.TOKEN_VARIABLE}="$(cat {shlex.quote(str(secret / run_secrets.TOKEN))})"'
    return f"{token} python -m rlx.main --config=FILE {given}"


def by_host(processes: Sequence[Remote]) -> dict[str, list[Remote]]:
    """Return host → its processes, in their order."""
    found: dict[str, list[Remote]] = {}
    for one in processes:
        found.setdefault(one.host, []).append(one)
    return found


def _alive(machines: Machines, started: Sequence[Remote]) -> list[bool]:
    """Return of each whether it runs; not, where its host does not answer."""
    hosts = by_host(started)
    answers = machines.ask("alive", {h: {"processes": [*map(asdict, o)]} for h, o in hosts.items()})
    runs = {(h, one.pid): yes for h, o in hosts.items() if not isinstance(answers[h], UserError)
            for one, yes in zip(o, answers[h], strict=True)}  # fmt: skip
    return [runs.get((one.host, one.pid), False) for one in started]


def _located(one: Remote) -> Remote:
    """Return a process with the port that its log tells; as it is where it tells none."""
    found = [x for x in _lines(one.log) if x.startswith('{"port"') and x.endswith("}")]
    host = split_address(one.address)[0]
    return replace(one, address=bracketed(host, json.loads(found[-1])["port"])) if found else one


def _answers(address: str) -> bool:
    host, port = split_address(address)
    try:
        socket.create_connection((host, int(port)), 2.0).close()
    except OSError:
        return False
    return True


def _lines(log: str) -> list[str]:
    try:
        return Path(log).read_text(errors="replace").splitlines()
    except OSError:
        return []
