"""Rewards and agents that nobody should run: for the workers of kept_test.py to import."""

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
    """Leaves a process of every kind behind, and returns when all are there."""
    command = [sys.executable, "-c", SLEEPER, marker]
    forked(marker)
    forked(marker, session=True)
    forked(marker, session=True, times=3)
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(["setsid", "sh", "-c", '"$0" "$@" & "$0" "$@"', *command])
    while not Path(marker).exists() or len(Path(marker).read_text().split()) < 7:
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
