"""Run a config on this machine in a process of its own, and begin it again where it dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from rlx.cli.command import say
from rlx.run.resume import last_step
from rlx.run.trainers import PARENT
from rlx.system import exit_reason
from rlx.system.signals import interrupts

DONE, INTERRUPTED = 0, 130  # exit statuses of rlx.main


def launch(config: ConfigDict, workdir: Path, flags: Sequence[str], dry_run: bool) -> int:
    """Run it `scheduler.retries` times more at most; as `rlx.run.scheduler.launch`.

    One that ends by itself, and has made no step, would end so again: it does not begin anew.
    """
    command = (*sys.orig_argv, f"--workdir={workdir}", "--config.scheduler.retries=0")
    retries, status = config.scheduler.retries, DONE
    for attempt in range(1 + retries):
        before = last_step(workdir).get("step", 0)
        status, stopped = _attempt(command)
        step, ended = last_step(workdir).get("step", 0), stopped or attempt == retries
        if ended or status in (DONE, INTERRUPTED) or (status >= 0 and step <= before):
            break
        say(f"the run ended {exit_reason.words(status, 0)} after step {step}; it goes on after the "
            f"last checkpoint ({attempt + 1} of {retries})")  # fmt: skip
    return status if status >= 0 else 128 - status


def _attempt(command: Sequence[str]) -> tuple[int, bool]:
    """Return how the process ended, and whether a user asked for it; it ends with this one.

    It is in a session of its own, so that Ctrl-C reaches it by way of this process alone.
    """
    asked: list[bool] = []
    environment = {**os.environ, PARENT: str(os.getpid())}
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def ask() -> None:
        asked.append(True)
        process.send_signal(signal.SIGINT)

    try:
        with interrupts(ask):
            try:
                return process.wait(), bool(asked)
            except KeyboardInterrupt:  # the second time
                process.send_signal(signal.SIGINT)
                return process.wait(), True
    finally:
        process.kill()
        process.wait()
