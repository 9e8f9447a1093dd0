"""Answer what `rlx.cluster` asks a host: sent whole to its Python, with the standard library.

Every function takes and returns what JSON has; the last line that is printed is the answer.
"""

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any


def look(path: str, packages: list[str], shared: str, mark: str, ports: list[int]) -> dict:
    """Return what there is on this host; of GPUs, `shared` and `ports` what is wrong, "" nothing.

    Args:
      path: directory that rlx runs from, if it is there. shared: a directory with `mark` in the
        file .rlx-mark. ports: that must be free.
    """
    sys.path.insert(0, path)
    try:
        versions = {"rlx": import_module("rlx").__version__}
    except ImportError:
        versions = {"rlx": ""}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    gpus, broken, wrong, taken = [], "", "", ""
    if smi := shutil.which("nvidia-smi"):
        asked = [smi, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True)
        gpus = done.stdout.splitlines() if done.returncode == 0 else []
        broken = "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[:200]
    try:
        if Path(shared, ".rlx-mark").read_text() != mark:
            wrong = "another directory of this name"
        probe = Path(shared, f".rlx-{socket.gethostname()}-{os.getpid()}")
        probe.write_text(mark)
        probe.unlink()
    except OSError as error:
        wrong = str(error)
    for port in ports:
        with socket.socket() as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("", port))
            except OSError as error:
                taken = f"port {port}: {error.strerror}"
    return {
        "python": platform.python_version(), "versions": versions, "gpus": gpus,
        "gpus_wrong": broken, "clock": time.time(), "shared": wrong, "ports": taken,
    }  # fmt: skip


def start(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Start `argv` with `env`, output in the file `log`, to outlive us; return pid and `begun`."""
    started = []
    for one in commands:
        Path(one["log"]).parent.mkdir(parents=True, exist_ok=True)
        with open(one["log"], "wb") as log:
            process = subprocess.Popen(
                one["argv"], env={**os.environ, **one["env"]}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append({"pid": process.pid, "begun": begun(process.pid)})
    return started


def alive(processes: list[dict[str, Any]]) -> list[bool]:
    """Return of each process that `start` returned whether it runs."""
    return [bool(one["begun"]) and begun(one["pid"]) == one["begun"] for one in processes]


def stop(processes: list[dict[str, Any]], seconds: float) -> list[bool]:
    """End processes, SIGKILL with what they started after `seconds`; return as `alive`.

    SIGTERM goes to them alone: an engine that ended at once would take what a server drains.
    """
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 10.0)):
        for one, runs in zip(processes, alive(processes), strict=True):
            if runs:
                (os.kill if number == signal.SIGTERM else os.killpg)(one["pid"], number)
        deadline = time.monotonic() + patience
        while any(alive(processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return alive(processes)


def begun(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; empty where it has ended.

    A process id may be used again; with this it is unique.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
