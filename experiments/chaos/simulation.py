"""Runs of rlx's own executor, client, service and journal under a virtual clock, with faults.

seed ─▶ Schedule ─▶ World: trainer, servers, network ─▶ what went wrong, "" if nothing

The trainer here trains nothing: it takes batches, publishes and saves in the order of run/loop.py.
"""

import asyncio
import gc
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from experiments.chaos import network
from rlx.base import Group
from rlx.engines import service
from rlx.fleet import balancer, client, member
from rlx.fleet.client import Fleet
from rlx.fleet.publish import Weights
from rlx.fleet.requests import Sampling, Timeouts
from rlx.journal import history, journal
from rlx.rollout.attempts import Patience
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits
from rlx.rollout.workflows import trajectory

ROWS = [{"question": str(i)} for i in range(5)]
LONGEST = 300.0  # virtual seconds; an undisturbed run takes two
_TIMEOUTS = Timeouts(
    connect_seconds=30.0, probe_seconds=1.0, hang_seconds=1.0, publish_timeout_seconds=5.0,
    request=10.0,
)  # fmt: skip
KINDS = (
    "server dies", "server dies unnoticed", "server stops", "connections break", "network is slow",
    "trainer dies", "journal is cut", "journal is damaged", "checkpoint is lost",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Something that breaks at a time, for some seconds; the trainer dies for the last four."""

    at: float
    kind: str
    server: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """All that decides a simulated run."""

    seed: int
    limits: Limits
    faults: tuple[Fault, ...]
    servers: int
    answers: int  # to each prompt
    failing: float  # share of attempts that raise
    slowness: float  # of the network, 1 to 20 ms a message if 1


def schedule(seed: int) -> Schedule:
    """Return the schedule that belongs to a seed."""
    draw = random.Random(seed)
    limits = Limits(draw.randint(1, 2), draw.randint(0, 2), draw.randint(1, 4), draw.randint(1, 3))
    servers = draw.randint(1, 2)
    faults = tuple(
        Fault(draw.uniform(0, 2), draw.choice(KINDS), draw.randrange(servers), draw.uniform(0, 3))
        for _ in range(draw.randint(0, 3))
    )
    slowness = draw.choice((1.0, 1.0, 10.0))
    failing = draw.choice((0.0, 0.0, 0.1))
    return Schedule(seed, limits, faults, servers, draw.randint(1, 2), failing, slowness)


class Records(journal.Journal):
    """A journal in small files that is written at once."""

    def __init__(self, directory: Path, number: int):
        super().__init__(directory, number, 0)
        self._keep, self._most = 1 << 30, 1 << 11

    def append(self, kind: str, fields: Any, group: Group | None = None) -> int:
        """Write a record; return its number."""
        number, self._next = self._next, self._next + 1
        self._write(number, kind, fields, group)
        return number

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)


class World:
    """A run from its first start to its last step; also the workflow, which checks each answer."""

    def __init__(self, plan: Schedule, directory: Path, loop: network.VirtualLoop):
        self.plan, self.directory, self.loop = plan, directory, loop
        self.draw = random.Random(f"{plan.seed} network")
        self.links = [network.Link(loop, self.draw, str(directory)) for _ in range(plan.servers)]
        for link in self.links:
            link.slowness = plan.slowness
        self.checkpoints: list[dict[str, Any]] = []
        self.trained: dict[int, list[Any]] = {}  # step → groups and their tokens
        self.skipped = set[int]()
        self.trainer: asyncio.Task | None = None
        self.down_until, self.damaged = 0.0, False
        self.intact = True  # the next start reads all records since its checkpoint

    async def life(self) -> None:
        """Start the trainer, again after each of its ends, until its last step."""
        faults = [asyncio.create_task(self.break_(fault)) for fault in self.plan.faults]
        while self.trainer is None or self.trainer.cancelled():
            await asyncio.sleep(max(0.0, self.down_until - self.loop.now))
            self.trainer = asyncio.create_task(self.train())
            await asyncio.wait([self.trainer])
        for fault in faults:
            fault.cancel()
        self.trainer.result()

    async def break_(self, fault: Fault) -> None:
        """Do what a fault names, for its time."""
        await asyncio.sleep(fault.at)
        link, kind = self.links[fault.server], fault.kind
        if kind.startswith("server dies"):
            link.kill()
            if kind == "server dies":
                link.cut()
            await asyncio.sleep(fault.seconds)
            link.start()
        elif kind == "server stops":
            link.held_until = max(link.held_until, self.loop.now + fault.seconds)
        elif kind == "connections break":
            link.cut()
        elif kind == "network is slow":
            link.slowness = 30.0
            await asyncio.sleep(fault.seconds)
            link.slowness = self.plan.slowness
        elif self.trainer:
            self.down_until = self.loop.now + fault.seconds
            self.trainer.cancel()
            await asyncio.wait([self.trainer])
            self.damage(kind)

    def damage(self, kind: str) -> None:
        """Damage what a killed trainer has left on disk."""
        files = sorted(self.directory.glob("journal/*.records"))
        if kind == "checkpoint is lost" and len(self.checkpoints) > 1:
            self.checkpoints.pop()
            self.intact = self.intact and not self.damaged  # it may need records that are gone
        if kind == "journal is cut" and files:
            os.truncate(files[-1], self.draw.randint(0, files[-1].stat().st_size))
            self.intact, self.damaged = False, True
        if kind == "journal is damaged" and files:
            path = self.draw.choice(files)
            data = bytearray(path.read_bytes() or b"-")
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(data)
            self.intact, self.damaged = False, True

    async def train(self) -> None:
        """Do what a trainer's process does."""
        plan, place = self.plan, self.directory / "journal"
        thread = SimpleNamespace(call_soon=self.loop.call_soon, alive=True, ending=False)
        addresses = [f"127.0.0.1:{i + 1}" for i in range(plan.servers)]
        fleet = Fleet(addresses, limits=_TIMEOUTS, publish_dir=str(self.directory))
        saved = self.checkpoints[-1] if self.checkpoints else None
        at = history.position(saved)
        _, number = journal.cut(place, at[0] if at else 0)
        records = Records(place, max(number, at[1] + 1 if at else 0))
        executor = Executor(
            self, Cursor(ROWS, plan.seed), plan.limits, fleet, seed=plan.seed,
            patience=Patience(attempts=2, rate=1.0, pause=0.1), loop=thread, clock=self.loop.time,
            request_timeout=None, keep_tokens=True, note=partial(self.note, records, set()),
            on_skip=lambda skipped: self.skipped.add(skipped.group_id),
        )  # fmt: skip
        step, publishing = 0, None
        try:
            step = self.restore(executor, records, saved)
            await fleet.connect()
            await self.publish(fleet, executor, step)
            while step < plan.limits.total_steps:
                if (batch := executor.collect(0.0)) is None:
                    await asyncio.sleep(0.1)
                    continue
                self.judge(step, batch)
                await asyncio.sleep(self.draw.uniform(0.0, 0.4))
                step += 1
                if publishing:
                    await publishing
                publishing = asyncio.create_task(self.publish(fleet, executor, step))
                if step == 1 or self.draw.random() < 0.4:
                    state = json.loads(json.dumps(executor.state()))
                    self.checkpoints = [*self.checkpoints[-1:], state]
            if publishing:
                await publishing
            self.judge_end(executor.state(), fleet)
        finally:
            thread.ending, thread.alive = True, False
            for channel in (c for link in self.links for c in link.channels):
                channel.there.queue.clear()  # a start takes longer than a message
            for task in (*executor._tasks, *([publishing] if publishing else [])):
                task.cancel()
            if timer := executor.unfinished._timer:
                timer.cancel()
            await fleet.close()
            records.close()

    def note(self, records: Records, live: set[int], kind: str, fields: Any, *group: Any) -> int:
        """Check that no prompt is admitted beyond the limit; write a record."""
        if kind == "admit":
            live.add(fields["group_id"])
            assert len(live) <= self.plan.limits.concurrency, f"{len(live)} prompts are live"
        elif kind in ("group", "fail", "skip"):
            live.discard(fields["group_id"])
        return records.append(kind, fields, *group)

    def restore(self, executor: Executor, records: Records, saved: Any) -> int:
        """Restore the executor as run/parts.py does; return the step."""
        found, at = saved or executor.state(), history.position(saved)
        read = (record for record, _ in journal.read(records._directory, at[0] if at else 0))
        recovered = history.recover(found, at, read)
        executor.restore(recovered.host, recovered.groups, samples=recovered.samples)
        step, again = recovered.host["step"], executor.num_repeated
        about = {"step": step, "order": step + again, "whole": recovered.complete}
        records.append("start", about | {"rows": recovered.host["cursor"]["digest"]})
        if self.intact:
            taken = sum(k >= step for k in self.trained)
            assert again == taken, f"{again} of {taken} batches are repeated"
        self.trained = {k: v for k, v in self.trained.items() if k < step + again}
        self.intact = True
        return step

    async def publish(self, fleet: Fleet, executor: Executor, version: int) -> None:
        """Publish a version and make it current."""
        await fleet.publish(version, str(version))
        executor.set_version(version)

    async def run(self, fleet: Fleet, task: Any) -> Group:
        """Return the group of a task, after checking its tokens and their versions."""
        sampling = Sampling(seed=task.seed, max_new_tokens=8)
        found = await fleet.generate([1, 2], sampling, self.plan.answers)
        for index, each in enumerate(found):
            wanted = network.answer(task.seed, index)
            logprobs = np.float32([network.logprob(v) for v in each.versions])
            right = each.tokens.tolist() == wanted and np.array_equal(each.logprobs, logprobs)
            if not right or each.versions.min() < task.version:  # an exception would be retried
                about = {"exception": AssertionError(f"{each} of {task}, instead of {wanted}")}
                self.loop.call_exception_handler(about)
        if random.Random(task.seed).random() < self.plan.failing:
            raise RuntimeError("a judge is down")
        prompt, group = np.array([1, 2], np.int32), task.group_id
        made = (trajectory(prompt, c, float(i), f"{group}.{i}") for i, c in enumerate(found))
        return Group(group, tuple(made), task.row)

    def judge(self, step: int, batch: list[Group]) -> None:
        """Check a batch that is trained on."""
        limits = self.plan.limits
        assert len(batch) == limits.batch_prompts, f"batch {step} has {len(batch)} groups"
        lag = step - min(group.oldest_version for group in batch)
        assert lag <= limits.max_staleness, f"batch {step} lags by {lag}"
        found = [(g.group_id, [t.tokens.tolist() for t in g.trajectories]) for g in batch]
        assert self.trained.setdefault(step, found) == found, f"batch {step} is another one"
        counts = Counter(group for groups in self.trained.values() for group, _ in groups)
        assert max(counts.values()) == 1, f"groups are trained on twice: {counts}"

    def judge_end(self, state: dict[str, Any], fleet: Fleet) -> None:
        """Check that nothing is lost or goes on after the last step."""
        known = {group for groups in self.trained.values() for group, _ in groups} | self.skipped
        known |= {group for group, _ in state["pending"]} | {*state["buffered"]}
        lost = {*range(state["cursor"]["position"])} - known
        assert not lost, f"groups {sorted(lost)} are lost"
        assert len(self.trained) == self.plan.limits.total_steps, "a step is missing"
        load = sum(each.load + each.waits.calls for each in fleet._members)
        assert state["pending"] or not load, "a call goes on"


@contextmanager
def replaced(world: World) -> Iterator[None]:
    """Give rlx's modules the clock and the network of a world, and weights without files."""

    def staged(version: int, source: str, method: str, *_: Any) -> Weights:
        return Weights(version, source, 1, version + 1, method)

    async def verified(service: Any, header: Any) -> str:
        return header.path

    def channel(address: str, *_: Any) -> network.Channel:
        return network.Channel(world.links[int(address.rpartition(":")[2]) - 1])

    clock = SimpleNamespace(
        monotonic=world.loop.time, monotonic_ns=lambda: int(world.loop.now * 1e9)
    )
    with ExitStack() as stack:
        for place, name, value in (
            *((module, "time", clock) for module in (client, balancer, member, service)),
            (client, "stage", staged), (service.RolloutService, "_verified_path", verified),
            (member.transport, "channel", channel), (member.rpc, "RolloutStub", lambda made: made),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def simulate(plan: Schedule) -> str:
    """Run a schedule; return what went wrong, "" if nothing did."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    random.seed(plan.seed)
    loop = network.VirtualLoop()
    world = World(plan, directory, loop)
    try:
        with replaced(world), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(asyncio.wait_for(world.life(), LONGEST))
        return "".join(loop.failures[:1])
    except Exception as error:
        return loop.failures[0] if loop.failures else f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(directory)


def shorter(plan: Schedule) -> Iterator[Schedule]:
    """Yield schedules with a fault, a step, a server or failures less."""
    for i in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])
    if (steps := plan.limits.total_steps or 1) > 1:
        yield replace(plan, limits=replace(plan.limits, total_steps=steps - 1))
    if plan.servers > 1:
        first = tuple(replace(fault, server=0) for fault in plan.faults)
        yield replace(plan, servers=1, faults=first)
    if plan.failing:
        yield replace(plan, failing=0)


def search(seeds: Iterable[int], run: Callable[[Schedule], str] = simulate) -> Iterator[tuple]:
    """Yield (the shortest schedule found, what goes wrong) of each seed that fails."""
    for seed in seeds:
        plan = schedule(seed)
        gc.disable()  # its pauses are a fifth of the time
        what = run(plan)
        gc.enable()
        while what and (found := [(p, text) for p in shorter(plan) if (text := run(p))]):
            plan, what = found[0]
        if what:
            yield plan, what
