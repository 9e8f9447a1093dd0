"""Whose code a stack is in: the user's, a framework's, or Python's; and which call it is at."""

import linecache
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_RLX = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")} | {"/dist-packages/"})
)
_STDLIB = sysconfig.get_path("stdlib")
_CALL_LIMIT = 90  # characters of a call's source


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a stack.

    Attributes:
      owner: user | framework | python | rlx.
      call: the source of the expression that is being evaluated; "" where there is no source.
    """

    file: str
    line: int
    function: str
    owner: str
    call: str = ""

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line} {self.function}"


def owner(file: str) -> str:
    """user | framework | python | rlx, by where the file lies."""
    if file.startswith(_RLX):
        return "rlx"
    if "site-packages" in file or any(place in file for place in _LIBRARIES):
        return "framework"
    if file.startswith((_STDLIB, "<frozen")):
        return "python"
    return "user"


def short(file: str) -> str:
    """A path as one would look for it: from the library's name, or from here."""
    for mark in ("site-packages/", "dist-packages/"):
        if mark in file:
            return file.rsplit(mark, 1)[1]
    if file.startswith(_STDLIB):
        return file[len(_STDLIB) + 1 :]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


def at(code: CodeType, instruction: int) -> Place:
    """The place of an instruction (a frame's f_lasti, bytes) of `code`."""
    line, end_line, start, end = code.co_firstlineno, None, None, None
    positions = list(code.co_positions())
    if 0 <= instruction // 2 < len(positions):
        found = positions[instruction // 2]
        line, end_line, start, end = found[0] or line, found[1], found[2], found[3]
    call = linecache.getline(code.co_filename, line)
    if end_line is not None and start is not None and end is not None:
        lines = [linecache.getline(code.co_filename, n) for n in range(line, end_line + 1)]
        lines[-1] = lines[-1].encode()[:end].decode("utf-8", "replace")
        call = "".join(lines).encode()[start:].decode("utf-8", "replace")
    call = " ".join(call.split())
    call = call if len(call) <= _CALL_LIMIT else f"{call[: _CALL_LIMIT - 1]}…"
    name = code.co_qualname.replace(".<locals>", "")
    return Place(code.co_filename, line, name, owner(code.co_filename), call)


def stack(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """(code, instruction) of a frame and its callers, outermost first; cheap, to be read later."""
    out = []
    while frame is not None:
        out.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return out[::-1]


def awaited(coroutine: Any) -> list[tuple[CodeType, int]]:
    """The same of a suspended coroutine and of what it awaits."""
    out = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            break
        out.append((frame.f_code, frame.f_lasti))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return out


def blamed(places: Sequence[Place]) -> int:
    """The index of the deepest frame of the user's; else of a framework's; else the deepest."""
    for who in ("user", "framework"):
        found = [i for i, place in enumerate(places) if place.owner == who]
        if found:
            return found[-1]
    return len(places) - 1


def trimmed(error: BaseException) -> list[Place]:
    """The user's frames of an exception's traceback, with the deepest where it is another's."""
    tb, exact = error.__traceback__, []
    while tb is not None:
        exact.append(at(tb.tb_frame.f_code, tb.tb_lasti))
        tb = tb.tb_next
    own = [place for place in exact if place.owner == "user"]
    if exact and exact[-1] not in own and exact[-1].owner != "rlx":
        own.append(exact[-1])
    return own
