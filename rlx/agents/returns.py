"""Check the value that an agent's `run` returns: a reward, or rewards by completion id. Pure."""

import inspect
import math
import numbers
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

_RETURNED = "run returned"
_WANTED = "give a float, or {completion id: float}"


def mistake(value: Any, ids: Collection[str], what: str = _RETURNED) -> str:
    """Return one line, which begins with `what`, about the mistake in a reward; "" for none.

    It should be a finite number, or map `ids` of the run's completions to finite numbers.
    """
    for name, part in getattr(value, "parts", {}).items():
        if wrong := _of_number(part, f"{name} of the returned reward is"):
            return wrong
    if not isinstance(value, Mapping):
        return _of_number(value, what)
    if not value:
        return f"{what} {{}}, a reward for no completion; {_WANTED}"
    for key, reward in value.items():
        if not isinstance(key, str):
            return f"{what} a dict with the key {key!r:.60}; use `completion.id` as keys"
        if key not in ids:
            known = ", ".join(list(ids)[:3]) if ids else "none"
            problem = f"run rewards {key!r:.60}, which is no completion of this run ({known})"
            return f"{problem}; use `completion.id`"
        if wrong := _of_number(reward, f"the reward of {key} is"):
            return wrong
    return ""


def plain(value: Any) -> float | dict[str, float]:
    """Convert a value without a mistake to floats."""
    if isinstance(value, Mapping):
        return {key: float(reward) for key, reward in value.items()}
    return float(value)


def _of_number(value: Any, what: str) -> str:
    if value is None:
        remedy = "is a `return` missing on some path?" if what == _RETURNED else _WANTED
        return f"{what} None; {remedy}"
    if inspect.isawaitable(value):
        return f"{what} {type(value).__name__}, not yet awaited; write `return await …`"
    if isinstance(value, numbers.Real):
        with suppress(OverflowError):  # an integer beyond any float
            if math.isfinite(value):
                return ""
        return f"{what} {value!r:.60}; rewards must be finite: look for a division or logarithm"
    if hasattr(value, "shape"):  # an array or a tensor
        kind = f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"
        if math.prod(value.shape) == 1:
            return f"{what} a {kind}; write float(reward)"
        return f"{what} a {kind} of shape {tuple(value.shape)}; {_WANTED}"
    if isinstance(value, list | tuple):
        return f"{what} a {type(value).__name__} of {len(value)}; {_WANTED}"
    return f"{what} {value!r:.60}, a {type(value).__name__}; {_WANTED}"
