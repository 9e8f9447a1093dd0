"""Compute reward functions in worker processes that can be killed.

    workflow ── a group ──▶ loop's thread ──▶ worker: fn(completion 1), … fn(completion n)
                                  ▲              │ each reward as it is computed
                                  └──────────────┘ none within the limit: the worker is replaced

The reward is the weighted sum of all functions. `RewardError`: a function raised, hung, killed its
process, or returned something other than a finite number. The prompt is tried again within the
run's budget. Functions are sent by name, never as code; workers answer with numbers and text.
"""

import asyncio
import base64
import numbers
import pickle
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.observe.traces import span
from rlx.system.threads import LoopThread
from rlx.workers.worker_pool import Evicted, WorkerError, WorkerKind, WorkerPool, WorkerProcess
from rlx.workers.worker_process import NO_LIMITS, StartWorker, WorkerLimits, start_worker

_LARGEST = float(np.finfo(np.float32).max)
_START_SECONDS = 60.0  # a worker's start and imports; generous, for a loaded machine
_MAX_SPANS = 100_000  # kept until drained
# How a function takes the completions of a group: one a call, all at the same time, or in one call.
EACH, TOGETHER, GROUP = "each", "together", "group"


class RewardError(RuntimeError):
    """A reward function failed on a completion; the message names both and the reason."""


def problem(value: Any) -> str | None:
    """Return why a value is no reward; None for a number that is finite in float32."""
    if isinstance(value, numbers.Real | np.bool_):  # not text, and not an array
        with suppress(OverflowError):  # an integer beyond any float
            if abs(float(value)) <= _LARGEST:
                return None
    return f"{repr(value)[:80]}; a reward is a finite number"


@dataclass(frozen=True, slots=True)
class RewardCall:
    """The arguments of one reward: texts, token ids, and the dataset row."""

    prompt: str
    completion: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RewardSpan:
    """Where and when a group was graded: worker's process id, CLOCK_MONOTONIC nanoseconds."""

    pid: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Graded:
    """The grades of a group's completions, in their order."""

    rewards: list[float]  # the weighted sums
    infos: list[dict[str, float]]  # `reward/NAME` → what each function gave it, unweighted


class RewardPool:
    """Worker processes computing rewards; use from any thread or loop."""

    def __init__(
        self,
        # Name of a function, as `rewards.resolve` takes it; or name → weight of those that are
        # added, in this order; of none the reward is 0.
        reward: str | Mapping[str, float],
        workers: int = 1,  # processes, ≥ 1; they start with `start` or with the first rewards
        timeout: float = 5.0,  # seconds for one completion, > 0
        limits: WorkerLimits = NO_LIMITS,  # of each worker
        start: StartWorker = start_worker,  # starts one, here or elsewhere
    ):
        self.weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        self._timeout = timeout
        first = {"names": list(self.weights)}
        kind = WorkerKind("rlx.rewards.reward_worker", first, limits, start)
        self._pool = WorkerPool(kind, workers, exclusive=True, patience=0.0)
        self._loop, self._starting = LoopThread("rewards"), threading.Lock()
        self._spans: deque[RewardSpan] = deque(maxlen=_MAX_SPANS)

    def start(self) -> None:
        """Start the workers and return at once, so that the first rewards find them ready."""
        if self.weights:
            self._submit(self._pool.start())

    async def grade(self, calls: Sequence[RewardCall]) -> Graded:
        """Return what each call gets; RewardError has the worker's traceback as a note."""
        with span("reward", completions=len(calls)):
            graded = asyncio.wrap_future(self._submit(self._grade(calls)))
            return await asyncio.shield(graded)  # a worker cannot leave a reward half computed

    def compute(self, calls: Sequence[RewardCall]) -> Graded:
        """Wait for `grade` in the calling thread."""
        return self._submit(self._grade(calls)).result()

    def drain_spans(self) -> list[RewardSpan]:
        """Return where and when groups were graded since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def close(self) -> None:
        """Kill the workers, busy or not."""
        if self._loop.alive:
            self._loop.run(self._pool.close())
            self._loop.close()

    def _submit(self, coroutine: Coroutine) -> Future:
        with self._starting:
            if not self._loop.alive:
                self._loop.start()
        return self._loop.submit(coroutine)

    async def _grade(self, calls: Sequence[RewardCall]) -> Graded:
        totals = [0.0] * len(calls)
        infos: list[dict[str, float]] = [{} for _ in calls]
        if not self.weights or not calls:
            return Graded(totals, infos)
        data, starts = base64.b64encode(pickle.dumps(calls)).decode(), []
        async with self._pool.worker() as worker:
            for name, weight in self.weights.items():
                pid, start, values = await self._values(worker, name, calls, data)
                starts.append(start)
                for i, value in enumerate(values):
                    totals[i] += weight * value
                    infos[i][f"reward/{name.rpartition(':')[2]}"] = value
        self._spans.append(RewardSpan(pid, starts[0], time.monotonic_ns()))
        return Graded(totals, infos)

    async def _values(
        self, worker: WorkerProcess, name: str, calls: Sequence[RewardCall], data: str
    ) -> tuple[int, int, list[float]]:
        """Return the worker's process id, when it began, ns, and the rewards of the calls."""
        kind, place, limit, setting = EACH, "", _START_SECONDS, "to start"
        rewards: dict[int, float] = {}  # by completion
        now = asyncio.get_running_loop().time

        def on_reward(index: int, value: float) -> None:
            if problem(value) or not 0 <= index < len(calls):
                raise ValueError(f"{value!r} as reward {index!r}")
            rewards[index] = float(value)
            if kind == EACH and not clock.expired():  # the next one begins now
                clock.reschedule(now() + limit)

        def at() -> str:
            left = next((i for i in range(len(calls)) if i not in rewards), 0)
            return _describe(calls[left], None if kind == GROUP else left)

        try:
            async with asyncio.timeout(limit) as clock:
                pid, functions = await worker.ready()
                kind, place = functions[name]
                limit, setting = self._timeout, "reward.timeout_seconds"
                if kind == GROUP:
                    limit, setting = limit * len(calls), f"{setting} of each completion"
                clock.reschedule(now() + limit)
                start = time.monotonic_ns()
                last = await worker.run_job({"name": name, "calls": data}, on_reward)
            if "error" not in last:
                return int(pid), start, [rewards[index] for index in range(len(calls))]
            what = _describe(calls[last["index"] or 0], last["index"])
            error = RewardError(f"reward {name!r} failed on {what}: {last['error']}")
            error.add_note(str(last["traceback"]))
            raise error
        except TimeoutError:
            worker.kill()
            self.start()
            why = f"was killed after {limit:g} s ({setting})"
            raise RewardError(f"reward {name!r} {why} on {at()} {place}") from None
        except (WorkerError, Evicted, ValueError, TypeError, LookupError) as broken:
            worker.kill()
            raise RewardError(f"reward {name!r} failed on {at()}: {broken} {place}") from None


def _describe(call: RewardCall, index: int | None) -> str:
    """Return completion (None: the group) and row, without its answer, in one short line."""
    row = {key: value for key, value in call.row.items() if key != "answer"}
    what = "the group" if index is None else f"completion {index} ({call.completion[-80:]!r})"
    return f"{what} of row {str(row)[:200]}"
