"""Arguments that were written as text have the types of the tool's schema."""

import json
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from rlx.agents.tool_calls import Reader, _kinds, argument_value


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
    ("text_or_number", "10115", "10115"), ("text_or_list", '["1", "2"]', ["1", "2"]),
    ("text_or_list", "10115", "10115"), ("zips", "[\"10115\"]", ["10115"]),
    ("grid", "[[1], []]", [[1], []]), ("kind", "1", "1"),
    ("level", "1", 1), ("unknown", "5", 5), ("unknown", "True", "True"), ("unknown", "x", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), CASES)
def test_an_argument_has_the_type_that_its_schema_says(name, text, wanted):
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
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "10115", "10115"),
        ({"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, None]}, "null", None),
        (None, "True", "True"), (True, "1", 1), ({}, "x", "x"),
    ],
)  # fmt: skip
def test_the_types_of_a_property_are_read(schema, text, wanted):
    got = argument_value(text, _kinds(schema))
    assert (got, type(got)) == (wanted, type(wanted))
