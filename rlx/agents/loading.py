"""Load the classes that a command line names: agents, and workflows of rlx.

An agent has `async run(self, data, **extra_kwargs)`; a workflow has `async run(self, fleet, task)`,
see `rlx.rollout.workflows.Workflow`. Mistakes in here are the user's: a UserError of one line.
"""

import difflib
import inspect
import json
from collections.abc import Mapping
from typing import Any, Literal

from rlx.base import UserError, unknown
from rlx.cli import user_code

_NONE: Mapping[str, type] = {}
_FORMS = (
    "an agent has `async def run(self, data, **extra_kwargs)`, a workflow of rlx "
    "`async def run(self, fleet, task)`"
)
GIVEN = ("base_url", "api_key", "http_client")  # what `run` of an agent gets by name


def load_class(name: str, key: str = "workflow", table: Mapping[str, type] = _NONE) -> type:
    """Return the class that `name` names, as `user_code.find` takes it.

    Raises:
      UserError: as `find`, or it is no class.
    """
    found = user_code.find(key, name, table)
    if not inspect.isclass(found):
        what = type(found).__name__
        raise UserError(f"{key}={name!r} is a {what}, not a class; name a class with `run`")
    return found


def kind(cls: type) -> Literal["agent", "workflow"]:
    """Return whether `cls` is an agent or a workflow of rlx, by what its `run` takes.

    Raises:
      UserError: it is neither.
    """
    run = getattr(cls, "run", None)
    if run is None:
        near = difflib.get_close_matches("run", [n for n in dir(cls) if n[0] != "_"], n=1)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        raise UserError(f"class {cls.__name__} has no `run`{hint}; {_FORMS}")
    run = inspect.unwrap(run)
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


def check_agent(name: str, kwargs: Mapping[str, Any]) -> None:
    """Check that `name` is an agent class that can be made of `kwargs`.

    Raises:
      UserError: as `load_class`, `kind` and `instance`, or it is a workflow of rlx.
    """
    cls = load_class(name)
    if kind(cls) == "workflow":
        raise UserError(f"{name} is no agent but a workflow of rlx; use rlx.evaluate")
    instance(cls, kwargs)


def parse_kwargs(given: Any, flag: str = "--workflow_kwargs") -> dict[str, Any]:
    """Return the arguments in a mapping, or in the text of a JSON object; none when empty.

    Raises:
      UserError: anything else.
    """
    given = given.to_dict() if hasattr(given, "to_dict") else given  # from a flag
    if isinstance(given, Mapping):
        return dict(given)
    text = str(given or "")
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise UserError(
            f"{flag}={text!r} is not JSON ({error}); write {flag}='{{\"name\": 1}}'"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{flag}={text!r} is no JSON object; write {flag}='{{\"name\": 1}}'")
    return found


def chosen(flags: Any, rollout: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of the workflow that flags name, or else the config's section."""
    given = flags if flags.workflow else rollout
    return given.workflow, parse_kwargs(flags.workflow_kwargs or given.workflow_kwargs)


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


def _spelled(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}"[:60] for key, value in kwargs.items())
