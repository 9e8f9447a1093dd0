"""A fleet for those who do not train: submit rows, wait for groups, read statistics.

    with Evaluator(connect, workflow) as evaluator:
        for row in rows:
            evaluator.submit(row, n=8)
        groups = evaluator.wait(len(rows))
        print(evaluator.export_stats())

The same workflows, fleet and rewards as training; no staleness bound, nobody publishes.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from rlx.base import Group, Unavailable, UserError
from rlx.fleet.requests import Sampling
from rlx.rollout.attempts import Patience, Skipped, Window
from rlx.rollout.executor import group_seed
from rlx.rollout.workflows import Generator, Workflow


class Evaluator:
    """Runs workflows over rows on a thread of its own.

    Args:
      connect: makes a fleet that is ready; called on the evaluator's loop. A fleet with `close` is
        closed there too.
      workflow: what `submit` runs unless it names another.
      concurrency: rows in work at one time.
      patience: with failed attempts. A row's future fails after its last, and those of all rows
        once too many of the evaluation's attempts do.
      timeout: seconds for one attempt.
      seed: of the evaluation; a row's seed is a function of it and of the row's number.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Generator]],
        workflow: Workflow,
        *,
        concurrency: int = 64,
        patience: Patience | None = None,
        timeout: float = 3600.0,
        seed: int = 0,
    ):
        self._connect, self._workflow, self._seed = connect, workflow, seed
        self._concurrency, self._timeout = max(1, concurrency), timeout
        self._patience, self._failures = patience or Patience(), 0
        self._window = Window(self._patience)
        self._used = [workflow]
        self._waiting: deque[Future] = deque()
        self._submitted = 0
        self._finished: list[Group] = []
        self._ready: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run_loop, name="evaluator", daemon=True)

    # Life.

    def start(self) -> "Evaluator":
        """Starts the thread and connects the fleet; raises what that raises."""
        self._thread.start()
        self._ready.result()
        return self

    def close(self) -> None:
        """Cancels what is under way, closes the fleet and ends the thread."""
        if self._loop and self._end and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def __enter__(self) -> "Evaluator":
        return self.start()

    def __exit__(self, *_) -> None:
        self.close()

    # Work.

    def submit(
        self,
        row: Mapping[str, Any],
        *,
        n: int | None = None,
        sampling: Sampling | None = None,
        workflow: Workflow | None = None,
        group_id: int | None = None,
        seed: int | None = None,
    ) -> "Future[Group]":
        """Starts one row, and returns at once.

        Args:
          row: of a dataset.
          n, sampling: trajectories of its group and how they are drawn; the workflow's own by
            default.
          group_id, seed: how many were submitted before, and a function of that, by default.

        Returns:
          A future of its group; `wait` has it too.
        """
        if self._loop is None:
            raise RuntimeError("start the evaluator before submitting to it")
        number = self._submitted if group_id is None else group_id
        self._submitted += 1
        drawn = group_seed(self._seed, number, 0) if seed is None else seed
        if workflow is not None and workflow not in self._used:
            self._used.append(workflow)
        work = self._answer(workflow or self._workflow, row, number, drawn, n, sampling)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.append(future)
        return future

    def wait(self, count: int | None = None, timeout: float | None = None) -> list[Group]:
        """The groups of the oldest `count` rows not waited for yet (all of them by default).

        Raises:
          TimeoutError: they are not all done in `timeout` seconds; they can be waited for again.
          Skipped, UserError: a row failed for good.
          RolloutError, Unavailable: nothing seems to work.
        """
        count = len(self._waiting) if count is None else count
        if count > len(self._waiting):
            raise ValueError(f"wait({count}) with {len(self._waiting)} rows submitted; submit more")
        wanted = [self._waiting[i] for i in range(count)]
        try:
            groups = [future.result(timeout) for future in _within(wanted, timeout)]
        except FutureTimeout:
            done = sum(future.done() for future in wanted)
            raise TimeoutError(f"{done} of {count} rows are done after {timeout:g} s") from None
        for _ in wanted:
            self._waiting.popleft()
        return groups

    def rollout_batch(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        n: int | None = None,
        sampling: Sampling | None = None,
        workflow: Workflow | None = None,
        timeout: float | None = None,
    ) -> list[Group]:
        """Submits rows and waits for them: their groups, in the rows' order."""
        if self._waiting:
            raise RuntimeError("rows submitted before are not waited for yet; call wait() first")
        for row in rows:
            self.submit(row, n=n, sampling=sampling, workflow=workflow)
        return self.wait(len(rows), timeout)

    def export_stats(self) -> dict[str, float]:
        """Means over all trajectories finished since the last call; then counting begins again.

        reward and its standard deviation, sampled tokens and prompt tokens of a trajectory, share
        cut off by length, groups, trajectories, failed attempts, and info/* of the workflow.
        """
        groups, self._finished = self._finished, []
        found = [t for group in groups for t in group.trajectories]
        stats = {
            "num_groups": float(len(groups)),
            "num_trajectories": float(len(found)),
            "num_failures": float(self._failures),
        }
        if found:
            rewards = np.array([t.reward for t in found])
            stats |= {
                "reward": float(rewards.mean()),
                "reward_std": float(rewards.std()),
                "completion_tokens": float(np.mean([t.num_trained for t in found])),
                "prompt_tokens": float(np.mean([len(t.tokens) - t.num_trained for t in found])),
                "no_eos_ratio": float(np.mean([t.truncated for t in found])),
            }
            for name in sorted({name for t in found for name in t.info}):
                stats[f"info/{name}"] = float(
                    np.mean([t.info[name] for t in found if name in t.info])
                )
        return stats

    # The loop's side.

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._places = asyncio.Semaphore(self._concurrency)
        self._fleet = await self._connect()
        self._ready.set_result(None)
        try:
            await self._end.wait()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for workflow in self._used:
                if aclose := getattr(workflow, "aclose", None):
                    await aclose()
            if close := getattr(self._fleet, "close", None):
                await close()

    async def _answer(self, workflow, row, number, seed, n, sampling) -> Group:
        failed = 0
        while True:
            try:
                async with self._places, asyncio.timeout(self._timeout):
                    group = await workflow.run(
                        self._fleet, row, group_id=number, seed=seed, sampling=sampling, n=n
                    )
            except Unavailable:
                raise
            except Exception as error:
                failed += 1
                self._failures += 1
                self._window.add(True)
                if ended := self._window.verdict(error, f"row {number}"):
                    raise ended from error
                if isinstance(error, UserError):
                    raise
                if failed >= self._patience.attempts:
                    raise Skipped(
                        f"{failed} of rollout.max_attempts={failed} failed; the last one, row "
                        f"{number}: {type(error).__name__}: {error}"
                    ) from error
            else:
                self._window.add(False)
                self._finished.append(group)
                return group
            seed = group_seed(seed, number, failed)
            await asyncio.sleep(self._patience.back_off(failed))


def _within(futures: Sequence[Future], timeout: float | None):
    """The futures, once all are done or the time is up (then `result` of one is too late)."""
    from concurrent.futures import wait

    _, late = wait(futures, timeout)
    if late:
        raise FutureTimeout
    return futures
