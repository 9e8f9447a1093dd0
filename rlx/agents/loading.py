"""Load the agent or workflow class that a config or command line names.

An agent has `async run(self, data, **extra_kwargs)`; a workflow has `async run(self, fleet, task)`,
see `rlx.rollout.workflows.Workflow`.
"""

import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from rlx.base import UserError, nearest, unknown
from rlx.cli import user_code

_NONE: Mapping[str, type] = {}
_FORMS = (
    "an agent has `async def run(self, data, **extra_kwargs)`, a workflow of rlx "
    "`async def run(self, fleet, task)`"
)
GIVEN = ("base_url", "api_key", "http_client")  # keyword arguments of an agent's `run`


def load_class(name: str, key: str = "workflow", table: Mapping[str, type] = _NONE) -> type:
    """Return the class `name`, see `user_code.find`; raise UserError if there is none."""
    cls = user_code.find(key, name, table)
    if not inspect.isclass(cls):
        kind = type(cls).__name__
        raise UserError(f"{key}={name!r} is a {kind}, not a class; name a class with `run`")
    return cls


def kind(cls: type) -> Literal["agent", "workflow"]:
    """Return whether `cls` is an agent or a workflow, by its `run`; UserError if it is neither."""
    run = getattr(cls, "run", None)
    if run is None:
        near = nearest("run", [n for n in dir(cls) if n[0] != "_"])
        hint = f"; rename {near!r} to `run`" if near else ""
        raise UserError(f"class {cls.__name__} has no `run`{hint}; {_FORMS}")
    run = inspect.unwrap(run)
    if not inspect.iscoroutinefunction(run):
        raise UserError(f"{cls.__name__}.run is not async; {_FORMS}")
    if _callable(run, "data", **dict.fromkeys(GIVEN)):
        return "agent"
    if _callable(run, "fleet", "task"):
        return "workflow"
    signature = f"{cls.__name__}.run{inspect.signature(run)}"
    raise UserError(f"{signature} has the wrong parameters; {_FORMS}")


def instance(cls: type, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return `cls(**kwargs)`; raise UserError if an argument is unknown or missing, or it fails."""
    kwargs = dict(kwargs or {})
    with suppress(TypeError, ValueError):  # some C classes have no signature
        _check_names(cls, inspect.signature(cls), kwargs)
    try:
        return cls(**kwargs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        called = f"{cls.__name__}({_keyword_text(kwargs)})"
        raise UserError(f"{called} failed: {user_code.where(error)}") from error


def check_agent(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError unless `name` is an agent class and `cls(**kwargs)` works."""
    cls = load_class(name)
    if kind(cls) == "workflow":
        raise UserError(f"{name} is a workflow of rlx, not an agent; use rlx.evaluate")
    instance(cls, kwargs)


def parse_kwargs(kwargs: Any, flag: str = "--workflow_kwargs") -> dict[str, Any]:
    """Return arguments given as a mapping or as the text of a JSON object, or raise UserError."""
    kwargs = kwargs.to_dict() if hasattr(kwargs, "to_dict") else kwargs  # from a flag
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    text = str(kwargs or "")
    try:
        return {**(json.loads(text) if text.strip() else {})}
    except (ValueError, TypeError) as error:
        problem = f"{flag}={text!r} is not a JSON object ({error})"
        raise UserError(f"{problem}; write {flag}='{{\"name\": 1}}'") from None


def workflow_of(flags: Any, rollout: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of the workflow, from the flags or else from the config."""
    source = flags if flags.workflow else rollout
    return source.workflow, parse_kwargs(flags.workflow_kwargs or source.workflow_kwargs)


def _callable(run: Any, *positional: Any, **named: Any) -> bool:
    try:
        inspect.signature(run).bind(None, *positional, **named)
    except TypeError:
        return False
    return True


def _check_names(cls: type, signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    takes = signature.parameters.values()
    names = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    any_name = any(p.kind == p.VAR_KEYWORD for p in takes)
    for name in [name for name in kwargs if name not in names and not any_name]:
        if not names:
            raise UserError(f"{cls.__name__}() takes no arguments; remove {name!r}")
        raise unknown(f"argument of {cls.__name__}", name, names)
    needed = [p.name for p in takes if p.name in names and p.default is p.empty]
    if absent := [name for name in needed if name not in kwargs]:
        raise UserError(
            f"{cls.__name__}({_keyword_text(kwargs)}) lacks {', '.join(absent)}; give them"
        )


def _keyword_text(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}"[:60] for key, value in kwargs.items())
