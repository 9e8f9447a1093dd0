"""Run workflows on a thread that keeps the fleet busy and fills the buffer.

    trainer thread                     executor thread (one asyncio loop)

    set_version(v) ──────────────────▶ admit while capacity > 0
                                         │  one task per prompt: workflow.run → group
                                         ├─ accepted ─▶ buffer ──┐
                                         ├─ rejected: next prompt│
                                         └─ failed: later again, │ finally skipped;
    collect() ◀── the next batch ────────────────────────────────┘ too many end the run

`staleness.py` decides how many prompts to admit, `buffer.py` which groups form a batch. Both
threads change that state, under one lock that neither holds while it waits for anything else.

Evaluations run on executors with max_staleness = ∞ and finite rows, several on one loop
(rlx/evaluation/runner.py).
"""

import asyncio
import dataclasses
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, cast

from rlx.algorithms.advantages import running_baselines
from rlx.base import Group, Unavailable, UserError, seed_of
from rlx.journal.history import Samples
from rlx.observe import traces
from rlx.rollout import attempts, concurrency, staleness, workflows
from rlx.rollout import buffer as buffers
from rlx.rollout.attempts import Patience, Skipped
from rlx.rollout.concurrency import Observation
from rlx.rollout.data import Cursor
from rlx.rollout.staleness import Limits, Staleness
from rlx.rollout.unfinished import Unfinished
from rlx.rollout.workflow_checks import checked_group
from rlx.rollout.workflows import Generator, Task, Workflow
from rlx.system.threads import LoopThread

_ADMIT_AT_ONCE = 64  # tasks to start before the loop serves the network again
_POLL_SECONDS = 0.5  # until a waiting trainer notices a dead executor
_COUNTED = ("admitted", "rejected", "failed", "skipped")  # kept in checkpoints
_REJECTIONS = 20  # batches of rejected groups in a row that end the run
_END_SECONDS = 6.0  # for cancelled rollouts and their workflow to end
_TIMER_SECONDS = 0.01  # a timer may fire this much early


class Exhausted(Exception):
    """The data is solved: all answers are as good as the best so far, and no more batch fills."""


class RowSource(Protocol):
    """The part of `data.Cursor` that an executor needs; an evaluation has rows of its own."""

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """Return (group_id, row) of the next prompt; raise StopIteration where there is none."""

    def row(self, position: int, /) -> Mapping[str, Any]:
        """Return the row of a group_id that `next` has returned."""

    def index(self, position: int, /) -> int:
        """Return the row's index in its dataset, for messages."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """One attempt at one prompt, admitted at `version`."""

    group_id: int
    attempt: int = 0
    version: int = -1


class Executor:
    """Admits prompts, runs workflows, and hands out batches of groups."""

    def __init__(
        self,
        workflow: Workflow,
        rows: RowSource,  # a data.Cursor, if `state` is used
        limits: Limits,
        fleet: Generator,  # used on the executor's loop only
        *,
        seed: int = 0,  # of the run
        # Every batch lags by exactly max_staleness. For experiments: it idles the fleet.
        force_staleness: bool = False,
        patience: Patience | None = None,
        max_tokens: int = 0,  # of a trajectory; 0: no limit
        # These four are called on the loop's thread.
        on_skip: Callable[[Skipped], None] = lambda skipped: None,  # a prompt is given up
        # A prompt's trajectories are not trained on, for this reason.
        on_drop: Callable[[int, str], None] = lambda group_id, why: None,
        say: Callable[[str], None] = lambda text: None,  # takes a line for the user
        on_change: Callable[[], None] = lambda: None,  # a group is accepted, or the executor stops
        # As of Journal.append: (kind, fields, group) → number of the record, −1 without a journal.
        note: Callable[..., int] = lambda *event: -1,
        drop_equal_rewards: bool = False,  # reject groups with equal rewards (dynamic sampling)
        request_timeout: float | None = 600.0,  # seconds of an attempt
        keep_tokens: bool = False,  # of unfinished samples, in the journal; for Fleet only
        running_mean: float = 0.0,  # decay of the means that are baselines; 0: no baselines
        loop: LoopThread | None = None,  # one that the caller starts and ends
        tracer: Any = None,  # of `observe.traces.tracing`
        clock: Callable[[], float] = time.monotonic,
    ):
        self.workflow, self.fleet, self._owns_loop = workflow, fleet, loop is None
        self.loop = loop or LoopThread("executor")
        self._rows, self._limits, self._seed, self._clock = rows, limits, seed, clock
        self._cursor = rows if isinstance(rows, Cursor) else None
        self._patience, self._request_timeout = patience or Patience(), request_timeout
        self._on_skip, self._on_drop = on_skip, on_drop
        self._say, self._on_change, self._note = say, on_change, note
        self._max_tokens, self._drop_equal_rewards = max_tokens, drop_equal_rewards
        self._force_staleness, self._running_mean = force_staleness, running_mean
        self._keep_tokens, self.unfinished = keep_tokens, Unfinished(note)
        self._tracer = tracer

        self._changed = threading.Condition()  # guards everything below
        self._staleness, self._buffer = Staleness(), buffers.Buffer()
        self._repeated = deque[list[Group]]()  # the first batches, as a killed process took them
        # Live or finished group → number of its first record that `restore` needs, or an earlier.
        self._first_records: dict[int, int] = {}
        self._live: dict[int, Ticket] = {}
        self._resumed = deque[Ticket]()  # prompts that keep their versions, oldest first
        self._retry: list[Ticket] = []  # a heap of prompts to start again, oldest first
        self._later: list[tuple[float, Ticket]] = []  # a heap of (time, prompt) to start again
        self._open = self._stopped = self._closing = False
        self._error: BaseException | None = None
        self._raised_at: TracebackType | None = None  # where the error was first raised
        live = min(limits.concurrency, (limits.max_staleness + 1) * limits.batch_prompts)
        self._failures = attempts.Failures(self._patience, max(1, int(live)))
        self._rejected: list[float] = []  # rewards of groups rejected since the last accepted one
        self._rejected_since = 0.0
        self._best = -math.inf  # reward of any trajectory
        self._means: Mapping[str, float] = {}
        self._dropped = 0
        self._generated_tokens, self._wait_seconds, self._idle_seconds = 0, 0.0, 0.0
        self._idle_since: float | None = None
        self._tasks: dict[asyncio.Task, tuple[str, float]] = {}  # row, and start time

    def start(self) -> None:
        """Start the loop's thread, unless the caller owns it."""
        if self._owns_loop:
            self.loop.start()

    def close(self) -> None:
        """Cancel unfinished rollouts and close the workflow; the caller closes the fleet."""
        self.stop_admitting()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            if self.loop.alive:
                self.loop.run(self._end_attempts(), _END_SECONDS)
        except TimeoutError:
            self._say("cancelled rollouts are still running; they end with this process")
        finally:
            if self._owns_loop:
                self.loop.close()

    # Methods for the trainer's thread; `set_version` and `wake` for any thread.

    def set_version(self, version: int) -> None:
        """Record that every live server has acknowledged `version`; the first begins admission."""
        with self._changed:
            self._staleness = staleness.publish(self._staleness, version)
            if not self._stopped:
                self._open = True
            self._changed.notify_all()
        self.wake()

    def wake(self) -> None:
        """Look for prompts to admit; call it when `rows` has new ones."""
        self.loop.call_soon(self._admit)

    def tune(self, waited: float, queued: int) -> int:
        """Let the number of live prompts follow a step, as of `Observation`; return it."""
        with self._changed:
            before, observation = self._limits, Observation(waited, queued, self._staleness.running)
            self._limits = now = concurrency.follow(before, observation)
            if now != before:
                self._note("concurrency", {"prompts": now.concurrency})
        self.wake()
        return now.concurrency

    def stop_admitting(self) -> None:
        """Start no more prompts; unfinished ones continue."""
        with self._changed:
            self._open, self._stopped = False, True

    def collect(self, timeout: float = math.inf) -> list[Group] | None:
        """Wait for the next batch; return its groups by group_id, or None after `timeout` seconds.

        Raises RolloutError or UserError after too many failures, with the last one as the cause;
        Unavailable if no attempt can succeed any more; Exhausted if no batch is left.
        """
        start = self._clock()
        with self._changed:
            try:
                while not self._ready():
                    left = min(_POLL_SECONDS, start + timeout - self._clock())
                    if left <= 0:
                        return None
                    self._changed.wait(left)
                step = self._staleness.consumed
                if self._repeated:
                    batch = self._repeated.popleft()
                else:
                    self._buffer, batch = buffers.take(self._buffer, step, self._limits)
                self._staleness = staleness.consume(self._staleness, self._limits)
                for group_id in (ids := [group.group_id for group in batch]):
                    self._first_records.pop(group_id, None)
                if self._cursor:
                    self._cursor.forget(ids)
                self._note("take", {"step": step, "groups": ids})
                if decay := self._running_mean:
                    self._means, batch = running_baselines(self._means, batch, decay)
                return batch
            finally:
                self._wait_seconds += self._clock() - start

    @property
    def version(self) -> int:
        """Return the newest version that every live server has acknowledged."""
        with self._changed:
            return self._staleness.version

    def counters(self) -> dict[str, float]:
        """Return the run's totals of events, and this process's totals of tokens and seconds."""
        with self._changed:
            state, buffered = self._staleness, self._buffered
            consumed = state.consumed * self._limits.batch_prompts
            idle = self._idle_seconds
            if self._idle_since is not None:
                idle += self._clock() - self._idle_since
            return {
                **{event: getattr(state, event) for event in (*_COUNTED, "accepted")},
                "dropped": self._dropped + state.accepted - consumed - buffered,  # not trained on
                "running": state.running,
                "buffered": buffered,
                "passed_rows": self._cursor.place - self._cursor.position if self._cursor else 0,
                "generated_tokens": self._generated_tokens - self.unfinished.continued,
                "continued_tokens": self.unfinished.continued,  # of a killed process's samples
                "repeated_tokens": self.unfinished.repeated,  # of a killed process's samples
                "wait_seconds": self._wait_seconds,  # the trainer's
                "idle_seconds": idle,  # without any live prompt
            }

    @property
    def _buffered(self) -> int:
        return self._buffer.num_finished + sum(map(len, self._repeated))

    def under_way(self) -> list[tuple[asyncio.Task, str, float]]:
        """Return (task, row, start time) of each unfinished attempt, oldest first."""
        return [(task, *about) for task, about in list(self._tasks.items())]

    def state(self) -> dict[str, Any]:
        """Return JSON-able facts for `restore`; the journal has the finished groups.

        Call it when the last collected batch has been trained on.
        """
        with self._changed:
            admitted = [*self._live.values(), *self._resumed]
            waiting = [*admitted, *self._retry, *(ticket for _, ticket in self._later)]
            pending = [(t.group_id, t.attempt) for t in waiting]  # start again, with the same seeds
            number = self._note("state", {"step": self._staleness.consumed})
            first = min(self._first_records.values(), default=number)
            return {
                "step": self._staleness.consumed,
                "cursor": cast(Cursor, self._rows).state_dict(),
                "pending": [list(pair) for pair in sorted(pending)],
                "admitted_at": [[t.group_id, t.version] for t in admitted],
                "buffered": [group.group_id for group in buffers.groups(self._buffer)],
                "order": [[group.group_id for group in batch] for batch in self._repeated],
                # The first record that `restore` may need, and the last before this state.
                "journal": [first, number] if number >= 0 else None,
                **{event: getattr(self._staleness, event) for event in _COUNTED},
                "dropped": self._dropped,
                "means": dict(self._means),
                "best_reward": self._best_reward(),
                "concurrency": self._limits.concurrency,
            }

    def restore(
        self,
        host: Mapping[str, Any],  # from `state`, or `journal.history.recover`
        groups: Iterable[Group],  # those of `buffered` and `order` in `host` that are known
        allow_change: bool = False,  # else a changed dataset is a UserError
        samples: Mapping[int, Samples] | None = None,  # group_id → its unfinished samples
    ) -> str:
        """Resume from a `state` before the first `set_version`; return how rows changed, or "".

        Batches that were taken after the state come first and unchanged. Finished groups that are
        missing, or that a lowered max_staleness makes too old, are generated again. Prompts that
        had failed keep the attempts they had left, at least one.
        """
        with self._changed:
            if self._open or self._staleness.admitted:
                raise RuntimeError("restore comes before the first set_version")
            step = int(host["step"])
            if self._limits.samples and "concurrency" in host:
                self._limits = concurrency.resumed_limits(self._limits, int(host["concurrency"]))
            changed = cast(Cursor, self._rows).load_state_dict(host["cursor"], allow_change)
            known = {group.group_id: group for group in groups}
            finished = [*host["buffered"], *(g for ids in host["order"] for g in ids)]
            self._repeated = deque(buffers.repeat_batches(known, host["order"], step, self._limits))
            present = {group.group_id for batch in self._repeated for group in batch}
            step_after = step + len(self._repeated)
            rest = [group for group_id, group in known.items() if group_id not in present]
            self._buffer, _ = buffers.restore(rest, step_after, self._limits)
            present |= {group.group_id for group in buffers.groups(self._buffer)}
            needed = {*present, *finished, *(group_id for group_id, _ in host["pending"])}
            cast(Cursor, self._rows).forget_all_but(needed)
            lost = [group_id for group_id in finished if group_id not in present]
            self._staleness = dataclasses.replace(
                staleness.resume(step, self._buffered, self._limits),
                **{event: int(host[event]) for event in _COUNTED},
            )
            self._dropped = int(host["dropped"]) + len(lost)
            self._means = dict(host["means"])
            self._best = -math.inf if host["best_reward"] is None else float(host["best_reward"])
            samples = samples if samples and self._keep_tokens else {}
            versions = self._kept_versions(host, step_after, samples)
            # A sample that continues after a prefill has logprobs with other last bits, and
            # synchronous batches must be bitwise those of an undisturbed run.
            self.unfinished.restore(samples, versions, ended=self._limits.max_staleness == 0)
            tickets = sorted(Ticket(g, a, versions.get(g, -1)) for g, a in host["pending"])
            self._resumed = deque(ticket for ticket in tickets if ticket.version >= 0)
            self._retry = [t for t in tickets if t.version < 0] + [Ticket(g) for g in lost]
            heapq.heapify(self._retry)
            self._first_records = dict.fromkeys({*present, *versions}, (host["journal"] or (0,))[0])
            return changed

    @property
    def num_repeated(self) -> int:
        """Batches still to come that a killed process took."""
        return len(self._repeated)

    # Methods for the loop's thread.

    async def _end_attempts(self) -> None:
        self.unfinished.write()
        under_way = list(self._tasks)
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way, timeout=_END_SECONDS / 2)
        await workflows.close(self.workflow)

    def _kept_versions(
        self, host: Mapping[str, Any], step: int, samples: Mapping[int, Samples]
    ) -> dict[int, int]:
        """Return group_id → version of prompts to admit again at their old versions."""
        versions, buffer = dict[int, int](), self._buffer
        for group_id, version in host["admitted_at"]:
            pieces = [piece for sample in samples.get(group_id, {}).values() for piece in sample]
            newest = max([version, *(int(v) for p in pieces for v in p.columns["versions"][-1:])])
            # Batches that cannot be repeated leave tokens of weights that never come back.
            if newest <= step:
                versions[group_id], buffer = version, buffers.admit(buffer, version)
        # Smaller limits may leave no batch for them; then they are admitted at new versions.
        return versions if buffers.fits(buffer, step, self._limits) else {}

    def _admit(self) -> None:
        """Start as many prompts as the rules allow, and serve the network in between."""
        with self._changed:
            for _ in range(_ADMIT_AT_ONCE):
                room = staleness.capacity(self._staleness, self._limits)
                if not self._open or self._error is not None or room < 1:
                    return
                try:
                    ticket = self._next_ticket()
                except StopIteration:
                    return
                self._staleness = staleness.admit(self._staleness, self._limits)
                self._buffer = buffers.admit(self._buffer, ticket.version)
                self._live[ticket.group_id] = ticket
                kept = ticket.group_id in self._first_records  # resumed with its tokens
                about = dataclasses.asdict(ticket) | {"kept": kept}
                about |= self._cursor.drawn(ticket.group_id) if self._cursor else {}
                self._first_records.setdefault(ticket.group_id, self._note("admit", about))
                if self._idle_since is not None:
                    self._idle_seconds += self._clock() - self._idle_since
                    self._idle_since = None
                task = asyncio.get_running_loop().create_task(self._attempt(ticket))
                row = f"row {self._rows.index(ticket.group_id)}"
                self._tasks[task] = row, self._clock()  # the loop itself keeps weak references
                task.add_done_callback(self._report_bug)
        asyncio.get_running_loop().call_soon(self._admit)

    def _next_ticket(self) -> Ticket:
        version = self._staleness.version
        while self._later and self._later[0][0] <= self._clock():
            heapq.heappush(self._retry, heapq.heappop(self._later)[1])
        if self._resumed:
            if self._resumed[0].version > version:  # repeated batches publish it first
                raise StopIteration
            return self._resumed.popleft()
        if self._retry:
            return dataclasses.replace(heapq.heappop(self._retry), version=version)
        places = self._staleness.running + len(self._later)
        in_outage = self._failures.outage_seconds(self._clock()) is not None
        if in_outage and places >= self._failures.room:
            raise StopIteration  # prompts that wait for the end of an outage take up places
        return Ticket(self._rows.next()[0], 0, version)

    async def _attempt(self, ticket: Ticket) -> None:
        seed = group_seed(self._seed, ticket.group_id, ticket.attempt)
        row, index = self._rows.row(ticket.group_id), self._rows.index(ticket.group_id)
        limit, start = asyncio.timeout(self._request_timeout), self._clock()
        fleet: Generator = self.fleet
        about = dataclasses.asdict(ticket) if self._tracer else {}
        if self._keep_tokens:
            fleet = self.unfinished.begin(ticket.group_id, fleet, seed)
        try:
            with traces.span("rollout", self._tracer, row=index, **about):
                async with limit:
                    task = Task(row, ticket.group_id, seed, version=ticket.version)
                    group = await checked_group(self.workflow, fleet, task, self._max_tokens)
        except asyncio.CancelledError as error:
            if self._closing or self.loop.ending:
                raise
            within = RuntimeError(f"the workflow was cancelled from within: {error}")
            self._fail(ticket, row, within, start)
        except Exception as error:
            seconds = f"rollout.request_timeout_seconds={self._request_timeout}"
            slow = TimeoutError(f"it took longer than {seconds}")
            self._fail(ticket, row, slow if limit.expired() else error, start)
        else:
            self._finish(ticket, group, start)
        self._admit()

    def _finish(self, ticket: Ticket, group: Group, start: float) -> None:
        runs: dict[str, list[float]] = {}
        for t in group.trajectories:
            runs.setdefault(t.run_id, []).extend(t.turn_rewards or (t.reward,))
        # Discounted returns differ between turns; they teach nothing if they do so in each run.
        returns = {tuple(dict.fromkeys(each)) for each in runs.values()}
        rewards = {reward for each in returns for reward in each}
        equal = len(rewards) == 1 or len(returns) == 1 < len(runs)
        rejected, highest = self._drop_equal_rewards and equal, max(rewards)
        with self._changed:
            self._leave(ticket, finished=True)
            self._first_records.pop(ticket.group_id, None)
            first, now = ticket.attempt == 0, self._clock()
            message = self._failures.add(ticket.group_id, False, first, start, now)
            self._best = max(self._best, float(highest))
            about = {"group_id": ticket.group_id, "best": self._best_reward()}
            about |= self._note_pool(ticket.group_id, equal, highest)
            self._generated_tokens += sum(int((t.versions >= 0).sum()) for t in group.trajectories)
            if rejected:
                self._buffer = buffers.withdraw(self._buffer, ticket.version)
                self._staleness = staleness.end(self._staleness, "rejected")
                self._note("reject", about)
                self._count_rejection(highest)
                if self._cursor:
                    self._cursor.forget([ticket.group_id])
            else:
                self._buffer = buffers.finish(self._buffer, ticket.version, group)
                self._staleness = staleness.end(self._staleness, "accepted")
                self._first_records[ticket.group_id] = self._note("group", about, group)
                self._rejected.clear()
            self._changed.notify_all()
        if rejected:
            self._on_drop(ticket.group_id, "all rewards of its group are equal")
        if message:
            self._say(message)
        self._on_change()

    def _note_pool(self, group_id: int, equal: bool, highest: float) -> dict[str, Any]:
        """Note the row's pool where rows are drawn by theirs; return it for the journal."""
        if not (self._cursor and self._cursor.adapts):
            return {}
        pool = "" if not equal else "easy" if highest > 0 and highest >= self._best else "hard"
        return {"pool": [self._cursor.note_pool(group_id, pool), pool]}

    def _best_reward(self) -> float | None:
        return self._best if math.isfinite(self._best) else None

    def _count_rejection(self, reward: float) -> None:
        """End the run after too many rejections in a row, in an error unless the data is solved."""
        if not self._rejected:
            self._rejected_since = self._clock()
        self._rejected.append(reward)
        if len(self._rejected) < _REJECTIONS * self._limits.batch_prompts:
            return
        right = sum(r >= self._best for r in self._rejected)
        reason = (
            f"the last {len(self._rejected)} groups were all rejected because their rewards are "
            f"equal (the last: all {reward:g})"
        )
        learned = self._staleness.consumed > 0
        if learned and 2 * right >= len(self._rejected):  # the data is solved
            self._stop(Exhausted(f"{reason}, {right} of them at the best reward, {self._best:g}"))
            return
        # A judge that is down may give all answers the same reward for a while.
        if self._clock() - self._rejected_since < self._patience.outage:
            return
        remedy = "choose easier data, or check the reward function"
        if learned:
            remedy = f"no answer gets {self._best:g} any more; lower the learning rate"
        what = f"{reason}, so no batch fills; {remedy}, choose harder data where all are right"
        self._stop(UserError(f"{what}, or set algorithm.drop_equal_rewards=False"))

    def _fail(self, ticket: Ticket, row: Mapping[str, Any], error: Exception, start: float) -> None:
        """Retry the prompt later, skip it, or end the run when too many fail for too long."""
        now, index = self._clock(), self._rows.index(ticket.group_id)
        text = attempts.describe(row)
        name = f"row {index}" if text in str(error) else f"row {index} {text}"
        unavailable = isinstance(error, Unavailable)
        with self._changed:
            if unavailable:  # the next start continues what this attempt has
                self.unfinished.write()
            self._leave(ticket)
            self._buffer = buffers.withdraw(self._buffer, ticket.version)
            message = self._failures.add(ticket.group_id, True, ticket.attempt == 0, start, now)
            lasted = self._failures.outage_seconds(now)
            failed = 0 if lasted is not None else ticket.attempt + 1  # counted against the prompt
            again = Ticket(ticket.group_id, failed or ticket.attempt)
            fatal: BaseException | None = self._error or (error if unavailable else None)
            fatal = fatal or self._failures.verdict(error, name, now)
            skipped = fatal is None and self._patience.over(failed, error)
            self._staleness = staleness.end(self._staleness, "skipped" if skipped else "failed")
            left = again if fatal is None else Ticket(ticket.group_id, ticket.attempt)
            if unavailable:  # `state` has its version and the first of its records
                self._resumed.append(ticket)
            else:
                self._first_records.pop(ticket.group_id, None)
                about = {"group_id": left.group_id, "attempt": left.attempt}
                self._note("skip" if skipped else "fail", about)
            if fatal is not None:
                self._retry += [left] * (not unavailable)
                self._stop(fatal)
            elif not skipped:
                pause = self._patience.back_off(ticket.attempt + 1, lasted or 0.0, again.group_id)
                heapq.heappush(self._later, (now + pause, again))
                loop = asyncio.get_running_loop()
                loop.call_later(pause + _TIMER_SECONDS, self._admit)  # there may be no other rows
        if message:
            self._say(f"{message}; the last one, {name}: {attempts.why(error)}")
        if skipped:
            skip = Skipped(again.group_id, index, row, ticket.attempt + 1, error)
            self._on_skip(skip)
            self._on_drop(again.group_id, f"its group failed: {skip}")

    def _leave(self, ticket: Ticket, finished: bool = False) -> None:
        self.unfinished.end(ticket.group_id, finished)
        del self._live[ticket.group_id]
        if not self._live:
            self._idle_since = self._clock()

    def _report_bug(self, task: asyncio.Task) -> None:
        """Pass an exception that escaped an attempt, which is a bug, to the trainer."""
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
        if self._repeated and self._error is None and self.loop.alive:
            return True
        ready = buffers.ready(self._buffer, self._staleness.consumed, self._limits)
        full = staleness.full(self._staleness, self._limits)  # with fewer steps than before, too
        if (self._resumed or self._force_staleness) and not full:
            ready = False
        if self._error is not None and not (ready and isinstance(self._error, Exhausted)):
            # Without this, each call would add its frames to the traceback.
            raise self._error.with_traceback(self._raised_at)
        if not self.loop.alive:
            raise RuntimeError("the executor's thread is not running")
        return ready


def group_seed(seed: int, group_id: int, attempt: int) -> int:
    """Return a sampling seed in [0, 2³¹), a hash of the run's seed, the group and the attempt."""
    # A retry samples anew: a completion that hung its reward function would hang it again.
    return seed_of(f"{seed} {group_id} {attempt}".encode())
