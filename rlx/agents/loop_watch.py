"""Find the line of code that blocks a thread or an event loop."""

import asyncio
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from rlx.cli.user_code import LIBRARIES

_LOOK = 0.1  # seconds between two looks
_LINE = 90  # characters of a source line


def stack(thread: int) -> list[FrameType]:
    """Return the frames of a thread, outermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))][::-1]


def is_own(frame: FrameType) -> bool:
    """Return whether a frame is in the user's code, not in a library."""
    return not any(part in frame.f_code.co_filename for part in LIBRARIES)


def place_of(frames: Sequence[FrameType]) -> str:
    """Return the user's innermost line, as `agent.py:14 Agent.run: time.sleep(5)`."""
    for frame in ([*filter(is_own, frames)] or frames)[-1:]:
        code, number = frame.f_code, frame.f_lineno
        source = linecache.getline(code.co_filename, number).strip()[:_LINE]
        return f"{code.co_filename}:{number} {code.co_qualname}: {source}"
    return "its end"


def watch_loop(late: Callable[[float, str], None]) -> None:
    """Watch the running loop until it is closed; call this in the loop's thread.

    Args:
      late: called from another thread, repeatedly while the loop is blocked, with the seconds so
        far and the blocking line.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def watch() -> None:
        while not loop.is_closed():
            turned, asked = threading.Event(), time.monotonic()
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(turned.set)
            while not turned.wait(_LOOK) and not loop.is_closed():
                late(time.monotonic() - asked, place_of(stack(thread)))
            time.sleep(_LOOK)

    threading.Thread(target=watch, name="rlx-loop-watch", daemon=True).start()
