"""Run a config on a Ray cluster, with an actor for each of its processes.

attempt   plan ─▶ secrets, addresses ─▶ trainers and servers run
            server ends  ─▶ start a replacement
            trainer ends ─▶ end all ─▶ retry from the last checkpoint
"""

import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.command import INTERRUPTED, say
from rlx.fleet import wire
from rlx.launch.processes import Process, addresses, table
from rlx.launch.ray_cluster import RayCluster, Running, joined
from rlx.launch.run_secrets import TOKEN, make_secrets
from rlx.run.inputs import INITIAL
from rlx.run.scheduler import ADDRESSES, DONE, FAILED, Ended, processes_of, retry
from rlx.system.jsonl import write_atomically
from rlx.system.signals import interrupts
from rlx.system.workdir_lock import SILENT_SECONDS

_LOOK_SECONDS = 0.3
_LAST_SECONDS = 60.0  # for the other trainer processes to end after the first one has
_PORTS, _PORTS_OF_RUNS = 20_000, 10_000  # between Ray's ports and ephemeral ones


def launch(config: ConfigDict, workdir: Path, flags: Sequence[str], dry_run: bool) -> int:
    """Start a run on the cluster and wait for its end; see `rlx.run.scheduler.launch`."""
    with joined() as cluster:
        run = _RayRun(cluster, config, workdir, flags)
        say(table(run.plan(weights=not dry_run)))
        if dry_run:
            return DONE
        with interrupts(run.interrupt, forward=run.forward):
            outcome = retry(run.attempt, config, workdir)
    if outcome.failure:
        raise UserError(f"{outcome.failure}; logs are in {workdir.absolute() / 'logs'}")
    return outcome.status


class _RayRun:
    """The attempts of one run."""

    def __init__(
        self, cluster: RayCluster, config: ConfigDict, workdir: Path, flags: Sequence[str]
    ):
        self._cluster, self._config, self._flags = cluster, config, flags
        self._workdir = workdir.absolute()
        self._directory = self._workdir / "ray"  # shared by the hosts
        self._running: list[Running] = []
        self._restarts: dict[str, int] = {}  # by name of a server
        self._signal: int = signal.SIGINT
        self._stop, self._lost = Event(), False  # whether the host of trainer 0 is gone

    def plan(self, weights: bool = True) -> tuple[Process, ...]:
        """Plan the processes on the current nodes; raise UserError if they do not fit."""
        hosts, port = self._cluster.hosts(), _PORTS + secrets.randbelow(_PORTS_OF_RUNS)
        args = self._config, self._workdir, self._flags, hosts, self._directory, port
        plan = processes_of(*args, weights=weights)
        self._cluster.check(plan)
        return plan

    def attempt(self) -> Ended:
        """Run the processes until the trainer's have ended."""
        if self._lost:  # until then another host cannot lock the workdir
            self._stop.wait(SILENT_SECONDS)
        try:
            if self._stop.is_set():
                return Ended(INTERRUPTED)
            self._start_when_it_fits()
            trainers = self._follow()
        finally:
            self._cluster.end(self._running)
        status, self._lost = trainers[0].code, bool(trainers[0].lost)
        if status in (DONE, INTERRUPTED) or self._stop.is_set():
            return Ended(DONE if status == DONE else INTERRUPTED)
        wrong = "; ".join(f"{one.name} {one.ending}" for one in trainers if one.code != DONE)
        by_itself = all(one.code is not None and one.code >= 0 for one in trainers)
        return Ended(FAILED, f"the run ended: {wrong}", by_itself)

    def forward(self, number: int) -> None:
        """Keep a signal for the trainer, whose deadline depends on it."""
        self._signal = number

    def interrupt(self) -> None:
        """Ask the trainer to finish its step; end at once if it has not started."""
        self._stop.set()
        if not self._running:
            signal.raise_signal(signal.SIGINT)  # as the second one would

    def _start_when_it_fits(self) -> None:
        """Start the processes; wait for more nodes if there are too few."""
        seconds = self._config.scheduler.wait_seconds
        deadline, messages = time.monotonic() + seconds, set[str]()
        while True:
            try:
                return self._start(self.plan())
            except UserError as error:
                if time.monotonic() > deadline or self._stop.is_set():
                    raise
                if str(error) not in messages:
                    say(f"waiting {seconds:g} s for nodes: {error}")
                messages.add(str(error))
            time.sleep(1.0)

    def _start(self, plan: Sequence[Process]) -> None:
        self._hosts = tuple(self._cluster.hosts())  # later ones have no certificate
        make_secrets(self._directory, self._hosts)
        self._environment = {wire.TOKEN_VARIABLE: (self._directory / TOKEN).read_text()}
        self._running = []  # the last attempt's have ended
        self._running = self._cluster.place(plan, self._config.scheduler.wait_seconds)
        self._addresses = ""
        self._write_addresses()
        for one in self._running:
            if one.process.role == "trainer":
                self._begin(one)

    def _begin(self, one: Running) -> None:
        log = self._workdir / "logs" / f"{one.name.replace(' ', '-')}.log"
        self._cluster.start(one, self._environment, log)

    def _write_addresses(self) -> None:
        """Write the servers' addresses into the file that trainer 0 polls, if they changed."""
        text = "".join(f"{a}\n" for a in addresses([one.process for one in self._running]))
        if text != self._addresses:
            write_atomically(self._directory / ADDRESSES, text.encode())
        self._addresses = text

    def _follow(self) -> list[Running]:
        """Watch all processes; return the trainer's once they have ended."""
        trainers = [one for one in self._running if one.process.role == "trainer"]
        end, interrupted = None, False
        while not all(one.over for one in trainers) and (not end or time.monotonic() < end):
            random, weights = self._config.model.random_init, (self._workdir / INITIAL).is_dir()
            for one in self._running:
                if not one.reply and (weights or not random):  # the trainer writes random weights
                    self._begin(one)
            if self._stop.is_set() and not interrupted:  # a signal handler must not call Ray
                self._cluster.signal(trainers[0], self._signal)
                interrupted = True
            self._cluster.look(self._running, _LOOK_SECONDS)
            for one in self._running:
                for line in one.lines:
                    say(f"{one.name} | {line}")
            if any(one.over for one in trainers):
                end = end or time.monotonic() + _LAST_SECONDS
            else:
                self._replace_ended()
                self._write_addresses()
        return trainers

    def _replace_ended(self) -> None:
        for i, one in enumerate(self._running):
            if not one.over:
                continue
            restarts = self._restarts[one.name] = self._restarts.get(one.name, 0) + 1
            failed = restarts == 1 and one.code is not None and not one.ready  # to start
            if failed or restarts > self._config.fleet.max_restarts:
                raise UserError(f"{one.name} on {one.process.host} {one.ending}")
            say(f"{one.name} on {one.process.host} {one.ending}; starting another")
            self._cluster.end([one])
            self._running[i] = self._cluster.again(one.process, self._hosts)
            self._begin(self._running[i])
