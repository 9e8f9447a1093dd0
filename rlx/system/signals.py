"""Handle SIGINT, SIGTERM and SIGUSR1: the first lets a run finish its step, the second ends it.

Whoever sends one of the last two kills the process later, so they have a deadline.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

LAST_SECONDS = 8.0  # from the second signal to the exit, even if a thread blocks
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_CUT = signal.SIGURG  # sent to the main thread, and ignored outside `interrupts`
_CUT_SECONDS = 10.0  # users' code in the main thread has twice this time after the first signal
# Whether this process runs an rlx command, and may be ended.
IS_COMMAND: ContextVar[bool] = ContextVar("IS_COMMAND", default=False)


class Cut(BaseException):
    """Ends users' code in the main thread that does not return after the first signal."""


def end_soon(status: int, seconds: float = LAST_SECONDS) -> None:
    """Exit after some seconds, even if a thread blocks; do nothing unless IS_COMMAND."""
    if IS_COMMAND.get():
        timer = threading.Timer(seconds, os._exit, (status,))
        timer.daemon = True
        timer.start()


def interrupt(number: int, frame: object) -> NoReturn:
    """Handle a signal that ends a command at once: raise KeyboardInterrupt, and see `end_soon`."""
    end_soon(128 + signal.SIGINT)
    raise KeyboardInterrupt


@contextmanager
def interrupts(
    stop: Callable[[], None],  # in a thread: the interrupted code may hold the terminal's lock
    inside: Callable[[], object] = lambda: None,  # call of users' code in the main thread, or None
    late: Callable[[], object] = lambda: None,  # in a thread, `seconds` after all but SIGINT
    seconds: float = threading.TIMEOUT_MAX,
    forward: Callable[[int], object] = lambda number: None,  # in a thread, before `stop`
) -> Iterator[None]:
    """Call `stop` at the first signal, raise KeyboardInterrupt at the second; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, blocking = threading.Event(), list[object]()
    timer = threading.Timer(seconds, late)
    timer.daemon = True

    def follow(number: int) -> None:
        # A program that does not handle SIGTERM yet ends as well.
        forward(signal.SIGTERM if number == signal.SIGUSR1 else number)
        stop()
        before = None
        while not over.wait(_CUT_SECONDS):
            now = inside()
            if now is not None and now is before:
                blocking.append(now)
                signal.pthread_kill(threading.main_thread().ident or 0, _CUT)
            before = now

    def cut(number, frame):
        if blocking and blocking.pop() is inside():
            raise Cut("it does not return after the signal")

    def handle(number, frame):
        for each in _ASKED:
            signal.signal(each, interrupt)
        threading.Thread(target=follow, args=(number,), daemon=True).start()
        if number != signal.SIGINT:
            timer.start()

    handlers = {**dict.fromkeys(_ASKED, handle), _CUT: cut}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        yield
    finally:
        over.set()
        timer.cancel()
        for each, handler in before.items():
            signal.signal(each, handler)
