"""Threads for blocking calls of an event loop.

asyncio has one pool for all calls: users' tools that hang would block rlx's calls and the exit.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock, Thread
from typing import Any

from rlx.base import place


class DaemonThreads(ThreadPoolExecutor):
    """Pool of at most `most` daemon threads."""

    def __init__(self, most: int):
        self._most, self._lock, self._held = most, Lock(), set[Future]()
        self._queued: deque[tuple[Future, Callable[[], Any]]] = deque()
        self.calls: dict[Future, tuple[str, float]] = {}  # running, with start in monotonic seconds

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Call `function` as soon as a thread is free."""
        future = _Call()
        future.leave = partial(self._fill, future)
        self._queued.append((future, partial(function, *args, **kwargs)))
        self._fill()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: running calls end with the process."""

    def _fill(self, ended: Future | None = None) -> None:
        with self._lock:
            self._held -= {ended}
            while self._queued and len(self._held) < self._most:
                future, call = self._queued.popleft()
                self._held.add(future)
                Thread(target=self._work, args=(future, call), name="call", daemon=True).start()

    def _work(self, future: Future, call: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            self.calls[future] = _name(call), time.monotonic()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del self.calls[future]
        self._fill(future)


class _Call(Future):
    """A call that, if cancelled while it runs, frees its place in the pool."""

    leave: Callable[[], None]

    def cancel(self) -> bool:
        if self.running():
            self.leave()
        return super().cancel()


def _name(call: Any) -> str:
    """Name a call as `Search.run (FILE, line N)`, looking inside `asyncio.to_thread`'s partials."""
    while isinstance(call, partial):
        inner = call.args[0] if call.args and place(call.func) == "" else None
        call = inner if callable(inner) else call.func
    return f"{getattr(call, '__qualname__', call)} {place(call)}".rstrip()


async def in_thread(function: Callable, *args: Any) -> Any:
    """Call `function` in a new thread."""
    return await asyncio.get_running_loop().run_in_executor(DaemonThreads(1), function, *args)
