"""Parse tool calls and thoughts in a completion's text, in the formats of models. Pure.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>   Hermes, Qwen
    qwen3_xml    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]  or  [TOOL_CALLS]add{"a": 1}
    llama3_json  {"name": "add", "parameters": {"a": 1}}

Text that does not parse stays text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

from rlx.base import unknown

Call = tuple[str, dict[str, Any]]  # name, arguments


class Format(NamedTuple):
    template: str  # text that only chat templates with this format contain
    opens: tuple[str, ...]  # strings that start calls
    before: str  # before, after: patterns around a call's JSON; this may match the `name`
    after: str
    begin: str  # begin, begin_named: start of a call to any tool, and to the tool named {}
    begin_named: str
    xml: bool = False  # whether parameters are XML


# The end token may replace a call's closing marker.
_CLOSED = r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)"
FORMATS = {  # the first one in the template is used
    "qwen3_xml": Format(
        "<function=", ("<tool_call>",), r"<tool_call>\s*<function=(?P<name>[^>]+)>", _CLOSED,
        "<tool_call>\n<function=", "<tool_call>\n<function={}>",
        xml=True,
    ),
    "mistral": Format(
        "[TOOL_CALLS]", ("[TOOL_CALLS]",),
        r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[ARGS\])?)?", r"\s*(?=\[TOOL_CALLS\]|\Z)",
        "[TOOL_CALLS]", '[TOOL_CALLS][{{"name": "{}", "arguments":',
    ),
    "hermes": Format(
        "<tool_call>", ("<tool_call>",), r"<tool_call>\s*", _CLOSED,
        "<tool_call>\n", '<tool_call>\n{{"name": "{}", "arguments":',
    ),
    "llama3_json": Format(
        '"parameters": ', ("<|python_tag|>", '{"name"'),
        r"(?:<\|python_tag\|>)?\s*(?=\{)", r"\s*(?:;\s*(?=\{)|\Z)",
        '{"name":', '{{"name": "{}", "parameters":',
    ),
}  # fmt: skip
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# A value may contain any marker, so it ends only before the next parameter or the call's end.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))", re.DOTALL
)
_FUNCTION_END = re.compile(r"\s*</function>")
_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "none": None}  # JSON's and Python's
_HALF = re.compile("[\ud800-\udfff]")  # unpaired surrogates are invalid in HTTP


class Reader:
    """Parser of a model's tool calls and thoughts; UserError for an unknown format.

    `name` is a key of FORMATS, or "" for that of the chat template. `opens` are the strings that
    start calls, none in a template without tools; `tags` are those around thoughts, or None.
    """

    def __init__(self, template: str, name: str = ""):
        known = FORMATS.items() if "tools" in template else ()
        name = name or next((n for n, f in known if f.template in template), "")
        if name and name not in FORMATS:
            raise unknown("format of tool calls", name, FORMATS)
        self._format = FORMATS.get(name)
        self.opens = self._format.opens if self._format else ()
        self.tags = next((tags for tags in THOUGHTS if tags[1] in template), None)

    def beginning(self, name: str) -> str:
        """Return the start of a call to the tool `name`, or to any tool if `name` is ""."""
        assert self._format
        text = self._format.begin_named.format(json.dumps(name)[1:-1])
        return text if name else self._format.begin

    def calls(
        self,
        text: str,
        new_id: Callable[[], str],  # creates a call's id
        tools: Sequence[Mapping[str, Any]] = (),  # the request's, whose schemas type XML parameters
        *,
        ended: bool = True,  # by the model, rather than by a limit
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return (text before the calls or None if blank, calls in OpenAI's form)."""
        if self._format is None:
            return text, []
        before, items = _split_calls(text, self._format, tools, ended)
        try:
            pairs = [(n, json.dumps(a, ensure_ascii=False, allow_nan=False)) for n, a in items]
        except ValueError:  # NaN or infinity
            return text, []
        valid = partial(_HALF.sub, "\ufffd")
        functions = [{"name": valid(name), "arguments": valid(a)} for name, a in pairs]
        calls = [{"id": new_id(), "type": "function", "function": f} for f in functions]
        return (before if before.strip() or not calls else None), calls

    def thoughts(self, text: str, active: bool) -> tuple[str, str]:
        """Split a text or its start into thoughts, open in the prompt if `active`, and words."""
        if self.tags is None:
            return "", text
        opens, closes = self.tags
        start = text.lstrip()
        if not active and not start.startswith(opens):
            return "", text
        inside, _, words = start.removeprefix(opens).partition(closes)
        return inside.lstrip("\n"), words.lstrip("\n")


def _split_calls(
    text: str, form: Format, tools: Sequence[Mapping], ended: bool
) -> tuple[str, list[Call]]:
    def opened(at: int) -> int:
        return min((k for mark in form.opens if (k := text.find(mark, at)) >= 0), default=-1)

    before, after, calls = re.compile(form.before), re.compile(form.after), list[Call]()
    at = start = opened(0)
    while at >= 0:
        if not (begin := before.match(text, at)):
            return text, []
        name = begin.groupdict().get("name")
        try:
            if name and form.xml:
                value, at = _parameters(name, text, begin.end(), tools, ended)
            else:
                value, at = json.JSONDecoder().raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            return text, []
        end, more = after.match(text, at), _read(name, value)
        if end is None or more is None:
            return text, []
        at, calls = end.end(), calls + more
        if not before.match(text, at):
            at = opened(at)
    return (text[:start], calls) if calls else (text, [])


def _read(name: str | None, value: Any) -> list[Call] | None:
    calls, value = [], {"name": name, "arguments": value} if name else value
    for call in value if isinstance(value, list) else [value]:
        call = call if isinstance(call, dict) else {}
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, arguments))
    return calls or None


def _parameters(
    name: str, text: str, at: int, tools: Sequence[Mapping], ended: bool
) -> tuple[dict[str, Any], int]:
    """Return a call's XML parameters and their end in the text, or raise ValueError."""
    functions = (tool["function"] for tool in tools)
    schema = next((f.get("parameters") for f in functions if f["name"] == name), None) or {}
    out = {}
    while match := _PARAMETER.match(text, at):
        key, at = match[1], match.end()
        out[key] = argument_value(match[2], _kinds((schema.get("properties") or {}).get(key)))
    if end := _FUNCTION_END.match(text, at):
        return out, end.end()
    if ended and not text[at:].strip():
        return out, at
    raise ValueError


def argument_value(text: str, kinds: Set[str]) -> Any:
    """Return an argument as text if that is one of its `kinds`, else as JSON of one of them.

    Text that is a valid array, object or null becomes that if its kind is allowed; {} allows all.
    """
    word = text.strip().lower()
    try:
        plain = kinds and "string" not in kinds and word in _WORDS
        value = _WORDS[word] if plain else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "number" not in kinds and value.is_integer():
        value = int(value)
    scalar = isinstance(value, str | int | float) and "string" in kinds
    return text if scalar or (kinds and _KINDS[type(value)] not in kinds) else value


def _kinds(schema: Any) -> set[str]:
    """Return the types of JSON that a property's schema allows; empty if it names none."""
    keywords = schema if isinstance(schema, Mapping) else {}
    types = keywords.get("type") or [_KINDS[type(v)] for v in keywords.get("enum") or ()]
    kinds = set(map(str, types if isinstance(types, list) else [types]))
    for option in keywords.get("anyOf") or keywords.get("oneOf") or ():
        if not (more := _kinds(option)):  # a reference, for one
            return set()
        kinds |= more
    return kinds | {"integer"} if "number" in kinds else kinds
