"""Arguments that were written as text have the types of the tool's schema."""

import enum
import json
from typing import Literal, Optional

import pytest
from pydantic import BaseModel, ConfigDict, Field

from rlx.agents.argument_types import coerce, subschema
from rlx.agents.tool_calls import Reader


class Unit(enum.Enum):
    """Of a temperature."""

    C = "1"
    F = "2"


class Place(BaseModel):
    """An address."""

    zip: str
    floor: int = 0
    further: Optional["Place"] = None


class Arguments(BaseModel):
    """Of a tool, as pydantic describes them to a model."""

    model_config = ConfigDict(extra="allow")
    zip: str = ""
    maybe_zip: str | None = None
    number: int = 0
    share: float | None = None
    flag: bool = False
    maybe_flag: bool | None = None
    either: int | bool | None = None
    text_or_number: str | int = ""
    text_or_list: str | list[str] = ""
    zips: list[str] = Field(default_factory=list)
    grid: list[list[int]] = Field(default_factory=list)
    place: Place | None = None
    places: dict[str, Place] = Field(default_factory=dict)
    unit: Unit = Unit.C
    kind: Literal["1", "x"] = "1"
    level: Literal[1, 2] = 1


SCHEMA = Arguments.model_json_schema()
CASES = [
    ("zip", "10115", "10115"), ("zip", "true", "true"), ("zip", "null", "null"),
    ("zip", '{"a": 1}', '{"a": 1}'), ("maybe_zip", "10115", "10115"), ("maybe_zip", "01", "01"),
    ("maybe_zip", "null", None), ("maybe_zip", "None", "None"), ("maybe_zip", "none", "none"),
    ("maybe_zip", '"x"', '"x"'),
    ("maybe_zip", "[1]", "[1]"), ("number", "7", 7), ("number", "7.0", 7), ("number", "x", "x"),
    ("share", "7", 7), ("share", "0.5", 0.5), ("share", "None", None), ("flag", "True", True),
    ("flag", "false", False), ("flag", " FALSE", False), ("maybe_flag", "true", True),
    ("maybe_flag", "null", None), ("either", "1", 1), ("either", "True", True),
    ("text_or_number", "10115", "10115"), ("text_or_list", '["1", 2]', ["1", "2"]),
    ("text_or_list", "10115", "10115"), ("zips", "[10115, \"01\"]", ["10115", "01"]),
    ("grid", "[[1], []]", [[1], []]), ("place", '{"zip": 10115, "floor": 2}',
     {"zip": "10115", "floor": 2}), ("place", "null", None),
    ("place", '{"zip": "1", "further": {"zip": 2}}', {"zip": "1", "further": {"zip": "2"}}),
    ("places", '{"a": {"zip": 3}}', {"a": {"zip": "3"}}), ("unit", "1", "1"), ("kind", "1", "1"),
    ("level", "1", 1), ("unknown", "5", 5), ("unknown", "True", "True"), ("unknown", "x", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), CASES)
def test_an_argument_has_the_type_that_its_schema_says(name, text, wanted):
    got = coerce(text, subschema(SCHEMA, name, SCHEMA), SCHEMA)
    assert (got, type(got)) == (wanted, type(wanted))
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    written = f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
    _, (call,) = Reader("", "qwen3_xml").calls(written, lambda: "id", [tool])
    assert json.loads(call["function"]["arguments"]) == {name: wanted}
    if text != "x":
        Arguments.model_validate_json(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        ({"type": ["string", "null"]}, "10115", "10115"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["boolean", "integer"]}, "True", True),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "10115", "10115"),
        ({"oneOf": [{"anyOf": [{"$ref": "#/$defs/zip"}]}, {"type": "null"}]}, "1", "1"),
        ({"$ref": "#/$defs/zip"}, "1", "1"), ({"$ref": "#/$defs/flag"}, "True", True),
        ({"allOf": [{"$ref": "#/$defs/flag"}]}, "true", True), ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, None]}, "1", 1), ({"enum": [1, None]}, "null", None),
        ({"type": [{"type": "string"}]}, "x", "x"), ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/a~1b/c"}, "1", "1"), ({"$ref": "#/$defs/self"}, "1", 1),
        ({"$ref": "#/nowhere"}, "1", 1), ({"$ref": "https://example.com"}, "x", "x"),
        (True, "1", 1), (None, "True", "True"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{"a": 1}', {"a": "1"}),
        ({"type": "array", "items": {"type": "string"}}, "[1, true, null]", ["1", True, None]),
        ({"type": 5, "anyOf": 3, "enum": {}, "properties": []}, "x", "x"),
    ],
)  # fmt: skip
def test_schemas_are_followed_as_they_are_written(schema, text, wanted):
    zips = {"zip": {"type": "string"}, "flag": {"type": "boolean"},
            "self": {"$ref": "#/$defs/self"}, "a/b": {"c": {"type": "string"}}}  # fmt: skip
    got = coerce(text, schema, {"$defs": zips})
    assert (got, type(got)) == (wanted, type(wanted))
