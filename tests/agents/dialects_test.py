"""Whatever JSON comes by any of the APIs is a request or a refusal that names a field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.agents import chat, dialects, messages, responses
from rlx.agents.dialects import ApiError
from rlx.fleet.requests import Sampling

DEFAULTS = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=100, stop=("X",), seed=3)
TALK = [{"role": "user", "content": "hi"}]
REPLIES = {
    chat: chat.ChatReply, messages: messages.MessageReply, responses: responses.ResponseReply,
}  # fmt: skip
BEGUN = {chat: {"messages": TALK}, messages: {"messages": TALK}, responses: {"input": "hi"}}
INNER = [
    "role", "content", "type", "text", "function", "name", "id", "tool_use_id", "tool_call_id",
    "tool_calls", "arguments", "call_id", "output", "format", "parameters", "input_schema", "input",
]  # fmt: skip
WORDS = [
    "user", "assistant", "tool", "system", "text", "function", "auto", "any", "required", "none",
    "tool_use", "tool_result", "thinking", "input_text", "function_call", "function_call_output",
    "message", "reasoning", "json_schema", "custom", "object",
]  # fmt: skip
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=3), inner, max_size=5),
    max_leaves=14,
)  # fmt: skip


def read(dialect, data):
    """The request, or the refusal."""
    try:
        body = dialects.parse(json.dumps(data).encode())
        return chat.read(REPLIES[dialect].to_chat(body), DEFAULTS)
    except ApiError as error:
        return error


@pytest.mark.parametrize("dialect", BEGUN, ids=lambda module: module.__name__.split(".")[-1])
@given(data=st.data())
def test_any_json_is_a_request_or_a_refusal(dialect, data):
    names = st.sampled_from(sorted(dialect.SCHEMA.keys() | dialect._KNOWN))
    fields = data.draw(st.dictionaries(names, TREES, max_size=3))
    got = read(dialect, {**data.draw(st.sampled_from([{}, BEGUN[dialect]])), **fields})
    if isinstance(got, ApiError):
        assert got.status == 400
        json.dumps(got.body())
    else:
        assert got.messages
        assert 1 <= got.sampling.max_new_tokens <= 100


@given(st.sampled_from(["user", "assistant", "system"]), st.lists(TREES, max_size=3))
def test_any_blocks_are_a_message_or_a_refusal(role, blocks):
    """Those that are nearly right, which whole requests seldom are."""
    talk = [{"role": role, "content": blocks}, *TALK]
    for dialect, data in (
        (messages, {"messages": talk}), (chat, {"messages": talk}), (responses, {"input": talk}),
        (responses, {"input": [*blocks, *TALK]}),
    ):  # fmt: skip
        got = read(dialect, data)
        if isinstance(got, ApiError):
            assert got.param or "surrogate" in str(got) or "JSON" in str(got)


@pytest.mark.parametrize("form", [[1], "x", {"type": "json_schema"}])
def test_what_hangs_below_a_field_may_be_of_any_kind(form):
    got = read(responses, {"input": "x", "text": {"format": form}})
    assert responses.ResponseReply.NAMES[got.param.split(".")[0]] == "text.format"
    got = read(messages, {"messages": TALK, "output_config": {"format": form}})
    assert got.param.startswith("output_config.format")


@given(st.binary(max_size=40))
def test_any_bytes_are_a_request_or_a_refusal(body):
    with pytest.raises(ApiError):
        chat.read(dialects.parse(body), DEFAULTS)
