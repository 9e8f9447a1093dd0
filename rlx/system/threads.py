"""Run an asyncio event loop on its own thread, and its blocking calls on threads of their own.

asyncio has one pool for all calls: users' tools that hang would block rlx's calls and the exit.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from rlx.base import place

CLOSE_SECONDS = 3.0  # for the loop to end; a later one ends with the process
_THREADS = 32  # for blocking calls of users' code


class LoopThread:
    """A thread that runs coroutines for other threads."""

    def __init__(self, name: str):
        # `ending`, from `close` on, keeps cancelled work from restarting. `threads` are the pool of
        # `asyncio.to_thread` on this loop, for users' code only.
        self.ending, self.threads = False, DaemonThreads(_THREADS)
        # When the loop last turned, as of `watched`.
        self.turned: Callable[[], float] = lambda: 0.0
        self.thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def start(self) -> None:
        """Start the thread and wait until it takes coroutines."""
        self.thread.start()
        self._started.wait()

    def submit(self, coroutine: Coroutine) -> Future:
        """Run `coroutine` on the loop; return its future."""
        if self._loop is None:
            raise RuntimeError("start the loop's thread before submitting to it")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine, seconds: float | None = None) -> Any:
        """Return a coroutine's result to another thread; TimeoutError after `seconds`."""
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RuntimeError("run() would wait for itself on the loop's own thread; await it")
        return self.submit(coroutine).result(seconds)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop; do nothing if the loop is not running."""
        if self._loop:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel running coroutines and end the thread, unless something blocks it."""
        self.ending = True
        if self._loop and self._end and self.thread.is_alive():
            self.call_soon(self._end.set)
            self.thread.join(CLOSE_SECONDS)

    def _run_loop(self) -> None:
        async def until_closed() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            self.turned = last_turn(self._loop)
            self._loop.set_default_executor(self.threads)
            self._started.set()
            await self._end.wait()

        try:
            asyncio.run(until_closed())  # then cancels all other tasks
        finally:
            self._started.set()


def last_turn(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return a function for another thread: when the loop last turned for a call of it, or 0.0."""
    last = deque([0.0], maxlen=1)

    def turned() -> float:
        with suppress(RuntimeError):  # closed
            loop.call_soon_threadsafe(lambda: last.append(time.monotonic()))
        return last[0]

    return turned


async def run_all(*coroutines: Coroutine) -> list[Any]:
    """Return all results; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def run_alone(coroutine: Coroutine, name: str, seconds: float) -> Any:
    """Return a coroutine's result from a new loop, also inside another; TimeoutError if late."""
    loop = LoopThread(name)
    loop.start()
    try:
        return loop.run(asyncio.wait_for(coroutine, seconds), seconds + CLOSE_SECONDS)
    finally:
        loop.close()


class DaemonThreads(ThreadPoolExecutor):
    """Pool of at most `most` daemon threads."""

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._held = set[Future]()  # calls that have a thread, until they end or are cancelled
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

    def _fill(self, done: Future | None = None) -> None:
        with self._lock:
            self._held -= {done}
            while self._queued and len(self._held) < self._most:
                future, call = self._queued.popleft()
                self._held.add(future)
                args = (future, call)
                threading.Thread(target=self._work, args=args, name="call", daemon=True).start()

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
