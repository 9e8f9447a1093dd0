"""Submit, follow and cancel Slurm jobs by Slurm's commands, without its accounting."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlx.base import UserError

TEMPLATE = Path(__file__).with_name("slurm_job.sh")
UNSHARED = 66  # exit status of a job whose node does not see the run's directory

# States of Slurm in which a job has ended, and those after which another start may succeed.
AGAIN = frozenset((
    "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL",
))  # fmt: skip
ENDED = AGAIN | {
    "COMPLETED", "OUT_OF_MEMORY", "CANCELLED", "DEADLINE", "REVOKED", "SPECIAL_EXIT",
}  # fmt: skip
NEVER: Mapping[str, str] = {  # reason for which a job waits for ever → remedy
    "PartitionNodeLimit": "the partition has fewer nodes at work (`sinfo`); lower scheduler.nodes",
    "PartitionTimeLimit": "`sinfo -o '%P %l'` shows the time there is; lower scheduler.time",
    "BadConstraints": "correct scheduler.options",
}
_REMEDIES = {  # word of sbatch's message → remedy
    "partition": "set scheduler.partition to one that `sinfo` shows",
    "account": "set scheduler.account and qos to yours (`sacctmgr show assoc user=$USER`)",
    "qos": "set scheduler.qos to one of yours",
    "node configuration": "`sinfo -o '%D %G'` shows the nodes there are; lower scheduler.nodes or "
    "gpus_per_node",
    "node count": "lower scheduler.nodes",
    "node name": "correct scheduler.nodelist and exclude",
    "time": "correct scheduler.time",
    "GRES": "`sinfo -o '%D %G'` shows the GPUs there are; correct scheduler.gpus_per_node",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job in Slurm's view."""

    state: str
    reason: str = ""  # why it waits or has ended
    nodes: str = ""  # in Slurm's notation, such as n[0-2]
    restarts: int = 0  # how often Slurm has requeued it
    status: int = 0  # exit status of its script

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes and self.state == "RUNNING" else ""
        return f"is {self.state}{where}{f' ({self.reason})' if self.reason else ''}"


def render(template: str, values: Mapping[str, str], where: str) -> str:
    """Return a template with each <<name>> replaced; UserError for an unknown name."""
    for name in re.findall(r"<<(\w+)>>", template):
        if name not in values:
            raise UserError(f"{where} has <<{name}>>; use only {', '.join(values)}")
    return re.sub(r"<<(\w+)>>", lambda match: values[match[1]], template)


def submit(script: Path) -> str:
    """Submit a script and return the job's id; UserError if Slurm refuses or is missing."""
    done = _run("sbatch", "--parsable", str(script))
    if done.returncode:
        lines = [line.removeprefix("sbatch: ") for line in done.stderr.splitlines()] or ["unknown"]
        message = next((x for x in lines if x.startswith("error: ")), " ".join(lines))
        fix = next((fix for word, fix in _REMEDIES.items() if word in " ".join(lines)), "")
        message, last = (text.removeprefix("error: ") for text in (message, lines[-1]))
        remedy = fix or f"its script is {script}"
        raise UserError(f"Slurm refuses the job: {message} ({last}); {remedy}")
    return done.stdout.strip().split(";")[0]


def job(number: str) -> Job | None:
    """Return a job; None if Slurm does not answer now. UserError if Slurm does not know it."""
    done = _run("scontrol", "show", "job", "--oneliner", number)
    if "Invalid job id" in done.stderr:
        problem = f"Slurm does not know job {number} any more"
        raise UserError(f"{problem}; give the same command to resume")
    return parse_job(done.stdout) if done.returncode == 0 and done.stdout.strip() else None


def lives(number: str) -> bool:
    """Return whether a job has not ended; UserError if Slurm does not answer now."""
    try:
        answer = job(number)
    except UserError:  # Slurm has forgotten the job
        return False
    if answer is None:
        problem = f"Slurm does not answer about job {number}, which was started here before"
        raise UserError(f"{problem}; try again when `scontrol ping` shows that it is UP")
    return not answer.ended


def parse_job(line: str) -> Job:
    """Return the job that a line of `scontrol show job --oneliner` describes."""
    fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
    reason, nodes = fields.get("Reason", "None"), fields.get("NodeList", "(null)")
    reason = "" if reason == "None" else reason.replace("_", " ")
    status = int(fields.get("ExitCode", "0:0").partition(":")[0])
    nodes = "" if nodes == "(null)" else nodes
    return Job(fields["JobState"], reason, nodes, int(fields.get("Restarts", 0)), status)


def failed_nodes(nodes: str) -> tuple[str, ...]:
    """Return the nodes of a list that are down, drained, or do not answer."""
    if not nodes:
        return ()
    lines = _run("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T").stdout
    pairs = (line.split() for line in lines.splitlines())
    bad = re.compile(r"down|drain|fail|error|\*")
    return tuple(dict.fromkeys(node for node, state in pairs if bad.search(state)))


def start_now(number: str) -> None:
    """Let a requeued job start without waiting two minutes."""
    # Slurm has just revoked the job's credential, and with it any made in the same second.
    _run("scontrol", "update", f"JobId={number}", "StartTime=now+3seconds")


def ask_to_end(number: str) -> None:
    """Let a running job end after a saved step; cancel a waiting one."""
    if _run("scancel", "--batch", "--signal=TERM", "--state=RUNNING", number).returncode:
        cancel(number)
    _run("scancel", "--state=PENDING", number)


def cancel(number: str) -> None:
    """End a job; its processes get SIGTERM, then SIGKILL."""
    _run("scancel", number)


def quoted(words: Sequence[str], places: Mapping[str, str]) -> str:
    """Return words quoted for a shell, with each key of `places` replaced by its expansion."""
    result = []
    for word in words:
        parts = re.split(f"({'|'.join(map(re.escape, places))})", word)
        pieces = (places.get(part) or (shlex.quote(part) if part else "") for part in parts)
        result.append("".join(pieces) or "''")
    return " ".join(result)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        problem = f"scheduler.type=slurm needs {command[0]}, which is not on this machine's PATH"
        remedy = "start the run on a login node, or set scheduler.type=local"
        raise UserError(f"{problem}; {remedy}") from None
