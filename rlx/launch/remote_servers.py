"""Servers, or Ray, on hosts with ssh and nothing else: started, shown, ended.

SHARED/cluster.json names what was started; SHARED/servers has the address files of rlx.serve,
SHARED/secrets their token and certificate, SHARED/logs what they write.
"""

import json
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from rlx.base import UserError
from rlx.fleet import wire
from rlx.fleet.addresses import Joining, bracketed, split_address
from rlx.launch import run_secrets
from rlx.launch.machines import HOME, Machines, aligned
from rlx.system.exit_reason import last_words
from rlx.system.jsonl import read_json, write_atomically
from rlx.system.signals import interrupts

Processes = dict[str, list[dict[str, Any]]]  # host → name, log and argv, env; then pid, begun

STATE, _HEAD = "cluster.json", "Ray's head at "
READY_SECONDS, LOOK_SECONDS, STOP_SECONDS, REACH_SECONDS = 600.0, 2.0, 40.0, 5.0


def servers(
    machines: Machines,
    shared: Path,
    found: Mapping[str, Any],
    each: int,
    port: int,
    serve: Sequence[str],
) -> Processes:
    """Return the servers to start, with new secrets: `each` a host, 0: one a GPU, or one.

    Args:
      found: host → what `look` found there. port: of a host's first server; 0: any.
      serve: what follows Python, as -m rlx.serve --model=DIR.
    """  # fmt: skip
    made, secret = Processes(), shared / "secrets"
    addresses = {host: machines.address(host) for host in machines.hosts}
    token = _new_secrets(shared, tuple(addresses.values()))
    common = (*serve, f"--join={shared / 'servers'}", f"--tls-key={secret / run_secrets.KEY}",
              f"--tls-cert={secret / run_secrets.CERTIFICATE}")  # fmt: skip
    env = {"PYTHONPATH": HOME, wire.TOKEN_VARIABLE: token}
    for host, address in addresses.items():
        gpus = len(found[host]["gpus"])
        made[host] = [
            {"name": f"server {i}", "log": str(shared / "logs" / f"{host}-{i}.log"),
             "argv": [machines.python, *common, f"--host={address}", f"--port={port and port + i}"],
             "env": {**env, **({"CUDA_VISIBLE_DEVICES": str(i % gpus)} if gpus else {})}}
            for i in range(each or gpus or 1)
        ]  # fmt: skip
    return made


def ray_nodes(machines: Machines, shared: Path, port: int) -> Processes:
    """Return a node of Ray for each host, with a new token; the first has the head, at `port`."""
    made, head = Processes(), bracketed(machines.address(machines.hosts[0]), port)
    token = _new_secrets(shared, tuple(map(machines.address, machines.hosts)))
    env = {"PYTHONPATH": HOME, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    for host in machines.hosts:
        role = [f"--address={head}"] if made else ["--head", f"--port={port}"]
        argv = [machines.python, "-m", "ray.scripts.scripts", "start", "--block", *role,
                f"--node-ip-address={machines.address(host)}", "--disable-usage-stats"]  # fmt: skip
        name = "Ray's node" if made else f"{_HEAD}{head}"
        made[host] = [{"name": name, "log": str(shared / "logs" / f"{host}-ray.log"),
                       "argv": argv, "env": env}]  # fmt: skip
    return made


def _new_secrets(shared: Path, addresses: Sequence[str]) -> str:
    """Make the secrets of `shared` and return the token; UserError where some are in use."""
    if (shared / STATE).exists():
        raise UserError(f"{shared} has servers already; python -m rlx.cluster down ends them")
    run_secrets.make_secrets(shared / "secrets", addresses)
    return (shared / "secrets" / run_secrets.TOKEN).read_text()


def up(machines: Machines, shared: Path, wanted: Processes) -> None:
    """Start processes, and return when all run and servers have joined.

    Raises:
      UserError: a process ends at its start, with its last words; then nothing is left running. As
        at Ctrl-C.
    """
    if machines.ssh == "srun":
        raise UserError(
            "--hosts is missing, and what srun starts ends with its step; name hosts that ssh "
            "knows, or start runs by --config.scheduler.type=slurm"
        )
    own = _forget(shared)
    stop = Event()
    with interrupts(stop.set):  # until it is written down what was started
        _up(machines, shared, wanted, stop, own)


def _up(machines: Machines, shared: Path, wanted: Processes, stop: Event, own: int) -> None:
    answers = machines.ask("start", {host: {"commands": c} for host, c in wanted.items()})
    failed = {host: a for host, a in answers.items() if isinstance(a, UserError)}
    _write(machines, shared, {
        host: [{"name": one["name"], "log": one["log"], **began}
               for one, began in zip(wanted[host], answer, strict=True)]
        for host, answer in answers.items() if host not in failed
    })  # fmt: skip
    try:
        for host, error in failed.items():
            raise UserError(f"{host}: {error}")
        joining = sum(one["name"].startswith("server") for c in wanted.values() for one in c) + own
        end, joined = time.monotonic() + READY_SECONDS, -1
        while joined < joining:
            if stop.wait(LOOK_SECONDS):
                raise KeyboardInterrupt
            joined = len(_joined(shared))
            for host, one, runs in _alive(*read(shared)):
                if runs is False or time.monotonic() > end:
                    lines = Path(one["log"]).read_text(errors="replace").splitlines()
                    said = last_words(lines) or f"its log is {one['log']}"
                    raise UserError(f"{host}: {one['name']} ended or is not ready: {said}")
    except BaseException:
        down(shared)
        raise


def read(shared: Path) -> tuple[Machines, Processes]:
    """Return what `up` has started in `shared`; raise UserError where that is nothing."""
    found = read_json(shared / STATE)
    if not found:
        raise UserError(f"nothing was started in --shared={shared}; python -m rlx.cluster up does")
    machines = Machines(tuple(found["hosts"]), found["ssh"], found["python"])
    return machines, found["processes"]


def status(shared: Path) -> tuple[str, bool]:
    """Return a line for each process and how a run takes them, and whether all run."""
    states = {True: "✓ runs", False: "✗ ended: {log}", None: "✗ its host does not answer"}
    found = [
        (host, one["name"], str(one["pid"]), states[runs].format(**one))
        for host, one, runs in _alive(*read(shared))
    ]
    shown = aligned([("host", "what", "process", "state"), *found])
    token = f'"$(cat {shlex.quote(str(shared / "secrets" / run_secrets.TOKEN))})"'
    for head in [what.removeprefix(_HEAD) for _, what, *_ in found if what.startswith(_HEAD)]:
        shown += ["a run there:", f"RAY_ADDRESS={head} RAY_AUTH_MODE=token RAY_AUTH_TOKEN={token} "
                  "python -m rlx.main --config=FILE --config.scheduler.type=ray"]  # fmt: skip
    if joined := _joined(shared):
        secret = shared / "secrets"
        flags = {"join": shared / "servers", "num_servers": 0,
                 "publish": "stream", "tls.ca": secret / run_secrets.CERTIFICATE}  # fmt: skip
        given = [shlex.quote(f"--config.fleet.{key}={value}") for key, value in flags.items()]
        command = f"python -m rlx.main --config=FILE {' '.join(given)}"
        shown += [f"joined: {', '.join(joined)}; a run with them:",
                  f"{wire.TOKEN_VARIABLE}={token} {command}"]  # fmt: skip
    return "\n".join(shown), all(row[-1].startswith("✓") for row in found)


def down(shared: Path) -> int:
    """Return 0 once what `up` started has ended; servers finish what they have, for a while.

    Raises:
      UserError: a host did not answer; what runs there is still in the list.
    """
    machines, started = read(shared)
    asked = {h: {"processes": some, "seconds": STOP_SECONDS} for h, some in started.items()}
    answers = machines.ask("stop", asked)
    failed = {h: a for h, a in answers.items() if isinstance(a, UserError) or any(a)}
    if failed:
        _write(machines, shared, {host: started[host] for host in failed})
        host, answer = next(iter(failed.items()))
        why = answer if isinstance(answer, UserError) else f"{sum(answer)} cannot be killed"
        raise UserError(f"{host}: {why}; what runs there is left, the same command tries again")
    _forget(shared)
    (shared / STATE).unlink()
    return 0


def _alive(machines: Machines, started: Processes) -> list[tuple[str, dict[str, Any], bool | None]]:
    """Return host, process and whether it runs; None where the host does not answer."""
    answers = machines.ask("alive", {h: {"processes": some} for h, some in started.items()})
    return [
        (host, one, None if isinstance(answers[host], UserError) else answers[host][i])
        for host, some in started.items() for i, one in enumerate(some)
    ]  # fmt: skip


def _joined(shared: Path) -> tuple[str, ...]:
    there = (shared / "servers").is_dir()
    return Joining(str(shared / "servers")).look() if there else ()


def _forget(shared: Path) -> int:
    """Remove the addresses at which nobody listens; return how many servers joined by hand."""
    left = 0
    for name in _joined(shared):
        host, port = split_address(name)
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
            left += 1
        except OSError:
            (shared / "servers" / name).unlink(missing_ok=True)
    return left


def _write(machines: Machines, shared: Path, started: Processes) -> None:
    state = json.dumps({**asdict(machines), "processes": started}, indent=2)
    write_atomically(shared / STATE, state.encode())
