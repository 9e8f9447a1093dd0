"""Run workflows over rows without training: submit rows, wait for groups, read statistics.

    with Evaluator(connect, workflow) as evaluator:
        for row in rows:
            evaluator.submit(row, n=8)
        groups = evaluator.wait(len(rows))
        print(evaluator.export_stats())

The runner is training's executor with max_staleness = ∞: same attempts, workflows and rewards.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from rlx.base import Group, info_means
from rlx.fleet.requests import Sampling
from rlx.rollout import workflows
from rlx.rollout.attempts import Patience, Skipped
from rlx.rollout.executor import Executor, group_seed
from rlx.rollout.staleness import Limits
from rlx.rollout.workflow_checks import checked_group
from rlx.rollout.workflows import Generator, Task, Workflow
from rlx.system.threads import LoopThread


@dataclass(eq=False, slots=True)
class _Row:
    """A submitted row, and the future of its group."""

    workflow: Workflow
    task: Task
    future: "Future[Group]"
    attempts: int = 0


class RowRunner:
    """Runs rows that are submitted one by one, each with options of its own."""

    def __init__(
        self, loop: LoopThread, fleet: Generator, *,  # started, and connected on the loop
        concurrency: int,  # rows in work at one time
        patience: Patience,  # a future fails after its last attempt, all once too many do
        timeout: float,  # seconds for one attempt
        say: Callable[[str], None] = lambda text: None,  # takes a line about an outage
    ):  # fmt: skip
        self._open: dict[int, _Row] = {}  # by the executor's group_id
        self._ids, self._waiting = itertools.count(), deque[int]()
        self._loop, self._workflows = loop, list[Workflow]()
        limits = Limits(batch_prompts=1, max_staleness=math.inf, concurrency=concurrency)
        self.executor = Executor(
            self, self, limits, fleet, patience=patience, request_timeout=timeout, loop=loop,
            on_skip=lambda skipped: self._fail(skipped.group_id, skipped), on_change=self._settle,
            say=say,
        )  # fmt: skip
        self.executor.set_version(0)  # admission begins; an evaluation does not count versions

    def submit(self, workflow: Workflow, task: Task) -> "Future[Group]":
        """Start one row and return at once; a later attempt at `task` has another seed."""
        submitted = _Row(workflow, task, Future())

        def add() -> None:
            submitted.future.set_running_or_notify_cancel()  # nobody else ends it now
            if workflow not in self._workflows:
                self._workflows.append(workflow)
            group_id = next(self._ids)
            self._open[group_id] = submitted
            self._waiting.append(group_id)
            self.executor.wake()
            self._settle()  # fails at once where the executor has stopped

        self._loop.call_soon(add)
        return submitted.future

    def cancel(self) -> None:
        """End every attempt, fail the futures and close the workflows; not from the loop."""
        try:
            self.executor.close()
        finally:
            for group_id in list(self._open):
                self._fail(group_id, CancelledError())

    def _settle(self) -> None:
        """Give finished groups, or what stopped the executor, to the futures."""
        try:
            while batch := self.executor.collect(timeout=0):
                done = self._open.pop(batch[0].group_id)
                done.future.set_result(replace(batch[0], group_id=done.task.group_id))
        except Exception as error:
            for group_id in list(self._open):
                self._fail(group_id, error)

    def _fail(self, group_id: int, error: Exception) -> None:
        self._open.pop(group_id).future.set_exception(error)

    # For the executor, which takes this object as its rows and its workflow.

    def next(self) -> tuple[int, Mapping[str, Any]]:
        if not self._waiting:
            raise StopIteration
        group_id = self._waiting.popleft()
        return group_id, self.row(group_id)

    def row(self, group_id: int) -> Mapping[str, Any]:
        return self._open[group_id].task.row

    def index(self, group_id: int) -> int:
        row = self._open.get(group_id)  # None once something has stopped the executor
        return row.task.group_id if row else group_id

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Run the row's own workflow, with another seed after each failure."""
        row = self._open[task.group_id]
        row_task, attempt = row.task, row.attempts
        row.attempts += 1
        if attempt:
            row_task = replace(row_task, seed=group_seed(row_task.seed, row_task.group_id, attempt))
        return replace(await checked_group(row.workflow, fleet, row_task), group_id=task.group_id)

    async def aclose(self) -> None:
        """Close the workflows that have processes or sockets."""
        for workflow in self._workflows:
            await workflows.close(workflow)


@dataclass(eq=False)
class Evaluator:
    """Runs workflows over rows on a thread of its own."""

    # Makes a fleet on the evaluator's loop; a fleet with `close` is closed there too.
    connect: Callable[[], Coroutine[Any, Any, Generator]]
    workflow: Workflow  # runs the rows that name no other
    _: KW_ONLY
    concurrency: int = 64  # rows in work at one time
    patience: Patience | None = None  # with failed attempts; users' mistakes are not tried again
    timeout: float = 3600.0  # seconds for one attempt
    seed: int = 0  # of the evaluation; a row's seed depends on it and on the row's number
    say: Callable[[str], None] = lambda text: None  # takes a line about an outage

    def __post_init__(self) -> None:
        self.loop, self.runner = LoopThread("evaluator"), None  # type: tuple[Any, Any]
        self._waiting, self._count, self._finished = deque[Future[Group]](), 0, list[Group]()

    def __enter__(self) -> "Evaluator":
        """Start the thread and connect the fleet; raise what that raises."""
        self.loop.start()
        try:
            self.fleet = self.loop.run(self.connect())
        except BaseException:
            self.loop.close()
            raise
        patience = replace(self.patience or Patience(), mistakes=False)
        self.runner = RowRunner(
            self.loop, self.fleet, concurrency=self.concurrency, patience=patience,
            timeout=self.timeout, say=self.say,
        )  # fmt: skip
        return self

    def __exit__(self, *_) -> None:
        """Cancel what is under way, close the fleet and end the thread."""
        with ExitStack() as ends:  # in reverse order, each even if the one before it raises
            ends.callback(self.loop.close)
            if self.runner and self.loop.alive:
                if close := getattr(self.fleet, "close", None):
                    ends.callback(lambda: self.loop.run(close()))
                ends.callback(self.runner.cancel)

    def submit(
        self,
        row: Mapping[str, Any],  # of a dataset
        *,
        n: int | None = None,  # trajectories of its group; None: the workflow's number
        sampling: Sampling | None = None,  # None: the workflow's
        workflow: Workflow | None = None,
        group_id: int | None = None,  # None: the number of rows submitted before
        seed: int | None = None,  # None: a function of that
    ) -> "Future[Group]":
        """Start one row and return its group's future at once, which fails with Skipped at last."""
        if self.runner is None:
            raise RuntimeError("start the evaluator before submitting to it")
        number = self._count if group_id is None else group_id
        self._count += 1
        row_seed = group_seed(self.seed, number, 0) if seed is None else seed
        task = Task(row, number, row_seed, sampling, n)
        future = self.runner.submit(workflow or self.workflow, task)
        future.add_done_callback(self._note)
        self._waiting.append(future)
        return future

    def _note(self, future: "Future[Group]") -> None:
        if not future.exception():
            self._finished.append(future.result())

    def wait(self, count: int | None = None, timeout: float | None = None) -> list[Group]:
        """Return the groups of the oldest `count` rows not waited for yet; default: of all.

        Raises TimeoutError after `timeout` seconds, when `wait` may be called again. Skipped or
        UserError if a row failed for good, RolloutError or Unavailable if too many attempts fail.
        """
        count = len(self._waiting) if count is None else count
        if count > len(self._waiting):
            raise ValueError(f"wait({count}) with {len(self._waiting)} rows submitted; submit more")
        futures = [self._waiting[i] for i in range(count)]
        done, late = wait(futures, timeout)
        if late:
            raise TimeoutError(f"{len(done)} of {count} rows are done after {timeout:g} s")
        for _ in futures:
            self._waiting.popleft()
        try:
            return [future.result() for future in futures]
        except Skipped as skipped:
            raise skipped.reason  # noqa: B904 - its own cause is the failure

    def rollout_batch(
        self, rows: Sequence[Mapping[str, Any]], *, n: int | None = None,
        sampling: Sampling | None = None, workflow: Workflow | None = None,
        timeout: float | None = None,
    ) -> list[Group]:  # fmt: skip
        """Submit rows, wait for them, and return their groups in the rows' order."""
        if self._waiting:
            raise RuntimeError("rows submitted before are not waited for yet; call wait() first")
        for row in rows:
            self.submit(row, n=n, sampling=sampling, workflow=workflow)
        return self.wait(len(rows), timeout)

    def export_stats(self) -> dict[str, float]:
        """Return means and counts since the last call, and failures since the start."""
        groups, self._finished = self._finished, []
        rollouts = [t for group in groups for t in group.trajectories]
        failed = self.runner.executor.counters()["failed"] if self.runner else 0
        counts = {"groups": len(groups), "trajectories": len(rollouts), "failures": failed}
        stats = {f"num_{name}": float(count) for name, count in counts.items()}
        if rollouts:
            # Once for each run of an agent, which may be several rows.
            runs = [{t.run_id: t.run_reward for t in group.trajectories} for group in groups]
            rewards = [reward for each in runs for reward in each.values()]
            trained = [t.num_trained for t in rollouts]
            prompts = [len(t.tokens) - t.num_trained for t in rollouts]
            means: dict[str, list] = {"reward": rewards, "completion_tokens": trained}
            means |= {"prompt_tokens": prompts, "no_eos_ratio": [t.truncated for t in rollouts]}
            stats |= {name: float(np.mean(values)) for name, values in means.items()}
            stats |= {"reward_std": float(np.std(rewards)), **info_means(rollouts)}
        return stats
