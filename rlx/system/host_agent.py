"""Functions that `rlx.cluster` runs on another host, where rlx may not be installed yet.

This file is sent to the host's Python. Arguments and results are JSON; the last line printed is
the result.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any


def look(path: str, packages: list, shared: str, mark: str, ports: list, servers: int = 0) -> dict:
    """Return versions, GPUs and the clock of this host, and problems ("": none).

    Each of the servers, 0: one a GPU, needs a port from each of `ports` on that is not 0.
    """
    sys.path.insert(0, path)  # directory that rlx runs from, if it exists
    versions = dict.fromkeys(["rlx", *packages], "")
    with suppress(ImportError):
        versions["rlx"] = import_module("rlx").__version__
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpus, broken, wrong, in_use = [], "", "", ""
    if smi := shutil.which("nvidia-smi"):
        command = [smi, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True)
        gpus = answer.stdout.splitlines() if answer.returncode == 0 else []
        broken = (answer.stdout + answer.stderr).strip()[:200] if answer.returncode else ""
    try:
        if Path(shared, ".rlx-mark").read_text() != mark:
            wrong = "another directory of this name"
        probe = Path(shared, f".rlx-{socket.gethostname()}-{os.getpid()}")
        probe.write_text(mark)
        probe.unlink()
    except OSError as error:
        wrong = str(error)
    count = servers or len(gpus) or 1
    for port in (first + i for first in ports if first for i in range(count)):
        try:
            socket.create_server(("", port)).close()
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", 0)
            in_use = f"port {port}: {os.strerror(number) if number else error}"
    return {
        "python": platform.python_version(), "versions": versions, "gpus": gpus,
        "gpus_wrong": broken, "clock": time.time(), "shared": wrong, "ports": in_use,
    }  # fmt: skip


def start(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Start detached processes `argv` with `env` and file `log`; return pid and `begun` of each."""
    started = []
    for command in commands:
        Path(command["log"]).parent.mkdir(parents=True, exist_ok=True)
        with open(command["log"], "wb") as log:
            process = subprocess.Popen(
                command["argv"], env={**os.environ, **command["env"]}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append({"pid": process.pid, "begun": start_ticks(process.pid)})
        with suppress(OSError):  # for those who lose the answer
            Path(f"{command['log']}.pid").write_text(json.dumps(started[-1]))
    return started


def _begun(one: dict[str, Any]) -> dict[str, Any]:
    """Return a process with its pid and start; they are read from `start`'s file if missing."""
    with suppress(OSError, ValueError):
        one = one if "pid" in one else json.loads(Path(f"{one['log']}.pid").read_text())
    return {"pid": 0, "begun": "", **one}


def alive(processes: list[dict[str, Any]]) -> list[bool]:
    """Return whether each process that `start` began still runs."""
    return [start_ticks(one["pid"]) == one["begun"] != "" for one in map(_begun, processes)]


def stop(processes: list[dict[str, Any]], seconds: float) -> list[bool]:
    """End processes by SIGTERM, after `seconds` their groups by SIGKILL; return as `alive`."""
    # SIGTERM not to the group: a server needs its engine to drain.
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 10.0)):
        for one in (one for one in map(_begun, processes) if alive([one])[0]):
            with suppress(ProcessLookupError):
                (os.kill if number == signal.SIGTERM else os.killpg)(one["pid"], number)
        deadline = time.monotonic() + patience
        while any(alive(processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return alive(processes)


def start_ticks(pid: int) -> str:
    """Return a process's start time in kernel ticks, "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # unique with the pid, which is reused
