"""Hosts that answer over ssh, or srun inside a Slurm job: asked all at once, compared with ours.

    host_agent's source + a request ─▶ ssh HOST python - ─▶ a line of JSON

Nothing has to be installed for that, so what is missing can be told.
"""

import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import rlx
from rlx.base import UserError
from rlx.system import host_agent

PACKAGES = ("jax", "torch", "transformers", "vllm", "grpcio", "numpy", "safetensors")
CHECKS = ("reach", "python", "packages", "GPUs", "clock", "shared", "ports")
CLOCK_SECONDS = 2.0  # that two clocks may differ
ASK_SECONDS = 120.0
HOME = str(Path(next(iter(rlx.__path__))).parent)  # that rlx runs from


class Check(NamedTuple):
    """What was found on a host: `ok` or not, and then what to change."""

    host: str
    name: str
    ok: bool
    found: str
    remedy: str


@dataclass(frozen=True)
class Machines:
    """Hosts and how to run a program there.

    Attributes:
      ssh: its command with options, as "ssh -F FILE"; "srun": inside a Slurm job.
      python: of the hosts.
    """

    hosts: tuple[str, ...]
    ssh: str
    python: str

    @staticmethod
    def of(hosts: str, ssh: str, python: str, environ: Mapping[str, str]) -> "Machines":
        """Return the machines a,b,c; for "" those of the Slurm job that this runs in.

        Raises:
          UserError: neither hosts nor a job, or a host twice.
        """
        names = tuple(filter(None, hosts.split(",")))
        if not names and (job := environ.get("SLURM_JOB_NODELIST")):
            names, ssh = tuple(_run("scontrol", "show", "hostnames", job).split()), "srun"
        if not names or len(set(names)) < len(names):
            raise UserError(
                f"--hosts={hosts}: give each host once, as --hosts=a,b,c, by a name that ssh "
                "knows; inside a Slurm job none is needed"
            )
        return Machines(names, ssh, python)

    def address(self, host: str) -> str:
        """Return the name or address by which ssh reaches `host`."""
        lines = _run(*shlex.split(self.ssh), "-G", host).splitlines()
        return dict(line.partition(" ")[::2] for line in lines).get("hostname", host)

    def ask(self, action: str, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Ask each host at the same time; return host → the answer, or a UserError that says why.

        Args:
          action: a function of host_agent. requests: host → its arguments.
        """
        with ThreadPoolExecutor(max(1, len(requests))) as pool:
            asked = {h: pool.submit(self._ask, h, action, r) for h, r in requests.items()}
            return {host: answer.result() for host, answer in asked.items()}

    def _ask(self, host: str, action: str, request: Mapping[str, Any]) -> Any:
        answer = f"{action}(**json.loads({json.dumps(request)!r}))"
        program = (
            f"{Path(host_agent.__file__).read_text()}\nimport json\nprint(json.dumps({answer}))"
        )
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "--"]
        if self.ssh == "srun":
            options = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        command = [*shlex.split(self.ssh), *options, shlex.quote(self.python), "-"]
        try:
            done = subprocess.run(
                command, input=program, capture_output=True, text=True, timeout=ASK_SECONDS,
                start_new_session=True,  # Ctrl-C is for us, not for ssh
            )  # fmt: skip
            return json.loads(done.stdout.splitlines()[-1])
        except FileNotFoundError:
            return UserError(f"there is no {command[0]} here; install it")
        except subprocess.TimeoutExpired:
            return UserError(f"no answer in {ASK_SECONDS:g} s; look at the host")
        except (IndexError, ValueError):
            said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            remedy = f"make `{self.ssh} {host} true` work without a password (ssh-copy-id {host})"
            if done.returncode != 255:  # ssh's own
                remedy = f"give the hosts' Python by --python (now {self.python})"
            return UserError(f"{said}; {remedy}")

    def check(self, shared: Path, ports: Sequence[int] = ()) -> tuple[list[Check], dict[str, Any]]:
        """Compare all hosts with this one; return the checks, and host → what `look` found."""
        mark = secrets.token_hex(8)
        try:
            shared.mkdir(parents=True, exist_ok=True)
            (shared / ".rlx-mark").write_text(mark)
        except OSError as error:
            raise UserError(f"cannot write to --shared={shared}: {error.strerror}") from None
        request: dict[str, Any] = {"path": HOME, "packages": PACKAGES, "mark": mark,
                                   "shared": str(shared.absolute())}  # fmt: skip
        sent, here = time.time(), host_agent.look(**request, ports=[])
        try:
            found = self.ask("look", {h: {**request, "ports": [*ports]} for h in self.hosts})
        finally:
            (shared / ".rlx-mark").unlink(missing_ok=True)
        span = (sent, time.time())
        return [c for h in self.hosts for c in judge(h, found[h], here, span)], found


def judge(host: str, found: Any, here: Mapping[str, Any], span: tuple[float, float]) -> list[Check]:
    """Return the checks of one host.

    Args:
      found: what `look` returned there, or why it did not. here: what it returned on this machine.
      span: our clock, seconds, before and after.
    """
    if isinstance(found, UserError):
        text, _, remedy = str(found).rpartition("; ")
        return [Check(host, "reach", False, text, remedy)]
    versions, ours = found["versions"], here["versions"]
    other = [f"{name} {versions[name] or 'missing'} (here {ours[name]})"
             for name in ours if ours[name] and versions[name] != ours[name]]  # fmt: skip
    gpus = f"{len(found['gpus'])} x {found['gpus'][0]}" if found["gpus"] else "none"
    off = max(span[0] - found["clock"], found["clock"] - span[1], 0.0)
    python = found["python"].split(".")[:2] == here["python"].split(".")[:2]
    judged: tuple[tuple[str, bool, str, str], ...] = (
        ("reach", True, "yes", ""),
        ("python", python, found["python"], f"give one as here ({here['python']}) by --python"),
        ("packages", not other, ", ".join(other) or f"rlx {versions['rlx']}",
         "install the same versions on all hosts"),
        ("GPUs", not found["gpus_wrong"], found["gpus_wrong"] or gpus, "mend nvidia-smi there"),
        ("clock", off <= CLOCK_SECONDS, f"{off:.1f} s off", "set it by NTP (chrony)"),
        ("shared", not found["shared"], found["shared"] or "yes",
         "give a directory that all hosts see and may write to by --shared"),
        ("ports", not found["ports"], found["ports"] or "free", "give another --port, or 0: any"),
    )  # fmt: skip
    return [Check(host, name, ok, text, "" if ok else remedy) for name, ok, text, remedy in judged]


def table(checks: Sequence[Check]) -> str:
    """Return a line a host, ✓ or ✗ for each check, and one for each ✗ with its remedy."""
    cells = {(c.host, c.name): f"✓ {c.found}" if c.ok else "✗" for c in checks}
    hosts = dict.fromkeys(check.host for check in checks)
    rows = [[host, *(cells.get((host, name), "–") for name in CHECKS)] for host in hosts]
    wrong = [f"✗ {c.host}: {c.name}: {c.found} → {c.remedy}" for c in checks if not c.ok]
    return "\n".join([*aligned([["host", *CHECKS], *rows]), *wrong])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise UserError(f"there is no {command[0]} here; install it") from None
