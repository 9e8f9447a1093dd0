"""Tool calls in the format of Hermes and Qwen."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.agents import tool_calls


def split(text):
    ids = (f"id{k}" for k in itertools.count())
    return tool_calls.split(text, lambda: next(ids))


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


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.integers())),
                min_size=1, max_size=3))  # fmt: skip
def test_every_written_call_is_read_back(wanted):
    wanted = [(name, args) for name, args in wanted]
    text = "".join(written(name, args) for name, args in wanted)
    if "</tool_call>" in json.dumps(wanted) or "<tool_call>" in json.dumps(wanted):
        return
    _, calls = split(text)
    got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    assert got == wanted


@given(st.text(alphabet='<tool_call>/{}"name: f', max_size=60))
def test_no_text_is_lost_or_raises(text):
    words, calls = split(text)
    assert calls or words == text
