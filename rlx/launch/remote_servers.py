"""Check hosts over ssh, and start, show and end servers on them.

SHARED/cluster.json lists the started processes. SHARED/servers holds the address files of
rlx.serve, SHARED/secrets their token and certificate, SHARED/logs their output.
"""

import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from rlx.base import UserError, explained
from rlx.cli.findings import Finding, problem, problems
from rlx.cli.text import aligned
from rlx.fleet import wire
from rlx.fleet.addresses import Joining
from rlx.launch import run_secrets
from rlx.system import host_agent
from rlx.system.exit_reason import last_words
from rlx.system.host_port import refusal
from rlx.system.jsonl import read_json, write_atomically
from rlx.system.process_settings import HOME
from rlx.system.signals import interrupts

Processes = dict[str, list[dict[str, Any]]]  # host → name, log, argv, env; once started pid, begun

STATE = "cluster.json"
READY_SECONDS, LOOK_SECONDS, STOP_SECONDS, REACH_SECONDS = 600.0, 2.0, 40.0, 5.0
PACKAGES = ("jax", "torch", "transformers", "vllm", "grpcio", "numpy", "safetensors")
CHECKS = ("reach", "python", "packages", "GPUs", "clock", "shared", "ports")
CLOCK_SECONDS = 2.0  # that two clocks may differ
ASK_SECONDS = 120.0


@dataclass(frozen=True)
class Machines:
    """Hosts, asked all at once: host_agent's source and a request go to `ssh HOST python -`."""

    hosts: tuple[str, ...]
    ssh: str  # command with options, such as "ssh -F FILE"; "srun" inside a Slurm job
    python: str  # the hosts' Python

    @staticmethod
    def of(hosts: str, ssh: str, python: str, environ: Mapping[str, str]) -> "Machines":
        """Return the machines a,b,c, or for "" the nodes of this Slurm job; UserError if none."""
        names = tuple(filter(None, hosts.split(",")))
        if not names and (job := environ.get("SLURM_JOB_NODELIST")):
            names, ssh = tuple(_run("scontrol", "show", "hostnames", job).split()), "srun"
        if not names or len(set(names)) < len(names):
            remedy = "give each host once, as --hosts=a,b,c, by a name that ssh knows"
            raise UserError(f"--hosts={hosts}: {remedy}; inside a Slurm job none is needed")
        return Machines(names, ssh, python)

    def address(self, host: str) -> str:
        """Return the address of `host` in ssh's configuration."""
        lines = _run(*shlex.split(self.ssh), "-G", host).splitlines()
        return dict(line.partition(" ")[::2] for line in lines).get("hostname", host)

    def ask(self, action: str, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Call a host_agent function with each host's arguments; return host → result or error."""
        with ThreadPoolExecutor(max(1, len(requests))) as pool:
            futures = {h: pool.submit(self._ask, h, action, r) for h, r in requests.items()}
            return {host: answer.result() for host, answer in futures.items()}

    def _ask(self, host: str, action: str, request: Mapping[str, Any]) -> Any:
        answer = f"{action}(**json.loads({json.dumps(request)!r}))"
        source = Path(host_agent.__file__).read_text()
        program = f"{source}\nprint(json.dumps({answer}))"
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "--"]
        if self.ssh == "srun":
            options = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        command = [*shlex.split(self.ssh), *options, shlex.quote(self.python), "-"]
        try:
            done = subprocess.run(
                command, input=program, capture_output=True, text=True, timeout=ASK_SECONDS,
                start_new_session=True,  # so that Ctrl-C does not end ssh
            )  # fmt: skip
            return json.loads(done.stdout.splitlines()[-1])
        except FileNotFoundError:
            return UserError(f"{command[0]} is missing on this machine; install it")
        except subprocess.TimeoutExpired:
            return UserError(f"no answer within {ASK_SECONDS:g} s; check the host")
        except (IndexError, ValueError):
            last_line = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            remedy = f"make `{self.ssh} {host} true` work without a password (ssh-copy-id {host})"
            if done.returncode != 255:  # not an error of ssh
                remedy = f"give the hosts' Python by --python (now {self.python})"
            return UserError(f"{last_line}; {remedy}")

    def check(self, shared: Path, ports: Sequence[int] = (), servers: int = 0) -> tuple[list, dict]:
        """Compare all hosts with this one; return the checks, and host → result of `look`."""
        mark = secrets.token_hex(8)
        with explained(f"cannot write to --shared={shared}", "give another directory"):
            shared.mkdir(parents=True, exist_ok=True)
            (shared / ".rlx-mark").write_text(mark)
        request: dict[str, Any] = {"path": HOME, "packages": PACKAGES, "mark": mark,
                                   "shared": str(shared.absolute())}  # fmt: skip
        start, here = time.time(), host_agent.look(**request, ports=[])
        try:
            request |= {"ports": [*ports], "servers": servers}
            reports = self.ask("look", dict.fromkeys(self.hosts, request))
        finally:
            (shared / ".rlx-mark").unlink(missing_ok=True)
        span = (start, time.time())
        return [c for h in self.hosts for c in checks_of(h, reports[h], here, span)], reports


def checks_of(host: str, report: Any, here: Mapping, span: tuple[float, float]) -> list[Finding]:
    """Return the rows of a host with the `report` of `look`, against the one `here`."""
    if isinstance(report, UserError):
        return [problem(host, "reach", report)]
    versions, local = report["versions"], here["versions"]
    wrong = [f"{name} {versions[name] or 'missing'} (here {local[name]})"
             for name in local if local[name] and versions[name] != local[name]]  # fmt: skip
    gpus = f"{len(report['gpus'])} x {report['gpus'][0]}" if report["gpus"] else "none"
    # `span` is this machine's clock before and after, in seconds.
    off = max(span[0] - report["clock"], report["clock"] - span[1], 0.0)
    python = report["python"].split(".")[:2] == here["python"].split(".")[:2]
    results: tuple[tuple[str, bool, str, str], ...] = (
        ("reach", True, "yes", ""),
        ("python", python, report["python"], f"give one as here ({here['python']}) by --python"),
        ("packages", not wrong, ", ".join(wrong) or f"rlx {versions['rlx']}",
         "install the same versions on all hosts"),
        ("GPUs", not report["gpus_wrong"], report["gpus_wrong"] or gpus, "repair nvidia-smi there"),
        ("clock", off <= CLOCK_SECONDS, f"{off:.1f} s off", "set it by NTP (chrony)"),
        ("shared", not report["shared"], report["shared"] or "yes",
         "give a directory that all hosts see and may write to by --shared"),
        ("ports", not report["ports"], report["ports"] or "free", "give another --port, or 0: any"),
    )  # fmt: skip
    return [
        Finding(host, name, "ok" if ok else "problem", text, "" if ok else remedy)
        for name, ok, text, remedy in results
    ]


def table(checks: Sequence[Finding]) -> str:
    """Return a line per host with ✓ or ✗ for each check, and a line per ✗ with its remedy."""
    cells = {(c.area, c.name): f"✓ {c.result}" if c.level == "ok" else "✗" for c in checks}
    hosts = dict.fromkeys(check.area for check in checks)
    rows = [[host, *(cells.get((host, name), "–") for name in CHECKS)] for host in hosts]
    wrong = [f"✗ {c.area}: {c.name}: {c.result} → {c.remedy}" for c in problems(checks)]
    return "\n".join([*aligned([["host", *CHECKS], *rows]), *wrong])


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise UserError(f"{command[0]} is missing on this machine; install it") from None


def servers(
    machines: Machines,
    shared: Path,
    reports: Mapping[str, Any],  # host → result of `look`
    per_host: int,  # servers per host; 0: one per GPU, at least one
    ports: tuple[int, int],  # of a host's first server, 0: any; of its metrics, 0: none
    serve: Sequence[str],  # arguments of Python, such as -m rlx.serve --model=DIR
) -> Processes:
    """Return the servers to start, with new secrets; UserError if `shared` has some already."""
    if (shared / STATE).exists():
        raise UserError(f"{shared} has servers already; end them by python -m rlx.cluster down")
    processes, secret, (port, metrics) = Processes(), shared / "secrets", ports
    addresses = {host: machines.address(host) for host in machines.hosts}
    run_secrets.make_secrets(secret, tuple(addresses.values()))
    token = (secret / run_secrets.TOKEN).read_text()
    common = (*serve, f"--join={shared / 'servers'}", f"--tls-key={secret / run_secrets.KEY}",
              f"--tls-cert={secret / run_secrets.CERTIFICATE}")  # fmt: skip
    if metrics:  # beyond loopback scrapers need a certificate, and so does who calls the server
        common += (f"--tls-client-ca={secret / run_secrets.CERTIFICATE}",)
    env = {"PYTHONPATH": HOME, wire.TOKEN_VARIABLE: token}
    for host, address in addresses.items():
        gpus = len(reports[host]["gpus"])
        processes[host] = [
            {"name": f"server {i}", "log": str(shared / "logs" / f"{host}-{i}.log"),
             "argv": [machines.python, *common, f"--host={address}", f"--port={port and port + i}",
                      f"--metrics-host={address}", f"--metrics-port={metrics and metrics + i}"],
             "env": {**env, **({"CUDA_VISIBLE_DEVICES": str(i % gpus)} if gpus else {})}}
            for i in range(per_host or gpus or 1)
        ]  # fmt: skip
    return processes


def up(machines: Machines, shared: Path, processes: Processes) -> None:
    """Start processes, and return when all run and servers have joined; else end all of them."""
    if machines.ssh == "srun":
        problem = "--hosts is missing, and processes of srun end with its step"
        remedy = "name hosts that ssh knows, or start runs by --config.scheduler.type=slurm"
        raise UserError(f"{problem}; {remedy}")
    wanted_joined = _remove_dead_addresses(shared) + sum(map(len, processes.values()))
    stop, end = Event(), time.monotonic() + READY_SECONDS
    started = {h: [{k: one[k] for k in ("name", "log")} for one in c] for h, c in processes.items()}
    _write(machines, shared, started)  # before: a host's answer may be lost
    with interrupts(stop.set):
        try:
            requests = {host: {"commands": commands} for host, commands in processes.items()}
            for host, answer in machines.ask("start", requests).items():
                if isinstance(answer, UserError):
                    raise UserError(f"{host}: {answer}")
                for one, began in zip(started[host], answer, strict=True):
                    one |= began
            _write(machines, shared, started)
            joined = -1
            while joined < wanted_joined:
                if stop.wait(LOOK_SECONDS):
                    raise KeyboardInterrupt
                joined = len(_joined_servers(shared))
                for host, process, runs in _alive(*read(shared)):
                    if runs is False or time.monotonic() > end:
                        lines = Path(process["log"]).read_text(errors="replace").splitlines()
                        why = last_words(lines) or f"its log is {process['log']}"
                        raise UserError(f"{host}: {process['name']} ended or is not ready ({why})")
        except BaseException:
            down(shared)
            raise


def read(shared: Path) -> tuple[Machines, Processes]:
    """Return the machines and processes that `up` has started; UserError if there are none."""
    if not (state := read_json(shared / STATE)):
        raise UserError(f"nothing was started in --shared={shared}; use python -m rlx.cluster up")
    return Machines(tuple(state["hosts"]), state["ssh"], state["python"]), state["processes"]


def status(shared: Path) -> tuple[str, bool]:
    """Return a line for each process and the command of a run there, and whether all run."""
    states = {True: "✓ runs", False: "✗ ended: {log}", None: "✗ its host does not answer"}
    rows = [
        (host, process["name"], str(process.get("pid", "?")), states[runs].format(**process))
        for host, process, runs in _alive(*read(shared))
    ]
    shown = aligned([("host", "what", "process", "state"), *rows])
    if joined := _joined_servers(shared):
        secret = shared / "secrets"
        token = f'"$(cat {shlex.quote(str(secret / run_secrets.TOKEN))})"'
        cert = secret / run_secrets.CERTIFICATE
        flags = {"join": shared / "servers", "num_servers": 0, "publish": "stream",
                 "tls.ca": cert, "tls.cert": cert, "tls.key": secret / run_secrets.KEY}  # fmt: skip
        args = [shlex.quote(f"--config.fleet.{key}={value}") for key, value in flags.items()]
        command = f"python -m rlx.main --config=FILE {' '.join(args)}"
        shown += [f"joined: {', '.join(joined)}; a run with them:",
                  f"{wire.TOKEN_VARIABLE}={token} {command}"]  # fmt: skip
    return "\n".join(shown), all(row[-1].startswith("✓") for row in rows)


def down(shared: Path) -> int:
    """End all processes of `up`, whose servers first finish requests for a while; return 0."""
    machines, started = read(shared)
    requests = {h: {"processes": some, "seconds": STOP_SECONDS} for h, some in started.items()}
    answers = machines.ask("stop", requests)
    failed = {h: a for h, a in answers.items() if isinstance(a, UserError) or any(a)}
    if failed:
        _write(machines, shared, {host: started[host] for host in failed})
        host, answer = next(iter(failed.items()))
        why = answer if isinstance(answer, UserError) else f"{sum(answer)} cannot be killed"
        raise UserError(f"{host}: {why}; its processes may still run, give rlx.cluster down again")
    _remove_dead_addresses(shared)
    (shared / STATE).unlink()
    return 0


def _alive(machines: Machines, started: Processes) -> list[tuple[str, dict[str, Any], bool | None]]:
    """Return host, process and whether it runs; None if the host does not answer."""
    answers = machines.ask("alive", {h: {"processes": some} for h, some in started.items()})
    return [
        (host, process, None if isinstance(answers[host], UserError) else answers[host][i])
        for host, some in started.items() for i, process in enumerate(some)
    ]  # fmt: skip


def _joined_servers(shared: Path) -> tuple[str, ...]:
    return Joining(str(shared / "servers")).look() if (shared / "servers").is_dir() else ()


def _remove_dead_addresses(shared: Path) -> int:
    """Remove addresses of servers that do not listen; return the number of others."""
    names = _joined_servers(shared)
    dead = [name for name in names if refusal(name, REACH_SECONDS)]
    for name in dead:
        (shared / "servers" / name).unlink(missing_ok=True)
    return len(names) - len(dead)


def _write(machines: Machines, shared: Path, started: Processes) -> None:
    state = json.dumps({**asdict(machines), "processes": started}, indent=2)
    write_atomically(shared / STATE, state.encode())
