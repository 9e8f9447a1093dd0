"""Tool calls and thoughts in the formats that models write."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.agents.tool_calls import FORMATS, Reader
from rlx.base import UserError

TEMPLATES = {name: f"tools {form.template}" for name, form in FORMATS.items()}
FIELDS = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"type": "function", "function": {
    "name": "weather", "parameters": {"type": "object", "properties": FIELDS}}}  # fmt: skip


def split(text, form="hermes"):
    ids = (f"id{k}" for k in itertools.count())
    return Reader("", form).calls(text, lambda: next(ids), [WEATHER])


def written(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_calls_are_read_with_the_words_before_them():
    words, calls = split("So: " + written("f", {"x": "é"}) + "\n" + written("g", {}))
    assert words == "So: "
    assert [c["id"] for c in calls] == ["id0", "id1"]
    assert calls[0]["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert split(written("f", {}))[0] is None


@pytest.mark.parametrize(
    "text",
    [
        "no call at all", "<tool_call>{not json}</tool_call>", '<tool_call>{"name": "f"',
        '<tool_call>{"name": 5}</tool_call>', '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        written("f", {}) + "<tool_call>{cut off", "<tool_call></tool_call>", "</tool_call>",
    ],
)  # fmt: skip
def test_what_is_not_well_formed_is_words(text):
    assert split(text) == (text, [])


WORDS = st.text(st.sampled_from('é<>{}[]/ "\n')) | st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '{"name"', "; {", "</function>", "a"]
)


@given(st.lists(st.tuples(WORDS.filter(bool), st.dictionaries(WORDS, st.integers() | WORDS)),
                min_size=1, max_size=3))  # fmt: skip
def test_every_written_call_is_read_back(wanted):
    wanted = [(name, args) for name, args in wanted]
    text = "".join(written(name, args) for name, args in wanted)
    _, calls = split(text)
    got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    assert got == wanted


@given(st.text(alphabet='<tool_call>/{}"name: f', max_size=60))
def test_no_text_is_lost_or_raises(text):
    words, calls = split(text)
    assert calls or words == text


WRITTEN = {  # what models of a family write for weather(city="7", days=3), said("So: ") before it
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "7", "days": 3}}\n'
    "</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "7", "days": 3}}]',
    "llama3_json": '{"name": "weather", "parameters": {"city": "7", "days": 3}}',
}
TWICE = {
    "hermes": "\n".join([WRITTEN["hermes"]] * 2),
    "qwen3_xml": "\n".join([WRITTEN["qwen3_xml"]] * 2),
    "mistral": f"{WRITTEN['mistral'][:-1]}, {WRITTEN['mistral'][13:]}",
    "llama3_json": "; ".join([WRITTEN["llama3_json"]] * 2),
}
NEWER = {"mistral": '[TOOL_CALLS]weather[ARGS]{"city": "7", "days": 3}',
         "llama3_json": "<|python_tag|>" + WRITTEN["llama3_json"]}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_the_calls_of_each_family_are_read_alike(form):
    wanted = {"name": "weather", "arguments": '{"city": "7", "days": 3}'}
    words, calls = split("So: " + WRITTEN[form], form)
    assert (words, [c["function"] for c in calls]) == ("So: ", [wanted])
    assert [c["function"] for c in split(TWICE[form], form)[1]] == [wanted] * 2
    if form in NEWER:
        assert [c["function"] for c in split(NEWER[form], form)[1]] == [wanted]
        assert [c["function"] for c in split(NEWER["mistral"] * 2, "mistral")[1]] == [wanted] * 2
    for end in (1, 5, 14 if form != "qwen3_xml" else 26):
        broken = "So: " + WRITTEN[form][:-end]
        assert split(broken, form) == (broken, [])


@pytest.mark.parametrize("form", FORMATS)
def test_the_template_tells_the_format_and_a_flag_another(form):
    other = next(name for name in FORMATS if name != form)
    for reader in (Reader(TEMPLATES[form]), Reader(TEMPLATES[other], form), Reader("", form)):
        assert reader.opens == FORMATS[form].opens
    begun = Reader("", form).beginning("weather")
    assert WRITTEN[form].replace(" ", "").startswith(begun.replace(" ", ""))
    assert begun.startswith(Reader("", form).beginning("").rstrip())
    assert Reader("no t@@ls <tool_call>").opens == ()


@given(st.sampled_from(sorted(FORMATS)), st.text(
    alphabet='<tool_call>/{}[]"name:f=prt;TOLCAS_', max_size=60))  # fmt: skip
def test_no_text_of_any_format_is_lost_or_raises(form, text):
    for said in (text, FORMATS[form].opens[0] + text):
        words, calls = split(said, form)
        assert calls or words == said


MARKS = (
    "</tool_call>", "<tool_call>", "[TOOL_CALLS]", '{"name": "f", "parameters": {}}; {', "}]",
    "</function>", "<function=f>", "</parameter>", "<|python_tag|>", "</tool_call><tool_call>",
)  # fmt: skip


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_marker_within_an_argument_is_text(form, mark):
    city = f"a {mark} b\n{mark}"
    body = {"name": "weather", "arguments": {"city": city, "days": 3}}
    one = {
        "hermes": f"<tool_call>\n{json.dumps(body)}\n</tool_call>",
        "qwen3_xml": WRITTEN["qwen3_xml"].replace("\n7\n", f"\n{city}\n"),
        "mistral": f"[TOOL_CALLS]{json.dumps([body])}",
        "llama3_json": json.dumps({"name": "weather", "parameters": body["arguments"]}),
    }[form]
    both = {
        "mistral": f"[TOOL_CALLS]{json.dumps([body, body])}", "llama3_json": f"{one}; {one}",
    }.get(form, f"{one}\n{one}")  # fmt: skip
    for text, count in ((one, 1), (both, 2)):
        words, calls = split(f"So: {text}", form)
        assert words == "So: "
        found = [json.loads(c["function"]["arguments"]) for c in calls]
        assert found == [body["arguments"]] * count
    newer = f"[TOOL_CALLS]weather[ARGS]{json.dumps(body['arguments'])}"
    if form == "mistral":
        assert len(split(newer * 2, form)[1]) == 2


@pytest.mark.parametrize("form", ["hermes", "qwen3_xml"])
def test_the_end_token_ends_a_call_whose_own_end_is_missing(form):
    wanted = split(WRITTEN[form], form)
    ends = ["\n</tool_call>", "</tool_call>"]
    ends += ["\n</function>\n</tool_call>"] if form == "qwen3_xml" else []
    for end in ends:
        assert split(WRITTEN[form].removesuffix(end), form) == wanted
    first = WRITTEN[form].removesuffix("\n</tool_call>")
    assert len(split(f"{first}\n{WRITTEN[form]}", form)[1]) == 2
    cut = WRITTEN["qwen3_xml"].removesuffix("\n</function>\n</tool_call>")
    assert Reader("", "qwen3_xml").calls(cut, str, [WEATHER], ended=False) == (cut, [])


@pytest.mark.parametrize("form", ["hermes", "qwen3_xml"])
def test_what_opens_and_is_no_call_makes_words_of_all(form):
    for bad in ("<tool_call>\nhm\n</tool_call>\n", "<tool_call> "):
        for text in (bad + WRITTEN[form], WRITTEN[form] + bad):
            assert split(text, form) == (text, [])


def test_half_a_surrogate_pair_is_never_sent():
    half = '<tool_call>{"name": "f\\ud83d", "arguments": {"\\ude0a": ["\\ud83d\\ude0a\\ud83d"]}}'
    _, (call,) = split(half + "</tool_call>")
    assert call["function"] == {"name": "f\ufffd", "arguments": '{"\ufffd": ["😊\ufffd"]}'}
    json.dumps(call, ensure_ascii=False).encode()
    for number in ("NaN", "-Infinity", "1e999"):  # which no JSON has
        text = written("f", {"a": 5}).replace("5", number)
        assert split(text) == (text, [])


def test_json_that_names_no_call_is_an_answer():
    for text in ('{"name": "Bob"}', '{"name": "f", "parameters": 5}', '{"a": {"name": "f"}}'):
        assert split(text, "llama3_json") == (text, [])


def test_an_unknown_format_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        Reader("", "hermess")


@pytest.mark.parametrize(("opens", "closes"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_thoughts_are_before_the_tag_that_closes_them(opens, closes):
    reader = Reader(f"... {opens} {closes} ...")
    text = f"\n{opens}\nhm{closes}\n\nyes"
    assert reader.thoughts(text, False) == ("hm", "yes")
    assert reader.thoughts(text.removeprefix(f"\n{opens}\n"), True) == ("hm", "yes")
    assert reader.thoughts(f"{opens}hm", False) == ("hm", "")
    assert reader.thoughts(f"yes {text}", False) == ("", f"yes {text}")
    assert Reader("").thoughts(text, True) == ("", text)
    pieces = [reader.thoughts(text[:k], False) for k in range(len(opens) + 1, len(text))]
    grown = [p for p in pieces if closes[:1] not in p[0]]  # those that are held back
    assert all("hm".startswith(a) and "yes".startswith(b) for a, b in grown)
