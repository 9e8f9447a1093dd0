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
    """Runs at most `most` calls at one time, in threads that end with the process.

    Attributes:
      calls: those under way: name, and when it began, seconds, monotonic.
    """

    def __init__(self, most: int):
        self._most, self._lock, self._held = most, Lock(), set[Future]()
        self._queued: deque[tuple[Future, Callable[[], Any]]] = deque()
        self.calls: dict[Future, tuple[str, float]] = {}

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Call `function` in a thread, as soon as there is a place."""
        future = _Call()
        future.leave = partial(self._fill, future)
        self._queued.append((future, partial(function, *args, **kwargs)))
        self._fill()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: calls under way end with the process."""

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
    """A call that leaves its place to others once nobody waits for it, though it runs on."""

    leave: Callable[[], None]

    def cancel(self) -> bool:
        """Cancel it where it has not begun."""
        if self.running():
            self.leave()
        return super().cancel()


def _name(call: Any) -> str:
    """Return `Search.run (FILE, line N)` of a call, behind the partials of `asyncio.to_thread`."""
    while isinstance(call, partial):
        call = call.args[0] if call.args and place(call.func) == "" else call.func
    return f"{getattr(call, '__qualname__', call)} {place(call)}".rstrip()


async def in_thread(function: Callable, *args: Any) -> Any:
    """Call `function` in a thread of its own, which no user's code can keep busy."""
    return await asyncio.get_running_loop().run_in_executor(DaemonThreads(1), function, *args)
