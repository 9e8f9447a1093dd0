"""Types of a tool call's arguments that were written as text, by the tool's JSON Schema. Pure."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any

_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_ALL = frozenset(_KINDS.values())
_WORDS = {"true": True, "false": False, "null": None, "none": None}  # as Python writes them too
_DEPTH = 16  # of references in references


def typed(text: str, schema: Any, root: Any) -> Any:
    """Return an argument: a text where the schema allows one, else JSON if it is of its types.

    A text that may also be an array, an object or null is that where it is written so.

    Args:
      schema: of the argument. root: of all arguments, for references in it.
    """
    kinds, found = _kinds(schema, root), text
    if kinds == {"string"}:
        return text
    with suppress(ValueError, RecursionError):
        word = text.strip() if "string" in kinds else text.strip().lower()
        found = _WORDS[word] if word in _WORDS else json.loads(text)
    if isinstance(found, float) and "number" not in kinds and found.is_integer():
        found = int(found)
    scalar = isinstance(found, str | int | float) and "string" in kinds and kinds != _ALL
    return text if scalar or _KINDS[type(found)] not in kinds else _fitted(found, schema, root)


def part(schema: Any, key: str | int, root: Any) -> Any:
    """Return the schema of a property or an item of what a schema describes; {}: unknown."""
    for own in _schemas(schema, root):
        known = own.get("properties") if isinstance(key, str) else {key: own.get("items")}
        known = known if isinstance(known, Mapping) else {}
        found = known.get(key, own.get("additionalProperties"))
        if isinstance(found, Mapping):
            return found
    return {}


def _fitted(value: Any, schema: Any, root: Any) -> Any:
    """Return JSON with texts in place of numbers where a schema wants texts."""
    if isinstance(value, dict):
        return {k: _fitted(v, part(schema, k, root), root) for k, v in value.items()}
    if isinstance(value, list):
        return [_fitted(v, part(schema, k, root), root) for k, v in enumerate(value)]
    kinds = _kinds(schema, root)
    wrong = type(value) in (int, float) and _KINDS[type(value)] not in kinds
    return json.dumps(value) if wrong and "string" in kinds else value


def _kinds(schema: Any, root: Any, depth: int = _DEPTH) -> frozenset[str]:
    """Return the types that a schema allows."""
    if not isinstance(schema, Mapping) or not depth:
        return _ALL
    found, own = _ALL, schema.get("type")
    if own:
        found &= frozenset(own if isinstance(own, list) else [own])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        found &= frozenset(_KINDS.get(type(value), "") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(key), list):
            found &= frozenset().union(*(_kinds(each, root, depth - 1) for each in some))
    for each in (*_list(schema, "allOf"), _target(schema, root)):
        found &= _kinds(each, root, depth - 1)
    return found | {"integer"} if "number" in found else found


def _schemas(schema: Any, root: Any, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all that it is made of."""
    if isinstance(schema, Mapping) and depth:
        yield schema
        alternatives = (each for key in ("allOf", "anyOf", "oneOf") for each in _list(schema, key))
        for each in (_target(schema, root), *alternatives):
            yield from _schemas(each, root, depth - 1)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _target(schema: Mapping[str, Any], root: Any) -> Any:
    """Return what `$ref` points to in the root; None: there is none."""
    ref = schema.get("$ref")
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    names = [name.replace("~1", "/").replace("~0", "~") for name in ref[1:].split("/")[1:]]
    return reduce(lambda at, name: at.get(name) if isinstance(at, Mapping) else None, names, root)
