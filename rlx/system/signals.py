"""Handle Ctrl-C and SIGTERM: the first asks a run to finish its step, the second ends it."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LAST_SECONDS = 8.0  # from the second signal to the end, whatever blocks
_CUT_SECONDS = 10.0  # that users' code in the main thread has, twice, after the first
WHOLE: ContextVar[bool] = ContextVar("WHOLE", default=False)  # whether the process is a command's


class Cut(BaseException):
    """Ends users' code in the main thread that does not return after the first signal."""


def end_soon(status: int) -> None:
    """End this process after LAST_SECONDS, where it is a command's, though a thread may block."""

    if WHOLE.get():
        timer = threading.Timer(LAST_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()


@contextmanager
def interrupts(
    stop: Callable[[], None], inside: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; raise KeyboardInterrupt at the second.

    Args:
      stop: called in a thread: what a signal interrupts may hold the lock of the terminal.
      inside: returns the call of users' code that the main thread is in, or None. One that goes on
        after the first signal ends by Cut.
    """
    over, late = threading.Event(), list[object]()

    def follow() -> None:
        stop()
        before = None
        while not over.wait(_CUT_SECONDS):
            now = inside()
            if now is not None and now is before:
                late.append(now)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            before = now

    def again(number, frame):
        if late:
            if late.pop() is inside():
                raise Cut("it does not return after the signal")
            return
        end_soon(128 + signal.SIGINT)
        raise KeyboardInterrupt

    def handle(number, frame):
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, again)
        threading.Thread(target=follow, daemon=True).start()

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        over.set()
        for each, handler in before.items():
            signal.signal(each, handler)
