"""Anthropic's messages over the gateway, asked by its own clients, unmodified."""

import asyncio
import json

import anthropic
import pytest

from rlx.agents import chat, messages
from rlx.agents.dialects import ApiError

ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ASK = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hello there"}]}


def test_a_message_is_what_the_model_said_and_is_recorded(agents):
    async def main():
        async with agents.gateway() as g, agents.claude(g) as asking:
            system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
            got = await asking.messages.create(**ASK, system=system)
            short = await asking.messages.create(**{**ASK, "max_tokens": 3})
            stopped = await asking.messages.create(**ASK, stop_sequences=["never", "th"])
            counted = await asking.messages.count_tokens(
                model="m", messages=ASK["messages"], system=system
            )
            models = await asking.models.list()
            return got, short, stopped, counted, models, g.session.interactions

    got, short, stopped, counted, models, (kept, *_, last) = agents.run(main())
    assert [block.text for block in got.content] == ["hello there"]
    assert (got.id, got.model, got.stop_reason) == (kept.completion_id, "m", "end_turn")
    assert kept.prompt_text == ("<|system|>be kind<|end|><|user|>hello there<|end|><|assistant|>")
    assert (got.usage.input_tokens, got.usage.output_tokens) == (len(kept.prompt_tokens), 12)
    assert counted.input_tokens == len(kept.prompt_tokens)
    assert (short.content[0].text, short.stop_reason) == ("hel", "max_tokens")
    assert (stopped.content[0].text, stopped.stop_reason) == ("hello ", "stop_sequence")
    assert stopped.stop_sequence == "th"
    assert last.raw == "hello th"
    assert [m.id for m in models.data] == ["default"]


def test_the_synchronous_client_and_both_headers_and_addresses_will_do(agents):
    def ask(asking):
        with asking:
            return asking.messages.create(**ASK).content[0].text

    async def main():
        async with agents.gateway() as g:
            url, key = g.gateway.base_url(), g.session.key
            clients = [
                agents.claude(g, "Anthropic"),
                anthropic.Anthropic(base_url=url, auth_token=key, api_key=None),
                anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key),
                anthropic.Anthropic(base_url=g.gateway.base_url(g.session), api_key="any"),
            ]
            return await asyncio.gather(*(asyncio.to_thread(ask, c) for c in clients))

    assert agents.run(main()) == ["hello there"] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_tools_go_round_and_the_conversation_is_one_sequence(agents, stream):
    said = iter([f"let me see {CALL}", "it is 3"])

    async def answer(asking, **request):
        if not stream:
            return await asking.messages.create(**request), None
        async with asking.messages.stream(**request) as events:
            kinds = [event.type async for event in events]
            return await events.get_final_message(), kinds

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: next(said))) as g,
            agents.claude(g) as asking,
        ):
            talk = [{"role": "user", "content": "1+2?"}]
            request = {"model": "m", "max_tokens": 100, "tools": [ADD], "messages": talk}
            got, kinds = await answer(asking, **request)
            words, use = got.content
            assert (words.text, use.name, use.input) == ("let me see ", "add", {"a": 1, "b": 2})
            assert got.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
            talk.append({"role": "assistant", "content": got.to_dict()["content"]})
            talk.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
            last, _ = await answer(asking, **request)
            assert last.content[0].text == "it is 3"
            assert last.usage.output_tokens == len(g.session.interactions[1].completion.tokens)
            return kinds, g.session.interactions

    kinds, (first, second) = agents.run(main())
    assert second.parent == 0
    tokens = [*first.prompt_tokens, *first.completion.tokens]
    assert second.prompt_tokens[: len(tokens)].tolist() == tokens
    assert "<|tool|>3<|end|><|user|>so?<|end|>" in second.prompt_text
    assert "tools <tool_call>: add" in first.prompt_text
    if stream:
        raw = [k for k in kinds if k not in ("text", "input_json")]
        assert (raw[0], raw[-2:]) == ("message_start", ["message_delta", "message_stop"])
        block = ["content_block_start", "content_block_stop"]
        assert [k for k in raw if k in block] == block * 2
        assert raw.count("content_block_delta") > 2


@pytest.mark.parametrize(
    ("choice", "begins"),
    [({"type": "any"}, "<tool_call>\n"),
     ({"type": "tool", "name": "add"}, '<tool_call>\n{"name": "add", "arguments":')],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_begun_for_the_model(agents, choice, begins, stream):
    whole = '<tool_call>\n{"name": "add", "arguments":{"a": 1}}\n</tool_call>'

    async def main():
        engine = agents.engine(lambda prompt, *_: whole.removeprefix(begins))
        async with agents.gateway(engine) as g, agents.claude(g) as asking:
            request = {**ASK, "max_tokens": 100, "tools": [ADD], "tool_choice": choice}
            if stream:
                async with asking.messages.stream(**request) as events:
                    got = await events.get_final_message()
            else:
                got = await asking.messages.create(**request)
            (use,) = got.content
            talk = [
                *ASK["messages"],
                {"role": "assistant", "content": got.to_dict()["content"]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id}]},
            ]
            await asking.messages.create(**{**request, "messages": talk})
            return use, g.session.interactions

    use, (first, second) = agents.run(main())
    assert (use.name, use.input) == ("add", {"a": 1})
    assert first.prompt_text.endswith(f"<|assistant|>{begins}")
    assert first.raw == whole.removeprefix(begins) + "<|end|>"  # what was sampled, no more
    assert second.parent == 0


def test_what_is_no_call_stays_text_though_one_was_wanted(agents):
    async def main():
        async with agents.gateway(agents.engine(lambda *_: "no")) as g, agents.claude(g) as asking:
            choice = {"type": "any"}
            return await asking.messages.create(**ASK, tools=[ADD], tool_choice=choice)

    got = agents.run(main())
    assert (got.content[0].text, got.stop_reason) == ("<tool_call>\nno", "end_turn")


def test_errors_are_the_clients_own_exceptions(agents):
    async def main():
        async with agents.gateway(agents.engine(max_model_len=64)) as g:
            async with agents.claude(g) as asking:
                for stream in (False, True):
                    talk = [{"role": "user", "content": "x" * 80}]
                    long = "prompt is too long: 83 tokens > 64 maximum"
                    with pytest.raises(anthropic.BadRequestError, match=long):
                        await asking.messages.create(**{**ASK, "messages": talk}, stream=stream)
                with pytest.raises(anthropic.BadRequestError) as wrong:
                    await asking.messages.create(**{**ASK, "messages": [{"role": "user"}]})
                assert wrong.value.body["error"]["param"] == "messages[0].content"
                assert wrong.value.body["type"] == "error"
            async with agents.claude(g).with_options(api_key="wrong") as other:
                with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
                    await other.messages.create(**ASK)
            await g.server.stop()
            async with agents.claude(g) as asking:
                with pytest.raises(anthropic.InternalServerError):
                    await asking.messages.create(**ASK)

    agents.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].source"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": "{}"}]}]},
         "messages[0].content[0].input"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "The"}]},
         "messages[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": -2}, "top_k"), ({"stop_sequences": [5]}, "stop_sequences"),
        ({"system": 5}, "system"), ({"tools": [{"type": "web_search_20250305"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"), ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"messags": 5}, "messags"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named(agents, fields, param):
    with pytest.raises(ApiError) as error:
        chat.read(messages.to_chat({**ASK, **fields}), agents.sampling)
    assert (error.value.status, error.value.param) == (400, param)
    json.dumps(error.value.body())


def test_a_result_that_is_an_error_says_so():
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    parts = [{"type": "text", "text": "no such file"}]
    for content, error, text in (
        ("no such file", True, "Error: no such file"), (parts, True, "Error: no such file"),
        (parts, False, "no such file"), (None, True, "Error: "),
    ):  # fmt: skip
        result = {"type": "tool_result", "tool_use_id": "t", "is_error": error}
        result |= {"content": content} if content else {}
        talk = [*ASK["messages"], {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]}]  # fmt: skip
        got = messages.to_chat({**ASK, "messages": talk})
        assert got["messages"][-1] == {"role": "tool", "tool_call_id": "t", "content": text}


def test_thoughts_that_come_back_are_what_templates_call_reasoning():
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    talk = [
        *ASK["messages"],
        {"role": "assistant", "content": [thought, {"type": "text", "text": "yes"}]},
        {"role": "user", "content": "why?"},
    ]
    got = messages.to_chat({**ASK, "messages": talk, "thinking": {"type": "disabled"}})
    wanted = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert got["messages"][1] == wanted
