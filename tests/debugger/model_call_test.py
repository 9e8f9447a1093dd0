"""Every API's request and answer, whole and streamed, as text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.debugger.forwarder import ModelCall, refusal


def sse(*events):
    """Events as bytes."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def answered(body):
    """(id, text, stop reason, error) of an answer."""
    call = ModelCall("/chat/completions", 0.0, status=200)
    call.read_answer(body)
    return call.completion_id, call.answer.strip(), call.stop_reason, call.error


def test_a_request_of_chat_with_parts_and_tools():
    image = {"type": "image_url", "image_url": {"url": "x"}}
    add = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    call = ModelCall("/chat/completions", 0.0)
    call.read_request(json.dumps({"model": "m", "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, image]},
        {"role": "assistant", "content": None, "tool_calls": [add]},
        {"role": "tool", "content": "3" * 5000},
    ]}).encode())  # fmt: skip
    assert call.model == "m"
    texts = [text.strip() for _, text in call.messages]
    assert texts[:3] == ["Be brief.", "Look: [image_url]", '→ add {"a": 1}']
    assert len(texts[3]) < 500


def chunk(delta, reason=None, index=0):
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    return {"id": "chatcmpl-7", "choices": [choice]}


def tool(name, arguments):
    return {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]}


TEXT = {"content": [{"type": "text", "text": "42"}], "stop_reason": "end_turn"}
RESPONSE = {
    "id": "resp_1", "status": "completed", "text": {"format": {"type": "text"}},
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "42"}]}],
}  # fmt: skip
CHAT = {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "42"},
                                "finish_reason": "length"}]}  # fmt: skip
SHAPES = {
    "chat": (json.dumps(CHAT).encode(), ("c", "42", "length", "")),
    "chat's stream": (
        sse(chunk({"role": "assistant", "content": "Let"}), chunk({"content": "no"}, index=1),
            chunk({"content": " me"}), chunk(tool("add", '{"a"')), chunk(tool(None, ": 1}")),
            chunk({}, "tool_calls"), {"id": "chatcmpl-7", "choices": []}) + b"data: [DONE]\n\n",
        ("chatcmpl-7", 'Let me → add {"a": 1}', "tool_calls", ""),
    ),
    "messages": (json.dumps({"id": "msg_1", **TEXT}).encode(), ("msg_1", "42", "end_turn", "")),
    "messages' stream": (
        sse({"type": "message_start", "message": {"id": "msg_1", "content": []}},
            {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "4"}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "2"}},
            {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "t",
                                                              "name": "add", "input": {}}},
            {"type": "content_block_delta", "delta": {"type": "input_json_delta",
                                                      "partial_json": '{"a": 1}'}},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
        ("msg_1", '42 → add {"a": 1}', "tool_use", ""),
    ),
    "responses": (json.dumps(RESPONSE).encode(), ("resp_1", "42", "completed", "")),
    "responses' stream": (
        sse({"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}},
            {"type": "response.output_text.delta", "delta": "4"},
            {"type": "response.output_text.delta", "delta": "2"},
            {"type": "response.output_text.done", "text": "42"},
            {"type": "response.completed", "response": RESPONSE}),
        ("resp_1", "42", "completed", ""),
    ),
    "an error in a stream": (
        sse(chunk({"content": "4"}), {"error": {"message": "out of memory"}}) + b'data: {"cut',
        ("chatcmpl-7", "4", "", "out of memory"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_is_text_whatever_its_shape(shape):
    body, expected = SHAPES[shape]
    assert answered(body) == expected


def test_refusals_in_the_shapes_that_servers_give_them():
    for body in ({"error": {"message": "no"}}, {"error": "no"}, {"detail": "no"},
                 {"message": "no"}, {"object": "error", "message": "no"}):  # fmt: skip
        assert refusal(json.dumps(body).encode()) == "no"
    assert refusal(b"<html>gone</html>") == "<html>gone</html>"


KEYS = ["messages", "content", "choices", "message", "delta", "id", "error", "response", "text",
        "tool_calls", "function", "role", "output", "type", "model", "input"]  # fmt: skip


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(
        inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12))  # fmt: skip
def test_no_body_breaks_it(value):
    body = json.dumps(value).encode()
    ModelCall("", 0.0).read_request(body)
    answered(body)
    answered(b"data: " + body + b"\n\n")
    refusal(body)
