"""Requests read from JSON: what is taken, what is refused, and that nothing else can happen."""

import json
from dataclasses import replace

import pytest

from rlx.agents import chat, dialects
from rlx.agents.dialects import ApiError
from rlx.fleet.requests import Sampling

DEFAULTS = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=100, stop=("X",), seed=3)
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def read(defaults=DEFAULTS, **fields):
    return chat.read({**HELLO, **fields}, defaults)


def test_what_a_request_does_not_say_is_the_sessions():
    assert read().sampling == Sampling(
        temperature=0.6, top_p=0.95, max_new_tokens=100, stop=("X",), seed=None
    )
    got = read(temperature=0, top_p=1, top_k=5, max_tokens=7, min_tokens=9, stop="Y", seed=-4)
    assert got.sampling == Sampling(
        temperature=0,
        top_p=1,
        top_k=5,
        max_new_tokens=7,
        min_new_tokens=7,
        stop=("X", "Y"),
        seed=-4,
    )
    assert read(max_tokens=8.0).sampling.max_new_tokens == 8
    assert (read(n=3).n, read(user="me", metadata={}, parallel_tool_calls=True).n) == (3, 1)


def test_messages_are_as_chat_templates_want_them():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    got = read(messages=[
        {"role": "developer", "content": [{"type": "text", "text": "a"},
                                          {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]).messages  # fmt: skip
    assert got[0] == {"role": "system", "content": "a\nb"}
    assert got[1]["content"] == ""
    assert got[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}
    assert got[2] == {"role": "tool", "content": "3", "tool_call_id": "c"}


def test_tools_that_may_not_be_called_are_not_shown():
    tool = {"type": "function", "function": {"name": "f"}}
    assert read(tools=[tool]).tools == (tool,)
    assert read(tools=[tool], tool_choice="none").tools == ()
    named = {"type": "function", "function": {"name": "f"}}
    forced = [read(tools=[tool], tool_choice=c).forced for c in ("auto", "required", named)]
    assert forced == [None, "", "f"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": 10**400}, "temperature"), ({"n": 0}, "n"), ({"n": 10**9}, "n"),
        ({"stop": [""]}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop": 5}, "stop"),
        ({"seed": 2**70}, "seed"), ({"top_k": 2**31}, "top_k"), ({"stream": "yes"}, "stream"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"), ({"model": 5}, "model"),
        ({"presence_penalty": 0.5}, "presence_penalty"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": 1}, "stream_options"), ({"chat_template_kwargs": [1]},
                                                    "chat_template_kwargs"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ],
)  # fmt: skip
def test_a_field_out_of_its_range_is_named(fields, param):
    with pytest.raises(ApiError) as error:
        read(**fields)
    assert error.value.status == 400
    assert error.value.param == param


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed"])
def test_an_infinite_number_is_no_number(field):
    body = json.dumps(HELLO)[:-1] + f', "{field}": 1e400}}'
    with pytest.raises(ApiError, match=f"{field} is inf"):
        chat.read(dialects.parse(body.encode()), DEFAULTS)


def test_penalties_that_change_nothing_are_taken():
    assert read(presence_penalty=0, logit_bias={}, functions=None).n == 1


def test_an_engine_may_save_logprobs_that_nobody_wants():
    defaults = replace(DEFAULTS, unscored=True)
    assert read(defaults).sampling.unscored
    assert not read(defaults, logprobs=True).sampling.unscored
    assert not read(logprobs=False).sampling.unscored, "a run wants them all"
