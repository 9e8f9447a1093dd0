"""Threads for calls that an event loop must not wait in: rlx's own, and those of users' code.

asyncio has one pool for both: tools that hang would keep a publish waiting, and the process's end.
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
    """Runs at most `most` calls at one time; their threads never outlive the process.

    A call that nobody waits for any more, as an attempt's time was up, leaves its place to others.

    Attributes:
      calls: those under way: name, and when it began, seconds, monotonic.
    """

    def __init__(self, most: int):
        self._most, self._lock = most, Lock()
        self._queued: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._held: set[Future] = set()
        self.calls: dict[Future, tuple[str, float]] = {}

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Call `function` in a thread, as soon as there is a place."""
        future = _Call(self._leave)
        with self._lock:
            self._queued.append((future, partial(function, *args, **kwargs)))
        self._fill()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: calls under way end with the process."""

    def _fill(self) -> None:
        with self._lock:
            while self._queued and len(self._held) < self._most:
                future, call = self._queued.popleft()
                self._held.add(future)
                Thread(target=self._work, args=(future, call), name="call", daemon=True).start()

    def _work(self, future: Future, call: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            self.calls[future] = _name(call), time.monotonic()
            try:
                found = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)
            del self.calls[future]
        self._leave(future)

    def _leave(self, future: Future) -> None:
        with self._lock:
            self._held.discard(future)
        self._fill()


class _Call(Future):
    """A call whose `leave` is called when it is cancelled while it runs."""

    def __init__(self, leave: Callable[[Future], None]):
        super().__init__()
        self._leave = leave

    def cancel(self) -> bool:
        """Cancel it where it has not begun."""
        if self.running():
            self._leave(self)
        return super().cancel()


def _name(call: Any) -> str:
    """Return `Search.run (FILE, line N)` of a call, behind the partials of `asyncio.to_thread`."""
    while isinstance(call, partial):
        call = call.args[0] if call.args and place(call.func) == "" else call.func
    return f"{getattr(call, '__qualname__', call)} {place(call)}".rstrip()


async def in_thread(function: Callable, *args: Any) -> Any:
    """Call `function` in a thread of its own, which no user's code can keep busy."""
    return await asyncio.get_running_loop().run_in_executor(DaemonThreads(1), function, *args)
