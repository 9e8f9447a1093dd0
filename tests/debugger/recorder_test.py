"""What is noted of a call, from whichever API's request and answer."""

import contextlib
import http.client
import http.server
import json
import threading
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.debugger.model_call import ModelCall, refusal


def sse(*events, named=False):
    """Events as bytes; Anthropic's and those of /responses carry their names."""
    lines = []
    for event in events:
        lines += [f"event: {event['type']}"] if named else []
        lines += [f"data: {json.dumps(event)}", ""]
    return "\n".join(lines).encode() + b"\n"


def asked(body):
    """The call that a request's body begins."""
    call = ModelCall(1, "/chat/completions", 0.0)
    call.ask(body)
    return call


def answered(body, streamed):
    """What a call has of an answer."""
    call = ModelCall(1, "/chat/completions", 0.0, status=200, streamed=streamed)
    call.hear(body)
    return {
        "completion_id": call.completion_id, "answer": call.answer, "error": call.error,
        "stop_reason": call.stop_reason, "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
    }  # fmt: skip


def test_a_request_of_chat_with_parts_and_tools():
    request = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Look:"},
                                         {"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "assistant", "content": None,
             "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "3" * 5000},
        ],
    }  # fmt: skip
    found = asked(json.dumps(request).encode())
    assert found.model == "m"
    texts = [text for _, text in found.messages]
    assert texts[:3] == ["Be brief.", "Look: [image_url]", '→ add({"a": 1})']
    assert len(texts[3]) <= 2_003


def test_long_conversations_keep_both_ends():
    messages = [{"role": "user", "content": str(i)} for i in range(100)]
    found = asked(json.dumps({"messages": messages}).encode()).messages
    assert found[0] == ["user", "0"]
    assert found[-1] == ["user", "99"]
    assert ["…", "60 more"] in found


def test_a_stream_of_chat_with_a_tool_call_is_one_answer():
    def chunk(delta, reason=None, **more):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {"id": "chatcmpl-7", "choices": [choice], **more}

    body = sse(
        chunk({"role": "assistant", "content": "Let"}),
        chunk({"content": " me"}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": '{"a"'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
        chunk({}, "tool_calls"),
        {"id": "chatcmpl-7", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
    )
    found = answered(body + b"data: [DONE]\n\n", True)
    assert found == {
        "completion_id": "chatcmpl-7", "answer": 'Let me → add({"a": 1})',
        "stop_reason": "tool_calls", "prompt_tokens": 9, "completion_tokens": 4, "error": "",
    }  # fmt: skip


def test_anthropics_messages_whole_and_streamed():
    usage = {"input_tokens": 11, "output_tokens": 3}
    whole = {"id": "msg_1", "content": [{"type": "text", "text": "42"}], "stop_reason": "end_turn",
             "usage": usage}  # fmt: skip
    expected = {"completion_id": "msg_1", "answer": "42", "stop_reason": "end_turn",
                "prompt_tokens": 11, "completion_tokens": 3, "error": ""}  # fmt: skip
    assert answered(json.dumps(whole).encode(), False) == expected
    begun = {"id": "msg_1", "usage": {"input_tokens": 11, "output_tokens": 1}}
    body = sse(
        {"type": "message_start", "message": begun},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "4"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "2"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"},
         "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
        named=True,
    )  # fmt: skip
    assert answered(body, True) == expected


def test_responses_whole_and_streamed():
    whole = {
        "id": "resp_1", "status": "completed", "usage": {"input_tokens": 2, "output_tokens": 1},
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "42"}]}],
    }  # fmt: skip
    found = answered(json.dumps(whole).encode(), False)
    assert (found["completion_id"], found["answer"], found["completion_tokens"]) == (
        "resp_1", "42", 1,
    )  # fmt: skip
    body = sse({"type": "response.created", "response": {"id": "resp_1", "usage": None}},
               {"type": "response.output_text.delta", "delta": "42"},
               {"type": "response.completed", "response": whole}, named=True)  # fmt: skip
    assert answered(body, True) == found


def test_refusals_in_the_shapes_that_servers_give_them():
    for body in ({"error": {"message": "no"}}, {"error": "no"}, {"detail": "no"},
                 {"message": "no"}, {"object": "error", "message": "no"}):  # fmt: skip
        assert refusal(json.dumps(body).encode()) == "no"
    assert refusal(b"<html>gone</html>") == "<html>gone</html>"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["messages", "content", "choices", "message", "delta", "usage", "id", "error", "response",
         "tool_calls", "function", "role", "text", "output", "type", "model"]), inner, max_size=4),
    max_leaves=12))  # fmt: skip
def test_no_body_breaks_the_notes(value):
    body = json.dumps(value).encode()
    asked(body)
    answered(body, False)
    answered(b"data: " + body + b"\n\n", True)
    refusal(body)


def test_a_stream_that_is_left_where_it_stops_is_whole(monkeypatch):
    """Whether the agent's leaving is seen first by the server or by a write to the agent."""
    aiohttp, web = map(pytest.importorskip, ("aiohttp", "aiohttp.web"))
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
    read, write = threading.Event(), web.StreamResponse.write

    async def closed_at_the_end(response, data):
        if b"[DONE]" in data:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await write(response, data)

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(sse({"id": "one", "choices": [choice]}))
            read.wait(30)
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_):
            pass

    monkeypatch.setattr(web.StreamResponse, "write", closed_at_the_end)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        from rlx.debugger.recorder import Recorder

        with Recorder(f"http://127.0.0.1:{server.server_port}/v1", "key") as recorder:
            url = f"{recorder.base_url(1)}/chat/completions"
            headers = {"Authorization": f"Bearer {recorder.api_key}"}
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(urllib.request.Request(url, b"{}", headers), timeout=30) as answer:
                assert b"stop" in answer.readline()
                read.set()
                with contextlib.suppress(http.client.HTTPException):
                    answer.read()
        (call,) = recorder.calls
    finally:
        server.shutdown()
        server.server_close()
    assert (call.completion_id, call.stop_reason, call.error) == ("one", "stop", "")
