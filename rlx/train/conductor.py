"""One trainer on many hosts: process 0 makes each call, the others repeat it. No JAX here.

    process 0    update.update(state, groups) ─▶ (name, groups) to all ─▶ its own trainer's call
    the others   worker_loop: receive ─▶ the same call of their trainer, with a state of their own

Messages hold names, paths and groups of trajectories; each process keeps its part of the state.
Calls, and therefore their collectives, have one order everywhere.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from rlx.base import DiskFull, Group, UserError
from rlx.cli.user_code import words
from rlx.journal import records
from rlx.model.tensors import Buckets
from rlx.train.contract import State, Update
from rlx.train.hosts import Hosts

Make = Callable[..., Update]


def driver(hosts: Hosts, make: Make, **arguments: Any) -> Update:
    """Return the trainer `make(**arguments)` that repeats its calls on all processes.

    UserError if `make` fails on one of them. Arguments are JSON-able.
    """
    return _Driver(hosts, make, arguments) if hosts.count > 1 else make(**arguments)


def stop(hosts: Hosts, **result: Any) -> None:
    """Make `worker_loop` return `result` on the other processes, as process 0 ends."""
    if hosts.count > 1:
        hosts.send(_encode("stop", result))


def worker_loop(hosts: Hosts, make: Make) -> dict[str, Any]:
    """Repeat the calls of process 0 until it stops; return the arguments of `stop`."""
    replica = _Replica(make)
    while True:
        name, arguments, groups = _decode(hosts.receive())
        if name == "stop":
            return arguments
        error, call = "", hosts.sent

        def written(part: Future[None], call: int = call) -> None:
            if failure := part.exception():
                hosts.unsaved(call, words(failure))

        try:
            result = replica.call(name, arguments, groups)
            if name == "save":
                result.add_done_callback(written)
            del result  # it may be a bucket
        except Exception as failure:
            error = words(failure)
        hosts.done(error)


class _Replica:
    """The trainer of one process, its state, and the buckets it is iterating over."""

    update: Update
    state: State = None

    def __init__(self, make: Make):
        self._make = make
        self._buckets: Iterator[Any] = iter(())

    def call(self, name: str, args: Mapping[str, Any], groups: Sequence[Group]) -> Any:
        """Make a call of the trainer; return its result, unless that is the trainer or a state."""
        match name:
            case "make":
                self.update = self._make(**args)
            case "init":
                self.state = self.update.init()
            case "restore":
                self.state = self.update.restore(Path(args["path"]))
            case "update":
                self.state, metrics = self.update.update(self.state, groups)
                return metrics
            case "weights":
                self._buckets = iter(source := self.update.weights(self.state, **args))
                return source.tensors
            case "bucket":
                return next(self._buckets, None)
            case "save":
                return self.update.save(Path(args["path"]), self.state)
            case _:  # evaluate, logprobs
                return getattr(self.update, name)(self.state, groups)
        return None


class _Driver:
    """An `Update` whose calls reach the other processes too, in one order for all threads."""

    def __init__(self, hosts: Hosts, make: Make, arguments: dict[str, Any]):
        self._hosts, self._lock = hosts, threading.RLock()
        self._saves: WeakValueDictionary[int, Future[None]] = WeakValueDictionary()
        hosts.on_unsaved = self._fail_save
        self._own = _Replica(make)
        self._all("make", wait=True, **arguments)
        update = self._own.update
        self.model, self.devices = update.model, update.devices
        self.state_bytes = update.state_bytes

    def init(self) -> State:
        self._all("init", wait=True)
        return self._own.state

    def restore(self, path: Path) -> State:
        self._all("restore", wait=True, path=str(path))
        return self._own.state

    def update(self, state: State, groups: Sequence[Group]) -> tuple[State, Mapping[str, Any]]:
        metrics = self._of(state, "update", groups=groups)
        return self._own.state, metrics

    def evaluate(self, state: State, groups: Sequence[Group]) -> dict[str, float]:
        return self._of(state, "evaluate", groups=groups)

    def logprobs(self, state: State, groups: Sequence[Group]) -> list[np.ndarray]:
        return self._of(state, "logprobs", groups=groups)

    def weights(self, state: State, adapters: bool = False) -> Buckets:
        tensors = self._of(state, "weights", adapters=adapters)
        return Buckets(tensors, iter(lambda: self._all("bucket"), None))

    def save(self, path: Path, state: State) -> Future[None]:
        """Begin to save; the future fails at once if another process cannot write."""
        with self._lock:
            saved = self._saves[self._hosts.sent + 1] = Future[None]()
            local = self._of(state, "save", wait=True, path=str(path))
        local.add_done_callback(lambda part: _finish(saved, part.exception()))
        return saved

    def _fail_save(self, name: str, call: int, error: str) -> None:
        if saved := self._saves.get(call):
            _finish(saved, _error(f"{name}: {error}"))

    def _of(self, state: State, name: str, **more: Any) -> Any:
        """Make a call about a state; the other processes have only the last one."""
        assert state is self._own.state, "a state that the other processes no longer have"
        return self._all(name, **more)

    def _all(self, name: str, groups: Sequence[Group] = (), wait: bool = False, **args: Any) -> Any:
        """Make a call on all processes; with `wait`, return when it has succeeded on all."""
        with self._lock:
            self._hosts.send(_encode(name, args, groups), name)
            try:
                try:
                    result = self._own.call(name, args, groups)
                finally:
                    self._hosts.finished()
                if error := self._hosts.outcome() if wait else "":
                    raise _error(error)
            except BaseException:
                self._hosts.failed()
                raise
            return result


def _error(text: str) -> UserError:
    return (DiskFull if f"{DiskFull.__name__}: " in text else UserError)(text)


def _finish(saved: Future[None], error: BaseException | None) -> None:
    """Set the future's result once; later results are ignored."""
    with suppress(InvalidStateError):
        saved.set_exception(error) if error else saved.set_result(None)


def _encode(name: str, args: Mapping[str, Any], groups: Sequence[Group] = ()) -> bytes:
    head = json.dumps([name, args]).encode()
    return head + b"\n" + (records.dumps(groups) if groups else b"")


def _decode(message: bytes) -> tuple[str, dict[str, Any], list[Group]]:
    head, _, body = message.partition(b"\n")
    name, arguments = json.loads(head)
    return name, arguments, records.loads(body) if body else []
