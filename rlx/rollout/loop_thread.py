"""Run an asyncio loop on a thread of its own, while the main thread waits and computes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any


class LoopThread:
    """A thread that runs coroutines for other threads.

    Attributes:
      ending: True once `close` has begun, so that cancelled work does not begin anew.
    """

    def __init__(self, name: str):
        self.ending = False
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; coroutines may be submitted from now on."""
        self._thread.start()
        self._started.wait()

    def submit(self, coroutine: Coroutine) -> Future:
        """Run `coroutine` on the loop, concurrently with everything else there."""
        if self._loop is None:
            raise RuntimeError("start the loop's thread before submitting to it")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine) -> Any:
        """Run `coroutine` on the loop and wait for its result; not from the loop itself."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("run() would wait for itself on the loop's own thread; await it")
        return self.submit(coroutine).result()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop; do nothing where the loop has ended or not begun."""
        if self._loop:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        self.ending = True
        if self._loop and self._end and self._thread.is_alive():
            self.call_soon(self._end.set)
            self._thread.join()

    def _run_loop(self) -> None:
        async def until_closed() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            self._started.set()
            await self._end.wait()

        try:
            asyncio.run(until_closed())  # which cancels whatever is left
        finally:
            self._started.set()
