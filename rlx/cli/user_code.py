"""Load what a config or a command line names: losses, rewards, workflows, data, agents, writers.

    name                     of rlx's own, from a table
    package.module:name      as Python imports the module
    path/to/file.py:name     of a file that is in no package

A failure in a user's module becomes a UserError of one line, with file and line. Names that begin
with one of OF_ENVIRONMENTS belong to rlx/environments.
"""

import importlib
import importlib.util
import linecache
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rlx.base import UserError, nearest, place, unknown

_NONE: Mapping[str, Any] = {}
_OF_FILE, _EDITED = "file_", "__edited__"  # how names of files' modules begin; their attribute
_STANDARD, _RLX = (f"{Path(file).parent}/" for file in (traceback.__file__, Path(__file__).parent))
LIBRARIES = ("<frozen", _STANDARD, _RLX, "/site-packages/", "/dist-packages/")
_LINE = 90  # characters of a source line
OF_ENVIRONMENTS = ("mcp:", "openenv:", "reasoning_gym:", "textarena:", "verifiers:")


def find(key: str, name: str, table: Mapping[str, Any] = _NONE) -> Any:
    """Return the object that `name` names: an entry of `table`, `module:name` or `FILE.py:name`.

    UserError, which begins with `key`, if there is none, or its module cannot be imported. `table`
    may have `scheme:` → function of the rest of a name that begins with it.
    """
    scheme, _, rest = name.partition(":")
    if f"{scheme}:" in table:
        return table[f"{scheme}:"](rest)
    place, separator, attribute = name.rpartition(":")
    if not separator and name in table:
        return table[name]
    if not separator and table and not name.endswith(".py"):
        raise unknown(key, name, table)
    if not place or not attribute.isidentifier():
        raise UserError(f"{key}={name!r} names nothing; write path/to/file.py:name or module:name")
    try:
        module = load(place)
    except UserError as error:
        raise UserError(f"{key}={name!r}: {error}") from error
    if not hasattr(module, attribute):
        choices = names(module)
        near = nearest(attribute, choices)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(choices) or 'none'}"
        raise UserError(f"{key}={name!r}: {place} has no {attribute!r}; {hint}")
    return getattr(module, attribute)


def is_own(name: str) -> bool:
    """Return whether `name` is spelled as a user's own code, not as an entry of a table."""
    return ":" in name and not name.startswith(OF_ENVIRONMENTS)


def names(module: ModuleType) -> list[str]:
    """Return the public names of callables that a module defines, or all it has if it has none."""
    every = {k: v for k, v in vars(module).items() if k[0] != "_" and callable(v)}
    local_names = [k for k, v in every.items() if getattr(v, "__module__", "") == module.__name__]
    return local_names or list(every)


def load(place: str) -> ModuleType:
    """Return the module that `place` names, the same one in every process here; or UserError."""
    if place.endswith(".py"):
        return _of_file(Path(place))
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) else ""
        if not lacks or not f"{place}.".startswith(f"{lacks}."):
            raise UserError(f"cannot import {place}: {where(error)}") from error
        remedy = "is its directory on PYTHONPATH? A file is named as path/to/file.py:name"
        raise UserError(f"there is no module {lacks!r}{_near_module(lacks)}; {remedy}") from None


def forget_edited() -> None:
    """Let files that were edited be loaded anew; call it between two runs, not in one."""
    for name, module in sys.modules.copy().items():  # at once: other threads import
        loaded = getattr(module, _EDITED, None) if name.startswith(_OF_FILE) else None
        if loaded and loaded != _file_state(Path(str(module.__file__))):
            del sys.modules[name]


def own_files() -> list[Path]:
    """Return the files of the modules in this process that are a user's, not of a library."""
    files = [str(getattr(module, "__file__", None)) for module in sys.modules.copy().values()]
    paths = (f for f in files if f.endswith(".py") and not any(part in f for part in LIBRARIES))
    return [Path(file) for file in dict.fromkeys(paths)]


def frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, outermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))][::-1]


def of_user(frame: FrameType) -> bool:
    """Return whether a frame is in the user's code, not in a library."""
    return not any(part in frame.f_code.co_filename for part in LIBRARIES)


def place_of(stack: Sequence[FrameType]) -> str:
    """Return the user's innermost line, as `agent.py:14 Agent.run: time.sleep(5)`."""
    if not (trace := [*filter(of_user, stack)] or stack):
        return "its end"
    code, number = trace[-1].f_code, trace[-1].f_lineno or 0  # None in between two lines
    source = linecache.getline(code.co_filename, number).strip()[:_LINE]
    return f"{code.co_filename}:{number} {code.co_qualname}: {source}"


def where(error: BaseException, function: Any = None, most: int = 1) -> str:
    """Return an exception in one line with the user's `line`, else `function`'s, else any."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    return f"{words(error)} {line(error, most=most) or place(function) or line(error, ())}".rstrip()


def words(error: BaseException, most: int = 300) -> str:
    """Return kind and message of an exception in one line of at most `most` characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:most]


def line(error: BaseException, libraries: tuple[str, ...] = LIBRARIES, most: int = 1) -> str:
    """Return `(FILE, line N)` of the last `most` lines of the user's that an exception came by."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not any(part in f.filename for part in libraries)]
    places = "; ".join(f"{f.filename}, line {f.lineno}" for f in user_frames[-most:])
    return f"({places})" if user_frames else ""


def _near_module(name: str) -> str:
    parent, _, last = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    siblings = [module.name for module in pkgutil.iter_modules(path)] if path or not parent else []
    near = nearest(last, siblings)
    return f", did you mean {'.'.join(filter(None, (parent, near)))!r}?" if near else ""


def _of_file(path: Path) -> ModuleType:
    """Return the module of a file; its directory becomes the last one that is importable."""
    if not path.is_file():
        near = nearest(path.name, (other.name for other in path.parent.glob("*.py")))
        usual = "give a path relative to this directory"
        hint = f"did you mean {path.with_name(near)}?" if near else usual
        raise UserError(f"there is no file {path}; {hint}")
    path = path.resolve()
    name = _OF_FILE + "".join(c if c.isalnum() else "_" for c in str(path.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _EDITED, _file_state(path))
    sys.modules[name] = module  # dataclasses and pickle look there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"cannot import {path}: {where(error)}") from error
    return module


def _file_state(path: Path) -> tuple[int, int]:
    """Return when a file was last written, ns, and its bytes; zeros where it is gone."""
    with suppress(OSError):
        return (stat := path.stat()).st_mtime_ns, stat.st_size
    return 0, 0
