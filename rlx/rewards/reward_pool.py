"""Compute reward functions in worker processes that can be killed.

    workflow ── a group ──▶ thread ──▶ worker: fn(completion 1), … fn(completion n)
                              ▲           │ each reward as it is computed
                              └───────────┘ none within the limit: the worker is replaced

A function that raises, hangs, kills its process or returns something other than a finite number
is a `RewardError`: a failure of that prompt, retried within the run's budget. Workers, and all
processes they started, end with this process, however it ends (`process_supervisor.py`). Functions
are sent by name, never as code; workers answer with numbers and text.
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

from rlx.rewards.worker_process import (
    NO_LIMITS,
    SupervisedProcess,
    WorkerLimits,
    exit_text,
    start_worker,
)

_LARGEST = float(np.finfo(np.float32).max)
_START_SECONDS = 60.0  # a worker's start and imports; generous, for a loaded machine
_END_SECONDS = 2.0  # until a worker that closed its socket has an exit status
_MESSAGE = 1 << 20  # bytes of a worker's message


class RewardError(RuntimeError):
    """A reward function failed on a completion; the message names both and the reason."""


def problem(value: Any) -> str | None:
    """Return why a value cannot be a reward; None if it is a number that is finite in float32.

    Integers, floats and truth values of Python and numpy are numbers; text and arrays are not.
    """
    if isinstance(value, numbers.Real | np.bool_):
        try:
            if abs(float(value)) <= _LARGEST:
                return None
        except OverflowError:  # an integer beyond any float
            pass
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


class RewardPool:
    """Worker processes computing one reward function; use from any thread or loop."""

    def __init__(
        self, name: str, workers: int = 1, timeout: float = 5.0, limits: WorkerLimits = NO_LIMITS
    ):
        """Make a pool; its workers start with `start` or with the first rewards.

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
        """Start the workers and return at once, so that the first rewards find them ready."""
        for _ in self._workers:
            worker = self._idle.get()
            worker.start()
            self._idle.put(worker)

    async def rewards(self, calls: Sequence[RewardCall]) -> tuple[list[float], list[RewardSpan]]:
        """Return the reward of each call, in order, and when a worker computed them.

        Raises:
          RewardError: naming function, row and completion, with the worker's traceback.
        """
        loop = asyncio.get_running_loop()
        values, span = await loop.run_in_executor(self._threads, self._compute, calls)
        return values, [span]

    def close(self) -> None:
        """Kill the workers, busy or not."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _compute(self, calls: Sequence[RewardCall]) -> tuple[list[float], RewardSpan]:
        """Compute `rewards` in the calling thread."""
        worker = self._idle.get()
        try:
            return worker.compute(self.name, calls, self.timeout)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process at a time, replaced when killed; for one thread at a time, except `close`."""

    def __init__(self, name: str, limits: WorkerLimits):
        self._name, self._limits = name, limits
        self._process: SupervisedProcess | None = None
        self._lock, self._closed = threading.Lock(), False

    def start(self) -> None:
        """Start a process where none runs, and return at once."""
        with self._lock:
            if self._closed or (self._process and self._process.running):
                return
            self._drop()
            self._process, self._socket = start_worker("rlx.rewards.reward_worker", self._limits)
            self._unread, self._pid = b"", 0
            self._socket.sendall(pickle.dumps((sys.path, self._name)))

    def compute(
        self, name: str, calls: Sequence[RewardCall], timeout: float
    ) -> tuple[list[float], RewardSpan]:
        """Return the reward of each call, and when and where they were computed.

        Raises:
          RewardError: nothing came for `timeout` seconds, and the process was killed; it ended by
            itself; or the function failed.
        """
        self.start()
        assert self._process
        values: list[float] = []
        begun, died, reward = 0, "", f"reward {name!r}"

        def at() -> str:
            return _describe(calls[len(values)], len(values))

        try:
            if not self._pid:
                self._pid = int(self._receive(_START_SECONDS)["pid"])
            self._socket.settimeout(timeout)
            self._socket.sendall(pickle.dumps((name, pickle.dumps(calls))))
            while len(values) < len(calls):
                message = self._receive(timeout)
                begun, end = begun or int(message["start"]), int(message["end"])
                if "error" in message:
                    raise RewardError(f"{reward} failed on {at()}: {message['error']}")
                if problem(message["value"]):
                    raise ValueError
                values.append(float(message["value"]))
            return values, RewardSpan(self._pid, begun, end)
        except TimeoutError:
            self._process.end()
            died = f"was not ready within {_START_SECONDS:g} s"
            if self._pid:
                self.start()
                raise RewardError(
                    f"{reward} was killed after {timeout:g} s (reward.timeout_seconds) on {at()}"
                ) from None
        except (EOFError, ConnectionError):
            died = exit_text(self._process.end(_END_SECONDS), self._limits)
        except (ValueError, TypeError, KeyError):
            self._process.end()
            died = "sent a message that is no reward"
        raise RewardError(f"the worker process of {reward} {died} on {at()}")

    def close(self) -> None:
        """Kill the process, busy or not; none is started again."""
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._process:
            self._process.end()
            self._socket.close()

    def _receive(self, seconds: float) -> Mapping[str, Any]:
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


def _describe(call: RewardCall, index: int) -> str:
    """Return the completion and the row, without its answer, in one short line."""
    row = {key: value for key, value in call.row.items() if key != "answer"}
    return f"completion {index} ({call.completion[-80:]!r}) of row {str(row)[:200]}"
