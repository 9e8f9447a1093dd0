"""Import modules that a command line or a config names: agents, workflows, reward functions.

    package.module        as Python imports it
    path/to/file.py       a file that is in no package

What fails in them is the user's: a UserError of one line.
"""

import difflib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rlx.base import UserError


def load(place: str) -> ModuleType:
    """Return the module that `place` names; the same one in every process of this directory.

    Raises:
      UserError: no such file or module, or it cannot be imported.
    """
    return _of_file(Path(place)) if place.endswith(".py") else _by_name(place)


def where(error: BaseException) -> str:
    """Return an exception in one line, with the line of the source that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<frozen")]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text


def _by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"cannot import {name}: {where(error)}") from error
        raise UserError(
            f"there is no module {error.name!r}{_near_module(error.name)}; is its directory on "
            "PYTHONPATH? A file is named as path/to/file.py:Class"
        ) from None
    except Exception as error:
        raise UserError(f"cannot import {name}: {where(error)}") from error


def _near_module(name: str) -> str:
    parent, _, last = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    siblings = [found.name for found in pkgutil.iter_modules(path)] if path or not parent else []
    near = difflib.get_close_matches(last, siblings, n=1)
    return f", did you mean {'.'.join(filter(None, (parent, near[0])))!r}?" if near else ""


def _of_file(path: Path) -> ModuleType:
    """Return the module of a file; its directory becomes the last one that is importable."""
    if not path.is_file():
        others = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), others, n=1)
        hint = f"did you mean {near[0]}?" if near else "give its path from here, or the whole one"
        raise UserError(f"there is no file {path}; {hint}")
    path = path.resolve()
    name = "file_" + "".join(c if c.isalnum() else "_" for c in str(path.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"cannot import {path}: {where(error)}") from error
    return module
