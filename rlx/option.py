"""Declare an option of the config once: its default, its help, and the values it may have.

A frozen dataclass of a room declares its options as fields made by `option`. Defaults, checks,
flags and the reference in the docs derive from these fields.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from rlx.base import UserError, unknown

T = TypeVar("T")
Values = str | tuple[str, ...]


def option(default: Any, doc: str, values: Values = "") -> Any:
    """Return the dataclass field of an option; `doc` is one line of help.

    `values` are choices; or the range of a number, as its minimum (`1`) or an interval (`[0, 1)`).
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "values": values})


def options_of(room: type) -> dict[str, dataclasses.Field]:
    """Return name → field of each option that a dataclass declares, without its other fields."""
    return {field.name: field for field in dataclasses.fields(room) if "values" in field.metadata}


def read_options(room: type[T], *sections: Mapping[str, Any], **others: Any) -> T:
    """Return a dataclass whose fields have the values of the sections' keys of the same name.

    `others` are further fields, and those that are not as the sections have them. ValueError if
    several sections have a key that `others` does not name.
    """
    names = {field.name for field in dataclasses.fields(cast(Any, room))} - others.keys()
    values = dict(others)
    for section in sections:
        for name in names.intersection(section):
            if name in values:
                raise ValueError(f"{name} of {room.__name__} is a key of several sections")
            values[name] = tuple(v) if isinstance(v := section[name], list) else v
    return room(**values)


def check_value(key: str, value: Any, values: Values) -> None:
    """Raise UserError where `value` is none of the choices, or outside of the range."""
    if isinstance(values, tuple):
        if value not in values:
            raise unknown(key, str(value), values)
        return
    if not values:
        return
    low, _, high = values.strip("()[]").partition(", ")
    above = value > float(low) if values[0] == "(" else value >= float(low)
    below = not high or (value <= float(high) if values[-1] == "]" else value < float(high))
    if above and below:
        return
    if not high:
        raise UserError(f"{key}={value:g} is below {low}; set it to {low} or more")
    words = {
        "(0, inf)": "above 0 and finite", "[0, inf)": "finite and 0 or more", "(0, inf]": "above 0"
    }  # fmt: skip
    raise UserError(f"{key}={value:g} must be {words.get(values, f'in {values}')}")
