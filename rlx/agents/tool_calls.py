"""Tool calls and thoughts in a completion's text, in the formats that models write. Pure.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>   Hermes, Qwen
    qwen3_xml    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]  or  [TOOL_CALLS]add{"a": 1}
    llama3_json  {"name": "add", "parameters": {"a": 1}}

Text that does not parse stays words: the agent then judges what the model meant.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlx.agents import argument_types
from rlx.base import unknown

Call = tuple[str, dict[str, Any]]  # name, arguments


class Format(NamedTuple):
    """How calls are written.

    Attributes:
      template: what chat templates that teach this format have in them.
      opens: from one of these on, all is calls.
      before: comes before the JSON, or the parameters, of a call; it may hold the `name`.
      after: comes after them.
      begin, begin_named: how a call begins, of any tool, and of one ({} is its name).
      xml: whether it has parameters in XML.
    """

    template: str
    opens: tuple[str, ...]
    before: str
    after: str
    begin: str
    begin_named: str
    xml: bool = False


# The end token ends a call as well as the marker that is missing before it.
_CLOSED = r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)"
FORMATS = {  # the first whose mark is in the template is taken
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
# A value may hold any of the markers: it ends where the next parameter or the call's end follows.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))", re.DOTALL
)
_FUNCTION_END = re.compile(r"\s*</function>")
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which no client could send back


class Reader:
    """What a model's calls and thoughts are read by.

    Args:
      template: the chat template.
      name: of FORMATS; "": as the template shows.

    Attributes:
      opens: marks from which on all may be calls; none where the template has no tools.
      tags: those around thoughts, or None.

    Raises:
      UserError: there is no such format.
    """

    def __init__(self, template: str, name: str = ""):
        taught = [n for n, f in FORMATS.items() if "tools" in template and f.template in template]
        name = name or next(iter(taught), "")
        if name and name not in FORMATS:
            raise unknown("format of tool calls", name, FORMATS)
        self._format = FORMATS.get(name)
        self.opens = self._format.opens if self._format else ()
        self.tags = next((tags for tags in THOUGHTS if tags[1] in template), None)

    def beginning(self, name: str) -> str:
        """Return the text that a call begins with, of the tool `name`, of any where it is ""."""
        assert self._format
        named = self._format.begin_named.format(json.dumps(name)[1:-1])
        return named if name else self._format.begin

    def calls(
        self,
        text: str,
        new_id: Callable[[], str],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        ended: bool = True,
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return the words before the calls, and the calls as OpenAI has them.

        Args:
          new_id: makes an id for each call.
          tools: of the request, whose schemas tell texts from numbers where calls do not.
          ended: whether the model ended the text, and no limit did.

        Returns:
          (None where there are calls and only blanks before them, calls).
        """
        if self._format is None:
            return text, []
        before, found = _split(text, self._format, tools, ended)
        try:
            written = [(n, json.dumps(a, ensure_ascii=False, allow_nan=False)) for n, a in found]
        except ValueError:  # a number that JSON does not have
            return text, []
        functions = [{"name": _sent(name), "arguments": _sent(given)} for name, given in written]
        calls = [{"id": new_id(), "type": "function", "function": f} for f in functions]
        return (before if before.strip() or not calls else None), calls

    def thoughts(self, text: str, begun: bool) -> tuple[str, str]:
        """Return the thoughts and the words of a text, or of its beginning.

        Args:
          begun: whether the prompt ends in the tag that opens thoughts.
        """
        if self.tags is None:
            return "", text
        opens, closes = self.tags
        start = text.lstrip()
        if not begun and not start.startswith(opens):
            return "", text
        inside, _, words = start.removeprefix(opens).partition(closes)
        return inside.lstrip("\n"), words.lstrip("\n")


def _split(
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
                found, at = _parameters(name, text, begin.end(), tools, ended)
            else:
                found, at = json.JSONDecoder().raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            return text, []
        end, read = after.match(text, at), _read(name, found)
        if end is None or read is None:
            return text, []
        at, calls = end.end(), calls + read
        if not before.match(text, at):
            at = opened(at)
    return (text[:start], calls) if calls else (text, [])


def _read(name: str | None, found: Any) -> list[Call] | None:
    calls, found = [], {"name": name, "arguments": found} if name else found
    for call in found if isinstance(found, list) else [found]:
        call = call if isinstance(call, dict) else {}
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, arguments))
    return calls or None


def _parameters(
    name: str, text: str, at: int, tools: Sequence[Mapping], ended: bool
) -> tuple[dict[str, Any], int]:
    """Return the parameters in XML from a place on, and where they end; ValueError: nowhere."""
    functions = (tool["function"] for tool in tools)
    schema = next((f.get("parameters") for f in functions if f["name"] == name), None)
    out = {}
    while found := _PARAMETER.match(text, at):
        key, at = found[1], found.end()
        out[key] = argument_types.typed(found[2], argument_types.part(schema, key, schema), schema)
    if end := _FUNCTION_END.match(text, at):
        return out, end.end()
    if ended and not text[at:].strip():
        return out, at
    raise ValueError


def _sent(text: str) -> str:
    return _HALF.sub("\ufffd", text)
