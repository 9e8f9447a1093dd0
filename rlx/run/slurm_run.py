"""Run a config as one Slurm job: write its script, submit it, show its logs, retry it.

    WORKDIR/slurm/attempt-N/    job.sh, config.json, and the logs of each process
    WORKDIR/slurm/job.json      id of the job, so that the same command can find it again

If Slurm requeues a job after a lost node or a preemption, its script resumes the last checkpoint.
A failed job is submitted again without the failed nodes.
"""

import dataclasses
import json
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex

from ml_collections import ConfigDict

from rlx.base import UserError, explained
from rlx.cli.command import INTERRUPTED, say
from rlx.launch import slurm
from rlx.launch.processes import addresses, table
from rlx.run.room_options import as_json
from rlx.run.scheduler import DONE, FAILED, Ended, processes_of, retry, steps_in, until_weights
from rlx.system.exit_reason import last_words
from rlx.system.jsonl import read_json, write_atomically
from rlx.system.process_settings import HOME
from rlx.system.signals import interrupts
from rlx.system.workdir_lock import make_directory

_POLL_SECONDS = 1.0
_AGAIN = "run the same command to resume from the last checkpoint"
_NODE = "@node{}@"  # placeholder of a host, which Slurm names when the job starts


def launch(config: ConfigDict, workdir: Path, flags: Sequence[str], dry_run: bool) -> int:
    """Submit a run and wait for its end; see `rlx.run.scheduler.launch`."""
    workdir = workdir.absolute()
    root = workdir / "slurm"
    make_directory(root)
    excluded = [config.scheduler.exclude] if config.scheduler.exclude else []
    if dry_run:
        dry = root / "dry-run"
        script, shown = _write(config, workdir, dry, flags, ",".join(excluded), weights=False)
        say(f"{shown}\nscript: {script}\nconfig: {script.with_name('config.json')}")
        return DONE
    running = read_json(root / "job.json").get("job", "")
    running = running if running and slurm.lives(running) else ""
    if running:
        say(f"job {running} is already running in {workdir}; following it")

    def attempt() -> Ended:
        nonlocal running
        number, running = running, ""
        if number:
            directory = Path(read_json(root / "job.json")["attempt"])
        else:
            before = [path for path in root.glob("attempt-*") if "." not in path.name]
            directory = root / f"attempt-{len(before) + 1}"
            script, shown = _write(config, workdir, directory, flags, ",".join(excluded))
            number = slurm.submit(script)
            record = {"job": number, "attempt": str(directory)}
            write_atomically(root / "job.json", json.dumps(record).encode())
            say(f"job {number} is submitted; its logs are in {directory}\n{shown}")
        monitor = _JobMonitor(number, directory)
        job = monitor.follow()
        if job is None:
            say(f"job {number} is still running; to follow it, use --workdir={workdir} again")
        if job is None or job.state == "COMPLETED":
            return Ended(DONE)
        if job.state == "CANCELLED" or monitor.cancelled:
            what = f"job {number} was cancelled after step {steps_in(workdir)}"
            say(f"{what}; to resume, use --workdir={workdir} again")
            return Ended(INTERRUPTED)
        failed = slurm.failed_nodes(job.nodes)
        excluded.extend(failed)
        why = _why(number, job, workdir, directory, failed)
        if job.state not in slurm.AGAIN or job.status == slurm.UNSHARED:
            raise UserError(f"{why}; {_AGAIN}")
        return Ended(FAILED, why, by_itself=job.state == "FAILED" and not failed)

    outcome = retry(attempt, config, workdir)
    if outcome.failure:
        raise UserError(f"{outcome.failure}; {_AGAIN}")
    return outcome.status


def _write(
    config: ConfigDict, workdir: Path, attempt: Path, flags: Sequence[str], exclude: str,
    weights: bool = True,
) -> tuple[Path, str]:  # fmt: skip
    """Write a job's script and config; return the script's path and a table of its processes."""
    s = config.scheduler
    gpus = tuple(map(str, range(s.gpus_per_node)))
    nodes = {_NODE.format(i): gpus for i in range(s.nodes)}
    port = 20_000 + zlib.crc32(str(workdir).encode()) % 10_000
    python = sys.executable if s.container == "none" else "python3"
    try:
        plan = processes_of(config, workdir, flags, nodes, attempt.parent, port, python, weights)
    except UserError as error:
        raise UserError(str(error).replace("@", "")) from None
    places = {node: f'"${{nodes[{i}]}}"' for i, node in enumerate(nodes)}
    ready = until_weights(config, workdir)
    tasks = []
    for p in plan:
        words = (*(f"{k}={v}" for k, v in p.env.items()), *p.argv)
        run = f"{ready}again env" if p.role == "server" else "trainer env"
        tasks.append(f"    {p.role}-{p.index}) {run} {slurm.quoted(words, places)} ;;")
    directives = {
        "job-name": f"rlx-{workdir.name}", "nodes": s.nodes, "chdir": Path.cwd(),
        "gres": f"gpu:{s.gpus_per_node}" if s.gpus_per_node else "", "partition": s.partition,
        "account": s.account, "qos": s.qos, "time": s.time, "nodelist": s.nodelist,
        "exclude": exclude,
    }  # fmt: skip
    options = ["--exclusive", "--mem=0", *(f"--{k}={v}" for k, v in directives.items() if v)]
    options += s.options
    mounts = ",".join((f"{workdir}:{workdir}", f"{Path.cwd()}:{Path.cwd()}", *s.mounts))
    apptainer = f"apptainer exec --nv --bind {shlex.quote(mounts)} {shlex.quote(s.image)}"
    pyxis = f"--container-image={shlex.quote(s.image)} --container-mounts={shlex.quote(mounts)}"
    names = {role: [places[p.host].replace("nodes", "names", 1) for p in plan if p.role == role]
             for role in ("trainer", "server")}  # fmt: skip
    template = Path(s.template) if s.template else slurm.TEMPLATE
    with explained(f"cannot read scheduler.template={template}", "give a text file"):
        text = template.read_text()
    plain = {"root": attempt.parent, "attempt": attempt, "home": HOME, "python": python}
    values = {name: shlex.quote(str(word)) for name, word in plain.items()} | {
        "directives": "\n".join(f"#SBATCH {shlex.quote(option)}" for option in options),
        "id": token_hex(8), "restarts": str(config.fleet.max_restarts),
        "grace": str(s.grace_seconds), "pre_commands": "\n  ".join(s.pre_commands),
        "processes": "\n".join(tasks),
        "addresses": slurm.quoted(addresses(plan), places) or "''",
        "server_names": " ".join(names["server"]), "first": names["trainer"][0],
        "trainer_names": " ".join(names["trainer"]), "check": "",
        "container": apptainer * (s.container == "apptainer"),
        "srun": pyxis * (s.container == "pyxis"),
    }  # fmt: skip
    if s.container == "none":  # else all have one image, and the trainer's processes compare code
        check = '-m rlx.doctor --cluster --workdir="$root" || exit 67'
        values["check"] = f"{values['python']} {check}"
    script = slurm.render(text, values, str(template))
    make_directory(attempt)
    (attempt / "job.sh").write_text(script)
    (attempt / "config.json").write_text(json.dumps(as_json(config), indent=2, sort_keys=True))
    return attempt / "job.sh", table(plan).replace("@", "")


def _why(number: str, job: slurm.Job, workdir: Path, attempt: Path, failed: Sequence[str]) -> str:
    if job.status == slurm.UNSHARED and not _logs(attempt):
        what = f"its first node ({job.nodes.split(',')[0]}) cannot see {workdir}"
        remedy = "put --workdir on a disk that all nodes share"
        return f"job {number} did not start: {what}; {remedy}"
    logs = [log.read_text(errors="replace").splitlines() for log in _logs(attempt)]
    wrong = (line for lines in logs for line in lines if line.startswith(("error: ", "✗ ")))
    message = next(wrong, "").removeprefix("error: ") or last_words(logs[0] if logs else ())
    more = f"; {', '.join(failed)} failed" if failed else ""
    if job.state == "OUT_OF_MEMORY":
        message = f"{message or 'out of memory'}; set scheduler.options=('--mem=…',)"
    return f"job {number} {job}{more}: {message or f'its logs are in {attempt}'}"


def _logs(attempt: Path) -> list[Path]:
    """Return the logs of an attempt and its restarts: job, trainer, then servers."""
    order = {"job": 0, "trainer": 1, "server": 2}
    paths = [*attempt.glob("*.log"), *attempt.parent.glob(f"{attempt.name}.*/*.log")]
    return sorted(paths, key=lambda path: (order.get(path.stem.split("-")[0], 3), str(path)))


class _JobMonitor:
    """Shows a job's state and logs until it ends."""

    def __init__(self, number: str, attempt: Path, ask: Callable[[str], str] | None = None):
        self._number, self._attempt = number, attempt
        # Returns a line that the user types; None without a terminal.
        self._ask = ask or (input if sys.stdin and sys.stdin.isatty() else None)
        self._read: dict[Path, int] = {}
        self._asked = self.cancelled = False

    def follow(self) -> slurm.Job | None:
        """Return the ended job; None if the user leaves it running."""
        last, silent = slurm.Job(""), 0
        try:
            with interrupts(lambda: setattr(self, "_asked", True)):
                while True:
                    job = slurm.job(self._number)
                    self._show()
                    if self._asked:
                        self._asked = False
                        if not self._cancel():
                            return None
                    silent = 0 if job else silent + 1
                    if silent == 60:
                        say(f"no answer from Slurm about job {self._number}; retrying")
                    if job:
                        if job.restarts > last.restarts:
                            slurm.start_now(self._number)
                            failed = slurm.failed_nodes(last.nodes)
                            more = f" as {', '.join(failed)} failed" * bool(failed)
                            back = f"job {self._number} is back in Slurm's queue{more}"
                            say(f"{back}; resuming from the last checkpoint")
                        if str(job) != str(last):
                            say(f"job {self._number} {job}")
                        elif job.reason in slurm.NEVER and not job.restarts:
                            slurm.cancel(self._number)
                            why = f"({job.reason}): {slurm.NEVER[job.reason]}"
                            raise UserError(f"job {self._number} cannot start {why}")
                        new = job.nodes if job.state == "RUNNING" else last.nodes or job.nodes
                        last = dataclasses.replace(job, nodes=new)  # Slurm removes lost nodes
                        if job.ended:
                            return last
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:  # other errors, such as a missing disk, leave the job running
            slurm.cancel(self._number)
            raise

    def _cancel(self) -> bool:
        """Ask the job to save and end; return False if the user leaves it running."""
        question = f"\ncancel job {self._number}, or leave it running? [c/l] "
        if self._ask and self._ask(question).strip().lower().startswith("l"):
            return False
        self.cancelled = True
        say("the job saves its step and ends; press Ctrl-C again to end it at once")
        (self._attempt / "cancel").touch()
        slurm.ask_to_end(self._number)
        return True

    def _show(self) -> None:
        """Print the new lines of the logs; prefix those of processes other than trainer 0."""
        for log in _logs(self._attempt):
            with open(log, "rb") as file:
                file.seek(self._read.get(log, 0))
                text, newline, _ = file.read().rpartition(b"\n")
            self._read[log] = self._read.get(log, 0) + len(text) + len(newline)
            first = log.stem in ("trainer-0", "job")
            for line in text.decode(errors="replace").splitlines():
                say(line if first else f"[{log.stem}] {line}")
