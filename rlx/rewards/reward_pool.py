"""Compute reward functions in worker processes that can be killed.

    workflow ── a group ──▶ thread ──▶ worker: fn(completion 1), … fn(completion n)
                              ▲           │ each reward as it is computed
                              └───────────┘ none within the limit: the worker is replaced

An async function gets all completions of a group at once; one whose parameters are plural gets them
in one call. Several functions have their turn, and their weighted sum is the reward.

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
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.workers.worker_process import (
    NO_LIMITS,
    StartWorker,
    WorkerHandle,
    WorkerLimits,
    exit_text,
    start_worker,
)

_LARGEST = float(np.finfo(np.float32).max)
_START_SECONDS = 60.0  # a worker's start and imports; generous, for a loaded machine
_END_SECONDS = 2.0  # until a worker that closed its socket has an exit status
_MAX_SPANS = 100_000  # kept until drained
_MESSAGE = 1 << 20  # bytes of a worker's message
# How a function takes the completions of a group: one a call, all at the same time, or in one call.
EACH, TOGETHER, GROUP = "each", "together", "group"


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


@dataclass(frozen=True, slots=True)
class Graded:
    """What the completions of a group got, in their order.

    Attributes:
      rewards: the weighted sums.
      infos: of each completion, `reward/NAME` → what each function gave it, unweighted.
    """

    rewards: list[float]
    infos: list[dict[str, float]]


class RewardPool:
    """Worker processes computing rewards; use from any thread or loop."""

    def __init__(
        self,
        reward: str | Mapping[str, float],
        workers: int = 1,
        timeout: float = 5.0,
        limits: WorkerLimits = NO_LIMITS,
        start: StartWorker = start_worker,
    ):
        """Make a pool; its workers start with `start` or with the first rewards.

        Args:
          reward: name of a function, as `rewards.resolve` takes it; or name → weight of those
            that are added, in this order; of none the reward is 0.
          workers: processes, ≥ 1.
          timeout: seconds for one completion, > 0.
          limits: of each worker. start: starts one, here or elsewhere.
        """
        self._weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        self._timeout = timeout
        self._workers = [_Worker(list(self._weights), limits, start) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, "reward")
        self._spans: deque[RewardSpan] = deque(maxlen=_MAX_SPANS)

    def start(self) -> None:
        """Start the workers and return at once, so that the first rewards find them ready."""
        for _ in self._workers if self._weights else ():
            worker = self._idle.get()
            worker.start()
            self._idle.put(worker)

    async def grade(self, calls: Sequence[RewardCall]) -> Graded:
        """Return what each call gets; the calls are those of one group.

        Raises:
          RewardError: naming function, row and completion, with the worker's traceback as a note.
          UserError: there is no such function, or its module cannot be imported.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compute, calls)

    def compute(self, calls: Sequence[RewardCall]) -> Graded:
        """Compute `grade` in the calling thread."""
        if not self._weights or not calls:
            return Graded([0.0] * len(calls), [{} for _ in calls])
        worker = self._idle.get()
        try:
            columns, span = worker.compute(calls, self._timeout)
        finally:
            self._idle.put(worker)
        totals = [0.0] * len(calls)
        infos: list[dict[str, float]] = [{} for _ in calls]
        for (name, weight), values in zip(self._weights.items(), columns, strict=True):
            for i, value in enumerate(values):
                totals[i] += weight * value
                infos[i][f"reward/{name.rpartition(':')[2]}"] = value
        self._spans.append(span)
        return Graded(totals, infos)

    def drain_spans(self) -> list[RewardSpan]:
        """Return where and when groups were graded since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def close(self) -> None:
        """Kill the workers, busy or not."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)


class _Worker:
    """One process at a time, replaced when killed; for one thread at a time, except `close`."""

    def __init__(self, names: Sequence[str], limits: WorkerLimits, start: StartWorker):
        self._names, self._limits, self._start = names, limits, start
        self._process: WorkerHandle | None = None
        self._lock, self._closed = threading.Lock(), False

    def start(self) -> None:
        """Start a process where none runs, and return at once."""
        with self._lock:
            if self._closed or (self._process and self._process.running):
                return
            self._drop()
            self._process, self._socket = self._start("rlx.rewards.reward_worker", self._limits)
            self._unread, self._pid = b"", 0
            self._functions: Mapping[str, Sequence[str]] = {}  # name → kind and place
            self._socket.sendall(pickle.dumps((sys.path, self._names)))

    def compute(
        self, calls: Sequence[RewardCall], timeout: float
    ) -> tuple[list[list[float]], RewardSpan]:
        """Return the values of each function, in the order of the calls, and their time and place.

        Raises:
          RewardError: nothing came for `timeout` seconds, and the process was killed; it ended by
            itself; or a function failed.
          UserError: a function cannot be found or imported.
        """
        self.start()
        assert self._process
        columns: list[list[float]] = []
        begun, end, kind, place = 0, 0, EACH, ""
        reward = f"reward {', '.join(self._names)!r}"
        found: dict[int, float] = {}  # by completion

        def at() -> str:
            left = next((i for i in range(len(calls)) if i not in found), 0)
            return _describe(calls[left], None if kind == GROUP else left)

        try:
            self._greet()
            for name in self._names:
                (kind, place), reward, found = self._functions[name], f"reward {name!r}", {}
                limit = timeout * (len(calls) if kind == GROUP else 1)
                self._socket.settimeout(timeout)
                self._socket.sendall(pickle.dumps((name, pickle.dumps(calls))))
                until = time.monotonic() + limit
                while len(found) < len(calls):
                    message = self._receive(until - time.monotonic())
                    begun, end = begun or int(message["start"]), int(message["end"])
                    index = message["index"]
                    if "error" in message:
                        what = _describe(calls[index or 0], index)
                        error = RewardError(f"{reward} failed on {what}: {message['error']}")
                        error.add_note(str(message["traceback"]))
                        raise error
                    if problem(message["value"]):
                        raise ValueError
                    found[int(index)] = float(message["value"])
                    if kind == EACH:  # the next one begins now; the others began together
                        until = time.monotonic() + limit
                columns.append([found[index] for index in range(len(calls))])
            return columns, RewardSpan(self._pid, begun, end)
        except TimeoutError:
            self._process.end()
            died = f"was not ready within {_START_SECONDS:g} s"
            if self._pid:
                self.start()
                raise RewardError(
                    f"{reward} was killed after {limit:g} s (reward.timeout_seconds"
                    f"{' of each completion' if kind == GROUP else ''}) on {at()} {place}"
                ) from None
        except (EOFError, ConnectionError):
            died = exit_text(self._process.end(_END_SECONDS), self._limits)
        except (ValueError, TypeError, KeyError, IndexError):
            self._process.end()
            died = "sent a message that is no reward"
        raise RewardError(f"the worker process of {reward} {died} on {at()} {place}")

    def _greet(self) -> None:
        """Wait until the process has imported the functions; UserError where it cannot."""
        assert self._process
        if not self._pid:
            hello = self._receive(_START_SECONDS)
            if "error" in hello:
                self._process.end()  # the next one may find the file mended
                raise UserError(str(hello["error"]))
            self._functions, self._pid = hello["functions"], int(hello["pid"])

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


def _describe(call: RewardCall, index: int | None) -> str:
    """Return completion (None: the group) and row, without its answer, in one short line."""
    row = {key: value for key, value in call.row.items() if key != "answer"}
    what = "the group" if index is None else f"completion {index} ({call.completion[-80:]!r})"
    return f"{what} of row {str(row)[:200]}"
