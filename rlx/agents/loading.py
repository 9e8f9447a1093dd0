"""Loads the classes that a command line names: agents, and workflows of rlx.

    package.module.Class        as Python imports it
    path/to/file.py:Class       a file that is in no package
    package.module:Class        as rewards are named

An agent has `async run(self, data, **extra_kwargs)`; a workflow has `async run(self, fleet, task)`,
see `rlx.rollout.workflows.Workflow`. Mistakes in here are the user's: a UserError of one line.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Literal

from rlx.base import UserError, unknown
from rlx.cli import user_code

_FORMS = (
    "an agent has `async def run(self, data, **extra_kwargs)`, a workflow of rlx "
    "`async def run(self, fleet, task)`"
)
GIVEN = ("base_url", "api_key", "http_client")  # what `run` of an agent gets by name


def load_class(text: str) -> type:
    """Return the class that `text` names.

    Raises:
      UserError: no such file, module or class (the nearest name is suggested), or the module
        cannot be imported.
    """
    place, separator, name = text.rpartition(":" if ":" in text else ".")
    if not separator or not place or not name.isidentifier():
        raise UserError(
            f"{text!r} names no class; write package.module.Class or path/to/file.py:Class"
        )
    module = user_code.load(place)
    found = getattr(module, name, None)
    if inspect.isclass(found):
        return found
    if found is not None:
        kind = type(found).__name__
        raise UserError(f"{name} of {place} is a {kind}, not a class; name a class with `run`")
    choices = _classes(module)
    if not choices:
        raise UserError(f"{place} has no class {name!r}, nor any other; is it the right file?")
    raise unknown(f"class of {place}", name, choices)


def kind(cls: type) -> Literal["agent", "workflow"]:
    """Return whether `cls` is an agent or a workflow of rlx, by what its `run` takes.

    Raises:
      UserError: it is neither.
    """
    run = inspect.unwrap(getattr(cls, "run", None) or _missing)
    if run is _missing:
        near = difflib.get_close_matches("run", [n for n in dir(cls) if n[0] != "_"], n=1)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        raise UserError(f"class {cls.__name__} has no `run`{hint}; {_FORMS}")
    if not inspect.iscoroutinefunction(run):
        raise UserError(f"{cls.__name__}.run is not async; {_FORMS}")
    if _callable(run, "data", **dict.fromkeys(GIVEN)):
        return "agent"
    if _callable(run, "fleet", "task"):
        return "workflow"
    takes = inspect.signature(run)
    raise UserError(f"{cls.__name__}.run{takes} cannot be called as either; {_FORMS}")


def instance(cls: type, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return `cls(**kwargs)`.

    Raises:
      UserError: a name is unknown or missing, or the constructor raised.
    """
    kwargs = dict(kwargs or {})
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # some of C's have none
        signature = None
    if signature is not None:
        _check_names(cls, signature, kwargs)
    try:
        return cls(**kwargs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{cls.__name__}({_spelled(kwargs)}) failed: {user_code.where(error)}"
        ) from error


def maker(name: str, kwargs: str) -> Callable[[], Any]:
    """Return what makes instances of the agent class `name`; one has been made when it returns.

    Args:
      kwargs: of its constructor, a JSON object.

    Raises:
      UserError: as `load_class`, `kind`, `parse_kwargs` and `instance`, or it is a workflow of rlx.
    """
    cls = load_class(name)
    if kind(cls) == "workflow":
        raise UserError(f"{name} is no agent but a workflow of rlx; use rlx.evaluate")
    make = partial(instance, cls, parse_kwargs(kwargs))
    make()
    return make


def parse_kwargs(text: str, flag: str = "--workflow_kwargs") -> dict[str, Any]:
    """Return the arguments in a JSON object; none when empty.

    Raises:
      UserError: anything else.
    """
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise UserError(
            f"{flag}={text!r} is not JSON ({error}); write {flag}='{{\"name\": 1}}'"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{flag}={text!r} is no JSON object; write {flag}='{{\"name\": 1}}'")
    return found


def _missing() -> None:
    """Stand for a `run` that a class does not have."""


def _callable(run: Any, *positional: Any, **named: Any) -> bool:
    """Return whether `run` of an instance could be called so."""
    try:
        inspect.signature(run).bind(None, *positional, **named)
    except TypeError:
        return False
    return True


def _check_names(cls: type, signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    takes = signature.parameters.values()
    named = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind == p.VAR_KEYWORD for p in takes):
        for name in kwargs:
            if name not in named and not named:
                raise UserError(f"{cls.__name__}() takes no arguments and was given {name!r}")
            if name not in named:
                raise unknown(f"argument of {cls.__name__}", name, named)
    needed = [p.name for p in takes if p.name in named and p.default is p.empty]
    absent = [name for name in needed if name not in kwargs]
    if absent:
        raise UserError(f"{cls.__name__}({_spelled(kwargs)}) lacks {', '.join(absent)}; give them")


def _classes(module: ModuleType) -> list[str]:
    """Return the classes that a module defines, or all that it has when it defines none."""
    every = {k: v for k, v in vars(module).items() if inspect.isclass(v) and k[0] != "_"}
    own = [k for k, v in every.items() if v.__module__ == module.__name__]
    return own or list(every)


def _spelled(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}"[:60] for key, value in kwargs.items())
