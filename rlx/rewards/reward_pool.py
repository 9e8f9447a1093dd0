"""Reward functions in worker processes that can be killed.

    workflow ── a group ──▶ thread ──▶ worker: fn(completion 1), … fn(completion n)
                              ▲           │ each reward as it is there
                              └───────────┘ none within the limit: ended, another is started

A function that raises, hangs, kills its process or returns something that is not a finite
number is a `RewardError`: a failure of that prompt, retried within the run's budget. Workers end
with all that they started, and with us, whatever ends us (`kept.py`). The names of functions cross
the process border, never code; what comes back is numbers and text.
"""

import asyncio
import json
import numbers
import pickle
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.rewards.worker_process import NO_LIMITS, Kept, Limits, start_worker, words

_LARGEST = float(np.finfo(np.float32).max)
_START_SECONDS = 60.0  # a worker's start and imports; generous, for a loaded machine
_END_SECONDS = 2.0  # until a worker that closed its end has a status
_MESSAGE = 1 << 20  # bytes that a worker may say at once


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

    def __init__(
        self, name: str, workers: int = 1, timeout: float = 5.0, limits: Limits = NO_LIMITS
    ):
        """Starts nothing yet.

        Args:
          name: of the reward function, as `rewards.resolve` takes it.
          workers: processes, ≥ 1.
          timeout: seconds for one completion, > 0.
          limits: of each worker.
        """
        self.name = name
        self.timeout = timeout
        self._workers = [_Worker(name, limits) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, "reward")

    def start(self) -> None:
        """Starts the workers and returns at once; the first rewards need not wait for imports."""
        for _ in self._workers:
            worker = self._idle.get()
            worker.start()
            self._idle.put(worker)

    async def rewards(self, calls: Sequence[Call]) -> tuple[list[float], list[Span]]:
        """The reward of each call, in order, and when a worker computed them.

        Raises:
          RewardError: naming function, row and completion, with the worker's traceback.
        """
        loop = asyncio.get_running_loop()
        values, span = await loop.run_in_executor(self._threads, self._compute, calls)
        return values, [span]

    def close(self) -> None:
        """Kills the workers, busy or not."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _compute(self, calls: Sequence[Call]) -> tuple[list[float], Span]:
        """As `rewards`, in a thread."""
        worker = self._idle.get()
        values: list[float] = []
        name, at = f"reward {self.name!r}", lambda: _describe(calls[len(values)], len(values))
        try:
            return values, worker.compute(self.name, calls, self.timeout, values)
        except TimeoutError:
            raise RewardError(
                f"{name} was killed after {self.timeout:g} s (reward.timeout_seconds) on {at()}"
            ) from None
        except _Died as died:
            raise RewardError(f"the worker process of {name} {died} on {at()}") from None
        except _Failed as failed:
            raise RewardError(f"{name} failed on {at()}: {failed}") from None
        finally:
            self._idle.put(worker)


class _Failed(Exception):
    """A reward function raised, or gave no reward."""


class _Died(Exception):
    """A worker ended by itself, or never was ready."""


class _Worker:
    """A place for one process at a time; for one thread at a time, but for `close`."""

    def __init__(self, name: str, limits: Limits):
        self._name, self._limits = name, limits
        self._kept: Kept | None = None
        self._lock, self._closed = threading.Lock(), False

    def start(self) -> None:
        """Start a process where none runs, and return at once."""
        with self._lock:
            if self._closed or (self._kept and self._kept.running):
                return
            self._drop()
            self._kept, self._socket = start_worker("rlx.rewards.reward_worker", self._limits)
            self._unread, self._pid = b"", 0
            self._socket.sendall(pickle.dumps((sys.path, self._name)))

    def compute(
        self, name: str, calls: Sequence[Call], timeout: float, values: list[float]
    ) -> Span:
        """Put the reward of each call into `values` as it comes; return when and where.

        Raises:
          TimeoutError: nothing came for `timeout` seconds; the process was killed.
          _Died, _Failed: with the reason.
        """
        self.start()
        assert self._kept
        begun = 0
        try:
            if not self._pid:
                self._wait_ready()
            self._socket.settimeout(timeout)
            self._socket.sendall(pickle.dumps((name, pickle.dumps(calls))))
            while len(values) < len(calls):
                said = self._hear(timeout)
                begun, end = begun or int(said["start"]), int(said["end"])
                if "error" in said:
                    raise _Failed(str(said["error"]))
                if problem(said["value"]):
                    raise ValueError
                values.append(float(said["value"]))
            return Span(self._pid, begun, end)
        except TimeoutError:
            self._kept.end()
            self.start()
            raise
        except (EOFError, ConnectionError):
            raise _Died(words(self._kept.end(_END_SECONDS), self._limits)) from None
        except (ValueError, TypeError, KeyError):
            self._kept.end()
            raise _Died("said what is no reward") from None

    def close(self) -> None:
        """Kill the process, busy or not; none is started again."""
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._kept:
            self._kept.end()
            self._socket.close()

    def _wait_ready(self) -> None:
        try:
            self._pid = int(self._hear(_START_SECONDS)["pid"])
        except TimeoutError:
            assert self._kept
            self._kept.end()
            raise _Died(f"was not ready within {_START_SECONDS:g} s") from None

    def _hear(self, seconds: float) -> Mapping[str, Any]:
        """Return the next message."""
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if len(self._unread) > _MESSAGE:
                raise ValueError
            self._socket.settimeout(max(1e-3, end - time.monotonic()))
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _describe(call: Call, index: int) -> str:
    """The completion and the row in one short line."""
    row = {key: value for key, value in call.row.items() if key != "answer"}
    return f"completion {index} ({call.completion[-80:]!r}) of row {str(row)[:200]}"
