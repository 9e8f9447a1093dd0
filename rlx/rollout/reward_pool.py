"""Reward functions in worker processes that can be killed.

    workflow ── one task a group ──▶ pebble pool ──▶ worker: fn(completion 1), … fn(completion n)
                                        │ past the limit: kills the process, starts another
                                        ▼
               each completion alone ──▶ the one that hangs is named; a group that was only
                                         slow gets its rewards after all

A function that raises, hangs, kills its process or returns something that is not a finite
number is a `RewardError`: a failure of that prompt, retried within the run's budget. Workers
die with the parent, whatever kills it. The names of functions cross the process border, never
code.
"""

import asyncio
import ctypes
import multiprocessing
import numbers
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessPool

from rlx.rollout import rewards, symbolic

_RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")  # row keys that would clash
_LARGEST = float(np.finfo(np.float32).max)
_START_SECONDS = 60.0  # a worker's start and imports; generous, for a loaded machine


class RewardError(RuntimeError):
    """A reward function failed on a completion; the message names both and the reason."""


def problem(value: Any) -> str | None:
    """Why a value is no reward, or None where it is one: a number that is finite in float32.

    Python's and numpy's integers, floats and truth values all are numbers; text and arrays are not.
    """
    if isinstance(value, numbers.Real | np.bool_):
        try:
            if abs(float(value)) <= _LARGEST:
                return None
        except OverflowError:  # an integer beyond any float
            pass
    return f"{repr(value)[:80]}; a reward is a finite number"


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one reward: texts, token ids, and the dataset row."""

    prompt: str
    completion: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Where and when a task ran: worker's process id, CLOCK_MONOTONIC nanoseconds."""

    pid: int
    start_ns: int
    end_ns: int


class RewardPool:
    """Worker processes computing one reward function; use from any thread or loop."""

    def __init__(self, name: str, workers: int = 1, timeout: float = 5.0):
        """Starts nothing yet.

        Args:
          name: of the reward function, as `rewards.resolve` takes it.
          workers: processes, ≥ 1.
          timeout: seconds for one completion, > 0.
        """
        self.name = name
        self.timeout = timeout
        self._workers = workers
        self._together = True  # n completions a task, until a group proved slower than the limit
        self._pool = self._new_pool()

    def start(self) -> None:
        """Starts the workers and returns at once; the first rewards need not wait for imports.

        Call it from a thread that outlives the pool: the kernel ties workers to their thread.
        """
        self._pool.schedule(_warm, timeout=_START_SECONDS)

    async def rewards(self, calls: Sequence[Call]) -> tuple[list[float], list[Span]]:
        """The reward of each call, in order, and when the workers computed them.

        Raises:
          RewardError: naming function, row and completion, with the worker's traceback.
        """
        if self._together:
            try:
                return await self._task(calls, 0, self.timeout)
            except TimeoutError:
                if len(calls) == 1:
                    raise self._hung(calls[0], 0) from None
        alone = [self._alone(call, index) for index, call in enumerate(calls)]
        values: list[float] = []
        spans: list[Span] = []
        for result in await asyncio.gather(*alone, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            values += result[0]
            spans += result[1]
        self._together = False
        return values, spans

    def close(self) -> None:
        """Kills the workers, busy or not."""
        self._pool.stop()
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            initializer=_initialize,
            initargs=(os.getpid(), self.name),
            context=multiprocessing.get_context("spawn"),
        )

    async def _alone(self, call: Call, index: int) -> tuple[list[float], list[Span]]:
        try:
            return await self._task([call], index, self.timeout)
        except TimeoutError:
            raise self._hung(call, index) from None

    async def _task(
        self, calls: Sequence[Call], first: int, timeout: float
    ) -> tuple[list[float], list[Span]]:
        pool = self._pool
        try:
            future = pool.schedule(_compute, args=(self.name, calls), timeout=timeout)
            values, error, span = await asyncio.wrap_future(future)
        except ProcessExpired as expired:
            raise RewardError(
                f"the worker process of reward {self.name!r} died (exit code {expired.exitcode}) "
                f"on {_describe(calls[0], first)}"
                + (f" or one of the {len(calls) - 1} after it" if len(calls) > 1 else "")
            ) from expired
        except RuntimeError as broken:  # pebble gives up when an idle worker is killed
            if pool is self._pool:
                self._pool = self._new_pool()
                pool.stop()
            raise RewardError(
                f"the worker processes of reward {self.name!r} died while idle and were started "
                f"again; {_describe(calls[0], first)} was waiting for one"
            ) from broken
        if error is not None:
            at = len(values)
            raise RewardError(
                f"reward {self.name!r} failed on {_describe(calls[at], first + at)}: {error}"
            )
        return values, [span]

    def _hung(self, call: Call, index: int) -> RewardError:
        return RewardError(
            f"reward {self.name!r} was killed after {self.timeout:g} s (reward.timeout_seconds) on "
            f"{_describe(call, index)}"
        )


def _describe(call: Call, index: int) -> str:
    """The completion and the row in one short line."""
    row = {key: value for key, value in call.row.items() if key != "answer"}
    return f"completion {index} ({call.completion[-80:]!r}) of row {str(row)[:200]}"


# What follows runs in the worker.


def _initialize(parent: int, name: str) -> None:
    """Ties the worker's life to the parent's and imports the reward function."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for C code to return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    try:
        rewards.resolve(name)
        if rewards.REWARDS.get(name) in (rewards.math, rewards.arithmetic):
            symbolic.warm()
    except Exception:
        pass  # reported, with its traceback, by the first task


def _warm() -> None:
    """A task that only shows the worker is up."""


def _compute(name: str, calls: Sequence[Call]) -> tuple[list[float], str | None, Span]:
    """Rewards until the first failure, that failure as text, and the time it took."""
    start, values, error = time.monotonic_ns(), [], None
    try:
        function = rewards.resolve(name)
        for call in calls:
            row = {key: value for key, value in call.row.items() if key not in _RESERVED}
            value = function(
                call.prompt, call.completion, call.prompt_ids, call.completion_ids, **row
            )
            error = problem(value)
            if error is not None:
                error = f"it returned {error}"
                break
            values.append(float(value))
    except BaseException:  # SystemExit too: the worker reports and lives
        error = traceback.format_exc()
    return values, error, Span(os.getpid(), start, time.monotonic_ns())
