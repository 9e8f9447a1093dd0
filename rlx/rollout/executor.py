"""The runner of workflows: a thread that keeps the fleet busy and fills the buffer.

    trainer thread                     executor thread (one asyncio loop)

    set_version(v) ──────────────────▶ admit while capacity > 0
                                         │  a task a prompt: workflow.run → group
                                         ├─ accepted ─▶ buffer ──┐
                                         ├─ rejected: place free, next prompt
                                         └─ failed: place free, same prompt again later; at
    collect() ◀── the next batch ──────────────────┘    last skipped; too many: the run ends

What may be admitted and what forms a batch is decided by `staleness.py` and `buffer.py`; this
file only feeds them events, under one lock. Both threads read and change the state, never while
waiting for anything else.

Evaluations are executors too, with max_staleness = ∞, rows that end, and counters of their own;
several executors share one loop (rlx/evaluation/runner.py).
"""

import asyncio
import dataclasses
import hashlib
import heapq
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol

from rlx.algorithms.advantages import running_baselines
from rlx.base import Group, Unavailable, UserError
from rlx.rollout import attempts, staleness, workflows
from rlx.rollout import buffer as buffers
from rlx.rollout.attempts import Patience, Skipped
from rlx.rollout.data import Cursor
from rlx.rollout.staleness import Limits, Staleness
from rlx.rollout.workflow_checks import checked
from rlx.rollout.workflows import Generator, Task, Workflow
from rlx.system.loop_thread import LoopThread

_ADMIT_AT_ONCE = 64  # tasks started before the loop serves the network again
_POLL_SECONDS = 0.5  # until a waiting trainer notices a dead executor
_COUNTED = ("admitted", "rejected", "failed", "skipped")  # since step 0, in checkpoints
_REJECTIONS = 20  # batches' worth of rejected groups in a row that end the run
_END_SECONDS = 6.0  # that rollouts and their workflow have to end once they are cancelled
_TIMER_SECONDS = 0.01  # a timer may fire a little before its time


class Exhausted(Exception):
    """All answers are as good as the best so far: no further batch will fill, and none need to."""


class RowSource(Protocol):
    """Rows as far as an executor uses them; `data.Cursor` is one, and can be saved too."""

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """Return (group_id, row) of the next prompt; raise StopIteration where there is none."""

    def row(self, position: int, /) -> Mapping[str, Any]:
        """Return the row of a group_id that was dealt."""

    def index(self, position: int, /) -> int:
        """Return the row's place in its dataset, for messages."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """One attempt at one prompt, admitted at `version`."""

    group_id: int
    attempt: int = 0
    version: int = -1


class Executor:
    """Admits prompts, runs workflows, and hands out batches of groups.

    Admission begins with the first `set_version`, when the fleet has its first weights.

    Args:
      workflow: makes a group of a row.
      rows: deals out the rows; a `data.Cursor` where `state` is asked for.
      limits: batch size, staleness bound, concurrency.
      fleet: passed to the workflow; used on the executor's loop only.
      seed: of the run; a group's seed is a function of it, the group's id and the attempt.
      force_staleness: hand out a batch only when all that may be admitted has finished, so that
        every batch lags by `limits.max_staleness` exactly. For experiments: it idles the fleet.
      patience: with failed attempts.
      max_tokens: of a trajectory, as training has room for; 0: any number.
      on_skip: takes a prompt that is given up, on the loop's thread.
      say: takes a line for the user, likewise.
      on_change: called on the loop's thread when a group is accepted or the executor has stopped.
      drop_equal_rewards: reject groups whose rewards are all equal (dynamic sampling).
      request_timeout: seconds for one attempt, after which it has failed; None: it may take any.
      running_mean: decay of the means that are the trajectories' baselines; 0: they have none.
      keep_versions: whether prompts under way may go on after a restart with tokens that they had,
        and are admitted again at the versions of before.
      loop: that it runs on, started and ended by the caller; None: one of its own.
      clock: seconds, monotonic.

    Attributes:
      loop, fleet, workflow: as given.
    """

    def __init__(
        self,
        workflow: Workflow,
        rows: RowSource,
        limits: Limits,
        fleet: Generator,
        *,
        seed: int = 0,
        force_staleness: bool = False,
        patience: Patience | None = None,
        max_tokens: int = 0,
        on_skip: Callable[[Skipped], None] = lambda skipped: None,
        say: Callable[[str], None] = lambda text: None,
        on_change: Callable[[], None] = lambda: None,
        drop_equal_rewards: bool = False,
        request_timeout: float | None = 600.0,
        keep_versions: bool = False,
        running_mean: float = 0.0,
        loop: LoopThread | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.workflow, self.fleet, self._owns_loop = workflow, fleet, loop is None
        self.loop = loop or LoopThread("executor")
        self._rows, self._limits, self._seed, self._clock = rows, limits, seed, clock
        self._patience, self._request_timeout = patience or Patience(), request_timeout
        self._max_tokens, self._on_skip, self._on_change = max_tokens, on_skip, on_change
        self._say = say
        self._drop_equal_rewards = drop_equal_rewards
        self._force_staleness, self._keep_versions = force_staleness, keep_versions
        self._running_mean = running_mean

        self._changed = threading.Condition()  # guards everything below
        self._staleness, self._buffer = Staleness(), buffers.Buffer()
        self._live: dict[int, Ticket] = {}
        self._retry: list[Ticket] = []  # a heap: prompts to start again, oldest first
        self._later: list[tuple[float, Ticket]] = []  # a heap: those whose time has not come
        self._open = self._stopped = self._closing = False
        self._error: BaseException | None = None
        self._raised_at: TracebackType | None = None  # where the error came up first
        live = min(limits.concurrency, (limits.max_staleness + 1) * limits.batch_prompts)
        self._failures = attempts.Failures(self._patience, max(1, int(live)))
        self._rejected: list[float] = []  # rewards of the groups rejected since the last accepted
        self._rejected_since = 0.0
        self._best = -math.inf  # reward of any trajectory
        self._means: Mapping[str, float] = {}
        self._dropped = 0
        self._generated_tokens, self._wait_seconds, self._idle_seconds = 0, 0.0, 0.0
        self._idle_since: float | None = None
        self._tasks: dict[asyncio.Task, tuple[str, float]] = {}  # row, and when it began

    # Life.

    def start(self) -> None:
        """Start the loop's thread; coroutines may be submitted from now on."""
        if self._owns_loop:
            self.loop.start()

    def close(self) -> None:
        """Cancel what is under way and end the workflow. The fleet is the caller's to close."""
        self.stop_admitting()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            if self.loop.alive:
                self.loop.run(self._end_attempts(), _END_SECONDS)
        except TimeoutError:
            self._say("rollouts under way do not end; they are left to the end of the process")
        finally:
            if self._owns_loop:
                self.loop.close()

    def submit(self, coroutine: Coroutine) -> Future:
        """Run `coroutine` on the loop, concurrently with everything else there."""
        return self.loop.submit(coroutine)

    def run(self, coroutine: Coroutine, seconds: float | None = None) -> Any:
        """Run `coroutine` on the loop and wait for its result, as `LoopThread.run`."""
        return self.loop.run(coroutine, seconds)

    # The trainer's side.

    def set_version(self, version: int) -> None:
        """Note that every live server has acknowledged `version`. From any thread."""
        with self._changed:
            self._staleness = staleness.publish(self._staleness, version)
            if not self._stopped:
                self._open = True
            self._changed.notify_all()
        self.wake()

    def wake(self) -> None:
        """Look for prompts to admit; `rows` may have new ones. From any thread."""
        self.loop.call_soon(self._admit)

    def stop_admitting(self) -> None:
        """Start no more prompts; those under way finish."""
        with self._changed:
            self._open, self._stopped = False, True

    def collect(self, timeout: float | None = None) -> list[Group] | None:
        """Wait for the next batch and return it: `limits.batch_prompts` groups by group_id.

        Args:
          timeout: seconds to wait; None: for ever.

        Returns:
          The groups, or None when the time is up.

        Raises:
          RolloutError, UserError: too many failures; the last, with its traceback, is the cause.
          Unavailable: no attempt can succeed any more.
          Exhausted: the data has nothing more to teach, and no batch is left.
        """
        begun = self._clock()
        with self._changed:
            try:
                while not self._ready():
                    left = _POLL_SECONDS
                    if timeout is not None:
                        left = min(left, begun + timeout - self._clock())
                    if left <= 0:
                        return None
                    self._changed.wait(left)
                step = self._staleness.consumed
                self._buffer, batch = buffers.take(self._buffer, step, self._limits)
                self._staleness = staleness.consume(self._staleness, self._limits)
                if decay := self._running_mean:
                    self._means, batch = running_baselines(self._means, batch, decay)
                return batch
            finally:
                self._wait_seconds += self._clock() - begun

    @property
    def version(self) -> int:
        """Return the newest version that every live server has acknowledged."""
        with self._changed:
            return self._staleness.version

    def counters(self) -> dict[str, float]:
        """Return totals: of the run for events, of this process for tokens and seconds.

        `dropped` counts groups that were accepted and are neither trained on nor buffered.
        `wait_seconds` is the trainer's, `idle_seconds` the time without any live prompt.
        """
        with self._changed:
            state, buffered = self._staleness, self._buffer.num_finished
            consumed = state.consumed * self._limits.batch_prompts
            idle = self._idle_seconds
            if self._idle_since is not None:
                idle += self._clock() - self._idle_since
            return {
                "admitted": state.admitted,
                "accepted": state.accepted,
                "rejected": state.rejected,
                "failed": state.failed,
                "skipped": state.skipped,
                "dropped": self._dropped + state.accepted - consumed - buffered,
                "running": state.running,
                "buffered": buffered,
                "generated_tokens": self._generated_tokens,
                "wait_seconds": self._wait_seconds,
                "idle_seconds": idle,
            }

    def under_way(self) -> list[tuple[asyncio.Task, str, float]]:
        """Return task, row, and time of its begin of each attempt under way, oldest first."""
        return [(task, *about) for task, about in list(self._tasks.items())]

    # Checkpoints.

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return what `restore` needs: JSON-able facts, and the groups not yet trained on.

        Take it when the batch collected last has been trained on. Prompts under way are kept by
        their ids and start again, with the same seeds.
        """
        with self._changed:
            waiting = [*self._live.values(), *self._retry, *(ticket for _, ticket in self._later)]
            pending = [(t.group_id, t.attempt) for t in waiting]
            host = {
                "step": self._staleness.consumed,
                "cursor": self._cursor().state_dict(),
                "pending": [list(pair) for pair in sorted(pending)],
                "admitted_at": [[t.group_id, t.version] for t in self._live.values()],
                "admitted": self._staleness.admitted,
                "rejected": self._staleness.rejected,
                "failed": self._staleness.failed,
                "skipped": self._staleness.skipped,
                "dropped": self._dropped,
                "means": dict(self._means),
                "best_reward": self._best if math.isfinite(self._best) else None,
            }
            return host, buffers.groups(self._buffer)

    def restore(
        self, host: Mapping[str, Any], groups: Sequence[Group], allow_change: bool = False
    ) -> str:
        """Continue where `state` was taken; before the first `set_version`.

        Groups that a lowered max_staleness has made too old are generated again (and counted as
        dropped). Prompts that had failed have the attempts that were left to them, at least one.

        Args:
          allow_change: accept a dataset whose rows changed.

        Returns:
          A sentence on what changed in the rows; empty if nothing did.

        Raises:
          UserError: the dataset changed and may not.
        """
        with self._changed:
            if self._open or self._staleness.admitted:
                raise RuntimeError("restore comes before the first set_version")
            step = int(host["step"])
            changed = self._cursor().load_state_dict(host["cursor"], allow_change)
            self._buffer, left_over = buffers.restore(groups, step, self._limits)
            self._staleness = dataclasses.replace(
                staleness.resume(step, self._buffer.num_finished, self._limits),
                **{event: int(host.get(event, 0)) for event in _COUNTED},
            )
            self._dropped = int(host["dropped"]) + len(left_over)
            self._means = dict(host.get("means", {}))
            if host.get("best_reward") is not None:
                self._best = float(host["best_reward"])
            versions = self._kept_versions(host, step)
            self._retry = [Ticket(g, a, versions.get(g, -1)) for g, a in host["pending"]]
            self._retry += [Ticket(g.group_id) for g in left_over]
            heapq.heapify(self._retry)
            return changed

    # The loop's side.

    async def _end_attempts(self) -> None:
        under_way = list(self._tasks)
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way, timeout=_END_SECONDS / 2)
        await workflows.close(self.workflow)

    def _kept_versions(self, host: Mapping[str, Any], step: int) -> dict[int, int]:
        """Return group_id → version of prompts that are admitted at the version of before.

        Where the limits became smaller there may be no batch for these, and they are admitted anew.
        """
        found = dict(host.get("admitted_at", [])) if self._keep_versions else {}
        held = self._buffer
        for version in found.values():
            held = buffers.admit(held, version)
        return found if buffers.fits(held, step, self._limits) else {}

    def _cursor(self) -> Cursor:
        """Return the rows, which can be saved."""
        if not isinstance(self._rows, Cursor):
            raise RuntimeError(f"{type(self._rows).__name__} deals out rows that cannot be saved")
        return self._rows

    def _admit(self) -> None:
        """Start as many prompts as the rules allow, with a look at the network in between."""
        with self._changed:
            for _ in range(_ADMIT_AT_ONCE):
                if not self._may_admit():
                    return
                try:
                    ticket = self._next_ticket()
                except StopIteration:
                    return
                self._staleness = staleness.admit(self._staleness, self._limits)
                self._buffer = buffers.admit(self._buffer, ticket.version)
                self._live[ticket.group_id] = ticket
                self._stop_idling()
                task = asyncio.get_running_loop().create_task(self._attempt(ticket))
                row = f"row {self._rows.index(ticket.group_id)}"
                self._tasks[task] = row, self._clock()  # the loop itself keeps weak references
                task.add_done_callback(self._ended)
        asyncio.get_running_loop().call_soon(self._admit)

    def _may_admit(self) -> bool:
        if not self._open or self._error is not None:
            return False
        return staleness.capacity(self._staleness, self._limits) > 0

    def _next_ticket(self) -> Ticket:
        version = self._staleness.version
        while self._later and self._later[0][0] <= self._clock():
            heapq.heappush(self._retry, heapq.heappop(self._later)[1])
        if self._retry:
            ticket = heapq.heappop(self._retry)
            return dataclasses.replace(ticket, version=version) if ticket.version < 0 else ticket
        held = self._staleness.running + len(self._later)
        if held >= self._failures.room and self._failures.lasted(self._clock()) is not None:
            raise StopIteration  # what waits for the end of an outage has places
        return Ticket(self._rows.next()[0], 0, version)

    async def _attempt(self, ticket: Ticket) -> None:
        seed = group_seed(self._seed, ticket.group_id, ticket.attempt)
        row = self._rows.row(ticket.group_id)
        limit, begun = asyncio.timeout(self._request_timeout), self._clock()
        try:
            async with limit:
                task = Task(row, ticket.group_id, seed, version=ticket.version)
                group = await checked(self.workflow, self.fleet, task, self._max_tokens)
        except asyncio.CancelledError as error:
            if self._closing or self.loop.ending:
                raise
            within = RuntimeError(f"the workflow was cancelled from within: {error}")
            self._fail(ticket, row, within, begun)
        except Exception as error:
            self._fail(ticket, row, self._too_slow() if limit.expired() else error, begun)
        else:
            self._finish(ticket, group, begun)
        self._admit()

    def _too_slow(self) -> TimeoutError:
        limit = f"rollout.request_timeout_seconds={self._request_timeout:g}"
        return TimeoutError(f"it took longer than {limit}")

    def _finish(self, ticket: Ticket, group: Group, begun: float) -> None:
        """Accept or reject a finished group."""
        rewards = {r for t in group.trajectories for r in t.turn_rewards or (t.reward,)}
        with self._changed:
            self._leave(ticket)
            first, now = ticket.attempt == 0, self._clock()
            said = self._failures.add(ticket.group_id, False, first, begun, now)
            self._best = max([self._best, *map(float, rewards)])
            self._generated_tokens += sum(int((t.versions >= 0).sum()) for t in group.trajectories)
            if self._drop_equal_rewards and len(rewards) == 1:
                self._buffer = buffers.withdraw(self._buffer, ticket.version)
                self._staleness = staleness.reject(self._staleness)
                self._count_rejection(rewards.pop())
            else:
                self._buffer = buffers.finish(self._buffer, ticket.version, group)
                self._staleness = staleness.accept(self._staleness)
                self._rejected.clear()
            self._changed.notify_all()
        if said:
            self._say(said)
        self._on_change()

    def _count_rejection(self, reward: float) -> None:
        """End the run when rejections do not end: well if it has solved its data, else in error.

        It has solved them when at least half of these groups are right, that is as good as the best
        answer so far, and it was not so from the beginning. The others are too hard for the model,
        or their judge is down and gives all of them the same.
        """
        if not self._rejected:
            self._rejected_since = self._clock()
        self._rejected.append(reward)
        if len(self._rejected) < _REJECTIONS * self._limits.batch_prompts:
            return
        right = sum(r >= self._best for r in self._rejected)
        found = (
            f"the last {len(self._rejected)} groups were all rejected because their rewards are "
            f"equal (the last: all {reward:g})"
        )
        learned = self._staleness.consumed > 0
        if learned and 2 * right >= len(self._rejected):
            self._stop(Exhausted(f"{found}, {right} of them at the best reward, {self._best:g}"))
            return
        if self._clock() - self._rejected_since < self._patience.outage:
            return
        remedy = "choose easier data, or look at the reward function"
        if learned:
            remedy = f"no answer gets {self._best:g} any more; lower the learning rate"
        self._stop(
            UserError(
                f"{found}, so no batch fills; {remedy}, choose harder data where all are right, or "
                "set algorithm.drop_equal_rewards=False"
            )
        )

    def _fail(self, ticket: Ticket, row: Mapping[str, Any], error: Exception, begun: float) -> None:
        """Queue the prompt again, give it up, or end the run when too many fail for too long."""
        now, index = self._clock(), self._rows.index(ticket.group_id)
        about = attempts.describe(row)
        what = f"row {index}" if about in str(error) else f"row {index} {about}"
        with self._changed:
            self._leave(ticket)
            self._buffer = buffers.withdraw(self._buffer, ticket.version)
            said = self._failures.add(ticket.group_id, True, ticket.attempt == 0, begun, now)
            lasted = self._failures.lasted(now)
            failed = 0 if lasted is not None else ticket.attempt + 1  # that are held against it
            held = Ticket(ticket.group_id, failed or ticket.attempt)
            ended: BaseException | None = self._error
            if isinstance(error, Unavailable):
                ended = ended or error
            ended = ended or self._failures.verdict(error, what, now)
            skipped = ended is None and self._patience.over(failed, error)
            event = staleness.skip if skipped else staleness.fail
            self._staleness = event(self._staleness)
            if ended is not None:
                heapq.heappush(self._retry, Ticket(ticket.group_id, ticket.attempt))
                self._stop(ended)
            elif not skipped:
                pause = self._patience.back_off(ticket.attempt + 1, lasted or 0.0, held.group_id)
                heapq.heappush(self._later, (now + pause, held))
                loop = asyncio.get_running_loop()
                loop.call_later(pause + _TIMER_SECONDS, self._admit)  # there may be no other rows
        if said:
            self._say(f"{said}; the last one, {what}: {attempts.why(error)}")
        if skipped:
            self._on_skip(Skipped(held.group_id, index, row, ticket.attempt + 1, error))

    def _leave(self, ticket: Ticket) -> None:
        del self._live[ticket.group_id]
        if not self._live:
            self._idle_since = self._clock()

    def _stop_idling(self) -> None:
        if self._idle_since is not None:
            self._idle_seconds += self._clock() - self._idle_since
            self._idle_since = None

    def _ended(self, task: asyncio.Task) -> None:
        """Pass an exception that got out of an attempt, which is a bug, to the trainer."""
        del self._tasks[task]
        if not task.cancelled() and task.exception():
            self._stop(task.exception())

    def _stop(self, error: BaseException | None) -> None:
        with self._changed:
            if self._error is None and error is not None:
                self._error, self._raised_at = error, error.__traceback__
            self._changed.notify_all()
        self._on_change()

    def _ready(self) -> bool:
        """Return whether a batch can be taken; raise what ended the run."""
        ready = buffers.ready(self._buffer, self._staleness.consumed, self._limits)
        if any(ticket.version >= 0 for ticket in self._retry):
            ready = False  # they have a batch from here on, and are not in the buffer yet
        if self._force_staleness and not staleness.full(self._staleness, self._limits):
            ready = False
        if self._error is not None and not (ready and isinstance(self._error, Exhausted)):
            # Raised at each call, it would collect the frames of all.
            raise self._error.with_traceback(self._raised_at)
        if not self.loop.alive:
            raise RuntimeError("the executor's thread is not running")
        return ready


def group_seed(seed: int, group_id: int, attempt: int) -> int:
    """Return a sampling seed in [0, 2³¹), a function of the run's seed, the group and the attempt.

    A retry draws anew, because a completion that hung its reward function would hang it again.
    """
    digest = hashlib.blake2b(f"{seed} {group_id} {attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
