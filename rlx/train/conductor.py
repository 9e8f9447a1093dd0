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
    worker = _Worker(make)
    while True:
        name, arguments, groups = _decode(hosts.receive())
        if name == "stop":
            return arguments
        error, call = "", hosts.sent

        def written(part: Future[None], call: int = call) -> None:
            if failure := part.exception():
                hosts.unsaved(call, words(failure))

        try:
            if part := worker.call(name, arguments, groups):
                part.add_done_callback(written)
        except Exception as failure:
            error = words(failure)
        hosts.done(error)


class _Driver:
    """An `Update` whose calls reach the other processes too, in one order for all threads."""

    def __init__(self, hosts: Hosts, make: Make, arguments: dict[str, Any]):
        self._hosts, self._lock = hosts, threading.RLock()
        self._saves: WeakValueDictionary[int, Future[None]] = WeakValueDictionary()
        hosts.on_unsaved = self._unsaved
        self._state: State = None
        self._update: Update = self._all("make", lambda: make(**arguments), arguments, wait=True)
        self.model, self.devices = self._update.model, self._update.devices
        self.state_bytes = self._update.state_bytes

    def init(self) -> State:
        self._state = self._all("init", self._update.init, wait=True)
        return self._state

    def restore(self, path: Path) -> State:
        given = {"path": str(path)}
        self._state = self._all("restore", lambda: self._update.restore(path), given, wait=True)
        return self._state

    def update(self, state: State, groups: Sequence[Group]) -> tuple[State, Mapping[str, Any]]:
        made = self._of(state, "update", lambda: self._update.update(state, groups), groups=groups)
        self._state = made[0]
        return made

    def evaluate(self, state: State, groups: Sequence[Group]) -> dict[str, float]:
        evaluate = self._update.evaluate
        return self._of(state, "evaluate", lambda: evaluate(state, groups), groups=groups)

    def logprobs(self, state: State, groups: Sequence[Group]) -> list[np.ndarray]:
        logprobs = self._update.logprobs
        return self._of(state, "logprobs", lambda: logprobs(state, groups), groups=groups)

    def weights(self, state: State, adapters: bool = False) -> Buckets:
        given = {"adapters": adapters}
        made = self._of(state, "weights", lambda: self._update.weights(state, adapters), given)
        buckets = iter(made)
        return Buckets(
            made.tensors, iter(lambda: self._all("bucket", lambda: next(buckets, None)), None)
        )

    def save(self, path: Path, state: State) -> Future[None]:
        """Begin to save; the future fails at once if another process cannot write."""
        given = {"path": str(path)}
        with self._lock:
            saved = self._saves[self._hosts.sent + 1] = Future[None]()
            own = self._of(state, "save", lambda: self._update.save(path, state), given, wait=True)
        own.add_done_callback(lambda part: _finish(saved, part.exception()))
        return saved

    def _unsaved(self, name: str, call: int, error: str) -> None:
        if saved := self._saves.get(call):
            _finish(saved, _error(f"{name}: {error}"))

    def _of(self, state: State, *call: Any, **more: Any) -> Any:
        """Make a call about a state; the other processes have only the last one."""
        assert state is self._state, "a state that the other processes no longer have"
        return self._all(*call, **more)

    def _all(
        self,
        name: str,
        call: Callable[[], Any],
        given: Mapping[str, Any] | None = None,
        groups: Sequence[Group] | None = None,
        wait: bool = False,
    ) -> Any:
        """Make a call on all processes; with `wait`, return when it has succeeded on all."""
        with self._lock:
            self._hosts.send(_encode(name, given or {}, groups), name)
            try:
                try:
                    result = call()
                finally:
                    self._hosts.made()
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


class _Worker:
    """The trainer of another process, its state, and the buckets it is iterating over."""

    def __init__(self, make: Make):
        self._make = make
        self._update: Any = None
        self._state: State = None
        self._buckets: Iterator[Any] = iter(())

    def call(self, name: str, given: dict, groups: Sequence[Group]) -> Future[None] | None:
        """Make a call that `_Driver` sent; return the future of a save."""
        update, state = self._update, self._state
        match name:
            case "make":
                self._update = self._make(**given)
            case "init":
                self._state = update.init()
            case "restore":
                self._state = update.restore(Path(given["path"]))
            case "update":
                self._state = update.update(state, groups)[0]
            case "evaluate" | "logprobs":
                getattr(update, name)(state, groups)
            case "weights":
                self._buckets = iter(update.weights(state, **given))
            case "bucket":
                next(self._buckets, None)
            case "save":
                return update.save(Path(given["path"]), state)
            case _:
                raise ValueError(f"process 0 calls {name!r}, which no trainer has")
        return None


def _encode(
    name: str, arguments: Mapping[str, Any], groups: Sequence[Group] | None = None
) -> bytes:
    head = json.dumps([name, arguments]).encode()
    return head + b"\n" + (b"" if groups is None else records.dumps(groups))


def _decode(message: bytes) -> tuple[str, dict[str, Any], list[Group]]:
    head, _, body = message.partition(b"\n")
    name, arguments = json.loads(head)
    return name, arguments, records.loads(body) if body else []
