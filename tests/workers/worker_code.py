"""Harmful rewards and agents, imported by the workers of worker_process_test.py."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

SLEEPER = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


def sleep(marker):
    """What is left behind: says its pid and stays."""
    with open(marker, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)
    os._exit(0)


def forked(marker, *, session=False, times=1):
    """Sleeps in a child, or a child's child, perhaps of its own session."""
    if pid := os.fork():
        if times > 1:
            os.waitpid(pid, 0)
        return
    if session:
        os.setsid()
    if times > 1:
        forked(marker, session=session, times=times - 1)
        os._exit(0)
    sleep(marker)


def leave(marker):
    """Leaves a process of every kind behind, and returns when all are there; its own is first."""
    Path(marker).write_text(f"{os.getpid()}\n")
    command = [sys.executable, "-c", SLEEPER, marker]
    forked(marker)
    forked(marker, session=True)
    forked(marker, session=True, times=3)
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(["setsid", "sh", "-c", '"$0" "$@" & "$0" "$@"', *command])
    while len(Path(marker).read_text().split()) < 8:
        time.sleep(0.01)


def hang():
    """Holds the interpreter's lock: no handler of Python can run."""
    ctypes.PyDLL(None).sleep(600)


def leaving(prompt, completion, prompt_ids, completion_ids, *, marker, **row):
    leave(marker)
    if completion == "hang":
        hang()
    return 1.0


def hanging(prompt, completion, prompt_ids, completion_ids, *, marker, **row):
    with open(marker, "a") as file:
        file.write(f"{completion}\n")
    if completion == "hang":
        hang()
    return 1.0


def greedy(prompt, completion, prompt_ids, completion_ids, **row):
    if completion == "processes":
        for _ in range(20):
            subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return float(bool(bytearray(1 << 30)))


class Leaving:
    async def run(self, data, **extra_kwargs):
        leave(data["marker"])
        if data["how"] == "hang":
            hang()
        return 1.0


def ancestors(pid):
    """Return the processes that `pid` descends from."""
    found = []
    while int(pid) > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def spy(trainer):
    """What it can get hold of that is not its own: a list of texts."""
    found = []
    if any("planted" in value for value in os.environ.values()) or "RLX_FLEET_TOKEN" in os.environ:
        found.append("a secret in the environment")
    for number in os.listdir("/proc/self/fd"):
        try:
            if "planted" in os.readlink(f"/proc/self/fd/{number}"):
                found.append("a descriptor of the trainer")
        except OSError:
            pass
    near = {trainer, os.getppid()}
    for name in filter(str.isdigit, os.listdir("/proc")):  # other workers of the trainer
        try:
            command = Path(f"/proc/{name}/cmdline").read_text()
            if "rlx.agents.worker" in command and trainer in ancestors(name):
                near.add(int(name))
        except OSError:
            pass
    for pid in near - {os.getpid(), os.getppid()}:
        for name in ("environ", "mem"):
            try:
                with open(f"/proc/{pid}/{name}", "rb"):
                    found.append(f"{name} of process {pid}")
            except OSError:
                pass
    return found


def spying(prompt, completion, prompt_ids, completion_ids, *, trainer, **row):
    if found := spy(trainer):
        raise RuntimeError(f"found {found}")
    return 1.0


class Spying:
    """Also looks for keys of other runs in its process."""

    async def run(self, data, **extra_kwargs):
        Path(f"{data['marker']}-{data['wait']}").touch()
        while len(list(Path(data["marker"]).parent.glob("ready-*"))) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(data["wait"])
        if found := spy(data["trainer"]):
            raise RuntimeError(f"found {found}")
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        frames = [t.get_coro().cr_frame for t in tasks]
        keys = {str(f.f_locals.get("message", {}).get("api_key")) for f in frames if f} - {"None"}
        if keys - {extra_kwargs["api_key"]}:
            raise RuntimeError(f"found the keys {keys}")
        return 1.0
