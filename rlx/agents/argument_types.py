"""Convert tool arguments from text to the types of the tool's JSON Schema. Pure."""

import json
from collections.abc import Mapping
from functools import reduce
from itertools import chain
from typing import Any

_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "none": None}  # JSON's and Python's
_COMBINED = ("anyOf", "oneOf", "allOf")


def coerce(text: str, schema: Any, root: Any) -> Any:
    """Return an argument as text if its schema allows text, else as JSON of an allowed type.

    Text that is a valid array, object or null becomes that if the schema allows it. `root` is the
    schema of all arguments, which `$ref` points into.
    """
    kinds, word = _kinds(schema, root), text.strip().lower()
    try:
        plain = kinds and "string" not in kinds and word in _WORDS
        found = _WORDS[word] if plain else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(found, float) and "number" not in kinds and found.is_integer():
        found = int(found)
    scalar = isinstance(found, str | int | float) and "string" in kinds
    wrong = kinds and _KINDS[type(found)] not in kinds
    return text if scalar or wrong else _fitted(found, schema, root)


def subschema(schema: Any, key: str | int, root: Any) -> Any:
    """Return the schema of a property or an item."""
    for own in _schemas(schema, root):
        known = own.get("items" if isinstance(key, int) else "properties")
        if isinstance(key, str):
            named = known if isinstance(known, Mapping) else {}
            known = named.get(key, own.get("additionalProperties"))
        if isinstance(known, Mapping):
            return known
    return {}


def _fitted(value: Any, schema: Any, root: Any) -> Any:
    """Convert numbers to text where the schema wants text."""
    if isinstance(value, dict):
        return {k: _fitted(v, subschema(schema, k, root), root) for k, v in value.items()}
    if isinstance(value, list):
        return [_fitted(v, subschema(schema, k, root), root) for k, v in enumerate(value)]
    kinds = _kinds(schema, root) if type(value) in (int, float) else ()
    return json.dumps(value) if "string" in kinds and _KINDS[type(value)] not in kinds else value


def _kinds(schema: Any, root: Any) -> set[str]:
    """Return the types that a schema allows, empty if it does not restrict them."""
    found = set[str]()
    for own in _schemas(schema, root):
        values = own.get("enum", [own["const"]] if "const" in own else [])
        listed = [_KINDS[type(v)] for v in values] if isinstance(values, list) else []
        named = own.get("type") or listed
        found.update(map(str, named if isinstance(named, list) else [named]))
        if not named and not {"$ref", *_COMBINED} & set(own):
            return set()
    return found | {"integer"} if "number" in found else found


def _schemas(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """Return a schema and all schemas that it combines or refers to."""
    found, todo = list[Mapping[str, Any]](), [schema]
    while todo:
        own = todo.pop(0)
        if isinstance(own, Mapping) and all(own is not each for each in found):
            found.append(own)
            lists = (own[key] for key in _COMBINED if isinstance(own.get(key), list))
            todo += [_target(own, root), *chain(*lists)]
    return found


def _target(schema: Mapping[str, Any], root: Any) -> Any:
    """Return what `$ref` points to in the root, or None."""
    names = str(schema.get("$ref", "")).replace("~1", "\0").split("/")
    if names[0] != "#":
        return None
    names = [name.replace("\0", "/").replace("~0", "~") for name in names[1:]]
    return reduce(lambda at, name: at.get(name) if isinstance(at, Mapping) else None, names, root)
