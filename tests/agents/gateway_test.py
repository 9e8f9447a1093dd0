"""The gateway over real HTTP and gRPC, asked by OpenAI's own client."""

import asyncio
import io
import json
import threading
import time
import urllib.request

import aiohttp
import openai
import pytest

from rlx.agents import api_gateway as gateway
from rlx.agents.sessions import Session
from rlx.system.threads import LoopThread

HELLO = [{"role": "user", "content": "hello there"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


async def ask(client, content="hello there", **options):
    messages = [{"role": "user", "content": content}]
    return await client.chat.completions.create(**{"model": "m", "messages": messages, **options})


async def read(stream):
    """(texts of the choices, tool calls, finish reasons, usage) of a stream, and how many events"""
    texts, calls, reasons, usage, events = {}, [], {}, None, 0
    async for event in stream:
        events += 1
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            calls += choice.delta.tool_calls or []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, calls, reasons, usage, events


async def until(true, seconds=10):
    """Waits for something that happens elsewhere."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.005)


def test_a_completion_is_what_the_model_said_and_is_recorded(agents):
    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            got = await ask(client, logprobs=True)
            (kept,) = g.session.interactions
            return got, kept, g.engine.requests[0]

    got, kept, request = agents.run(main())
    (choice,) = got.choices
    assert (choice.message.content, choice.finish_reason) == ("hello there", "stop")
    assert got.model == "m"
    prompt = "<|user|>hello there<|end|><|assistant|>"
    ids = agents.tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    assert request.prompt_tokens.tolist() == kept.prompt_tokens.tolist() == ids
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), 12)
    assert kept.completion_id == got.id
    assert kept.raw == "hello there<|end|>"
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx(
        kept.completion.logprobs.tolist()[:-1]
    )
    assert [t.token for t in choice.logprobs.content] == [*"hello there"]
    assert kept.completion.versions.tolist() == [0] * 12


def test_a_stream_says_the_same_as_a_whole_answer_bit_by_bit(agents):
    words = "żółw 🐢 says: " + "a longer answer, " * 5

    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            whole = await ask(client, words)
            stream = await ask(
                client, words, stream=True, stream_options={"include_usage": True}, n=2
            )
            return whole, await read(stream), g.session.interactions

    whole, (texts, _, reasons, usage, events), kept = agents.run(main())
    assert texts == {0: words, 1: words}
    assert whole.choices[0].message.content == words
    assert reasons == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == 2 * whole.usage.completion_tokens
    assert events > 10
    tokens = [k.completion.tokens.tolist() for k in kept]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({k.completion_id for k in kept}) == 2


@pytest.mark.parametrize("stop", ["END", ["never", "END", "ND."]])
def test_a_stop_string_ends_the_text_and_is_not_in_it(agents, stop):
    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            whole = await ask(client, "one EN two END. three", stop=stop)
            stream = await ask(client, "one EN two END. three", stop=stop, stream=True)
            return whole.choices[0], (await read(stream))[0], g.session.interactions

    choice, texts, kept = agents.run(main())
    assert choice.message.content == texts[0] == "one EN two "
    assert choice.finish_reason == "stop"
    assert all(k.raw == "one EN two END" for k in kept)  # the tokens have it


@pytest.mark.parametrize(
    ("minimum", "wanted"),
    [(0, "one "), (7, "one "), (8, "one END é "), (99, "one END é END twEND o")],
)
def test_a_stop_string_before_the_minimum_is_text(agents, minimum, wanted):
    said = "one END é END twEND o"
    options = {"stop": ["END"], "extra_body": {"min_tokens": minimum}}

    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            whole = await ask(client, said, **options)
            stream = await ask(client, said, stream=True, **options)
            return whole.choices[0], (await read(stream))[0], g.session.interactions[0]

    choice, texts, kept = agents.run(main())
    assert choice.message.content == texts[0] == kept.text == wanted
    assert kept.raw == wanted + ("<|end|>" if wanted == said else "END")


def test_the_budget_of_a_request_is_cut_to_the_sessions(agents):
    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            short = await ask(client, "hello", max_tokens=2)
            same = await ask(client, "hello", max_completion_tokens=2, max_tokens=4)
            long = await ask(client, "x" * 500, max_tokens=100_000)
            return short.choices[0], same.choices[0], long

    short, same, long = agents.run(main())
    assert (short.message.content, short.finish_reason) == ("he", "length")
    assert same.message.content == "he"
    assert long.usage.completion_tokens == 200


def test_draws_depend_on_the_session_and_the_prompt_not_on_who_is_first(agents):
    def reply(prompt, seed, index):
        return f"{seed}.{index}"

    async def draws(order):
        async with agents.gateway(agents.engine(reply)) as g, agents.client(g) as client:
            answers = await asyncio.gather(*(ask(client, text, n=2) for text in order))
            texts = [[c.message.content for c in a.choices] for a in answers]
            fixed = await ask(client, "a", seed=77)
            again = await ask(client, "a")
            return dict(zip(order, texts, strict=True)), fixed.choices[0], again.choices[0]

    (first, fixed, again), (second, _, _) = agents.run(draws("abc")), agents.run(draws("cab"))
    assert first == second
    assert len({text for texts in first.values() for text in texts}) == 6
    assert fixed.message.content == "77.0"
    assert again.message.content not in first["a"]  # the same prompt again is a new draw


def test_sixty_four_sessions_at_once_never_mix(agents):
    async def one(g, http, number):
        session = g.gateway.sessions.open(agents.sampling)
        client, said = agents.client(g, session, http_client=http), []
        for turn in range(3):
            words = f"session {number} turn {turn}"
            if (number + turn) % 2:
                said.append((await ask(client, words)).choices[0].message.content)
            else:
                said.append((await read(await ask(client, words, stream=True)))[0][0])
        own = [f"session {number} turn {turn}" for turn in range(3)]
        assert said == own
        assert [i.text for i in session.interactions] == own
        assert all(f"session {number} turn" in i.prompt_text for i in session.interactions)

    async def main():
        async with (
            agents.gateway(agents.engine(together=64)) as g,
            openai.DefaultAsyncHttpxClient() as http,
        ):
            await asyncio.gather(*(one(g, http, k) for k in range(64)))

    agents.run(main())


def test_seeds_are_drawn_on_the_loop_though_bodies_are_read_in_threads(agents, monkeypatch):
    drawn, plain = [], Session.seed

    def seed(session, tokens):
        drawn.append((threading.current_thread(), plain(session, tokens)))
        return drawn[-1][1]

    monkeypatch.setattr(Session, "seed", seed)
    monkeypatch.setattr(gateway, "_SMALL", 0)

    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            await asyncio.gather(*(ask(client, "the same") for _ in range(8)))

    agents.run(main())
    assert {thread for thread, _ in drawn} == {threading.current_thread()}
    assert len({number for _, number in drawn}) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(agents, stream):
    async def main():
        engine = agents.engine(step_seconds=0.01)
        async with agents.gateway(engine) as g:
            async with agents.client(g) as client:
                work = asyncio.create_task(self_reading(client))
                await until(lambda: engine.running)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await until(lambda: engine.aborted == 1)
            assert engine.running == 0
            assert g.session.interactions == []
            assert not g.session.tasks

    async def self_reading(client):
        got = await ask(client, "x" * 199, stream=stream)
        if stream:
            await read(got)

    agents.run(main())


def test_the_end_of_a_session_ends_its_requests_and_its_key(agents):
    async def main():
        engine = agents.engine(step_seconds=0.01)
        async with agents.gateway(engine) as g, agents.client(g) as client:
            work = asyncio.create_task(ask(client, "x" * 199))
            await until(lambda: engine.running)
            g.gateway.sessions.end(g.session)
            assert g.session.interactions == []
            with pytest.raises(openai.APIConnectionError):
                await work
            await until(lambda: engine.aborted == 1)
            with pytest.raises(openai.APIStatusError, match="has ended") as gone:
                await ask(client)
            assert gone.value.status_code == 410
            async with agents.client(g, api_key="sk-wrong") as other:
                with pytest.raises(openai.AuthenticationError, match="unknown API key"):
                    await ask(other)
            assert len(engine.requests) == 1

    agents.run(main())


def test_the_key_in_the_address_counts_more_than_any_other(agents):
    async def main():
        async with agents.gateway() as g:
            url = g.gateway.base_url(g.session)
            async with openai.AsyncOpenAI(base_url=url, api_key="whatever") as client:
                await ask(client)
                models = await client.models.list()
            assert [m.id for m in models.data] == ["default"]
            assert len(g.session.interactions) == 1

    agents.run(main())


def test_tool_calls_are_read_and_the_conversation_goes_on_in_the_models_words(agents):
    said = iter([f"let me see {CALL}", "it is 3"] * 2)

    async def converse(client, stream):
        messages = [{"role": "user", "content": "1+2?"}]
        got = await client.chat.completions.create(
            model="m", messages=messages, tools=[ADD], stream=stream
        )
        if stream:
            texts, calls, reasons, _, _ = await read(got)
            words, reason = texts[0], reasons[0]
        else:
            choice = got.choices[0]
            words, reason, calls = (
                choice.message.content, choice.finish_reason, choice.message.tool_calls,
            )  # fmt: skip
        assert (words, reason) == ("let me see ", "tool_calls")
        (call,) = calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "add", {"a": 1, "b": 2},
        )  # fmt: skip
        own = {"id": call.id, "type": "function", "function": {
            "name": "add", "arguments": json.dumps({"b": 2, "a": 1})}}  # fmt: skip
        messages += [
            {"role": "assistant", "content": words, "tool_calls": [own]},
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        last = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert last.choices[0].message.content == "it is 3"

    async def main():
        engine = agents.engine(lambda *_: next(said))
        async with agents.gateway(engine) as g, agents.client(g) as client:
            await converse(client, stream=False)
            await converse(client, stream=True)
            return g.session.interactions

    first, second, third, fourth = agents.run(main())
    for before, after in ((first, second), (third, fourth)):
        tokens = [*before.prompt_tokens, *before.completion.tokens]
        assert after.prompt_tokens[: len(tokens)].tolist() == tokens
    assert (first.parent, second.parent) == (None, 0)
    assert first.tool_calls == 1
    assert "tools <tool_call>: add" in first.prompt_text
    assert "<|tool|>3<|end|>" in second.prompt_text


HARD = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call> \\ud83d <tool_call>"}}'


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_markers_and_half_a_character_in_it_goes_round(agents, stream):
    """Its own end marker is missing, and every client can send it back."""
    said = iter([HARD, "ok"] * 3)
    wanted = {"a": "</tool_call> \ufffd <tool_call>"}

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: next(said))) as g,
            agents.client(g) as client,
            agents.claude(g) as claude,
        ):
            got = await ask(client, tools=[ADD], stream=stream)
            calls = (await read(got))[1] if stream else got.choices[0].message.tool_calls
            (call,) = calls
            assert json.loads(call.function.arguments) == wanted
            own = {"id": call.id, "type": "function", "function": call.function.model_dump()}
            talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [own]},
                    {"role": "tool", "tool_call_id": call.id, "content": "3"}]  # fmt: skip
            await client.chat.completions.create(model="m", messages=talk, tools=[ADD])

            tool = {"name": "add", "input_schema": {"type": "object"}}
            asked = {"model": "m", "max_tokens": 150, "messages": [*HELLO], "tools": [tool]}
            async with claude.messages.stream(**asked) as events:
                message = await events.get_final_message()
            assert message.content[0].input == wanted
            result = {"type": "tool_result", "tool_use_id": message.content[0].id}
            asked["messages"] += [
                {"role": "assistant", "content": message.to_dict()["content"]},
                {"role": "user", "content": [result]},
            ]
            await claude.messages.create(**asked)

            tool = {"type": "function", **ADD["function"], "strict": False}
            asked = {"model": "m", "input": [*HELLO], "tools": [tool]}
            async with client.responses.stream(**asked) as events:
                (item,) = (await events.get_final_response()).output
            assert json.loads(item.arguments) == wanted
            output = {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            asked["input"] += [item.model_dump(exclude_none=True), output]
            await client.responses.create(**asked)
            return g.session.interactions

    kept = agents.run(main())
    assert [i.parent for i in kept] == [None, 0, None, 2, None, 4]


def test_an_agent_that_edits_its_own_tool_call_is_taken_at_its_word(agents):
    said = iter([CALL, "ok"])

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: next(said))) as g,
            agents.client(g) as client,
        ):
            got = await ask(client, tools=[ADD])
            (call,) = got.choices[0].message.tool_calls
            edited = {"id": call.id, "type": "function", "function": {
                "name": "add", "arguments": '{"a": 5}'}}  # fmt: skip
            messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [edited]}]
            await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
            return g.session.interactions[1]

    kept = agents.run(main())
    assert kept.parent is None
    assert '"a": 5' in kept.prompt_text


def test_a_reward_is_refused_where_nobody_trains(agents):
    async def main():
        async with agents.gateway(endless=True) as g:
            status, answer = await post(g, b'{"reward": 1}', "/v1/rewards")
            assert (status, answer["error"]["param"]) == (404, None)
            assert g.session.reward is None

    agents.run(main())


def test_a_missing_reward_over_http_is_refused_without_advice_about_run(agents):
    async def main():
        async with agents.gateway() as g:
            return await post(g, b'{"reward": null}', "/v1/rewards")

    status, answer = agents.run(main())
    assert status == 400
    wanted = "the reward is None; give a float, or {completion id: float}"
    assert answer["error"]["message"] == wanted


def test_tools_are_refused_where_the_template_has_no_word_for_them(agents):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"

    async def main():
        async with agents.gateway(template=plain) as g, agents.client(g) as client:
            with pytest.raises(openai.BadRequestError, match="has no supported format") as error:
                await ask(client, tools=[ADD])
            assert error.value.param == "tools"

    agents.run(main())


async def post(g, body, path="/v1/chat/completions", method="POST", key=None):
    """(status, JSON) of a bare request."""
    key = g.session.key if key is None else key
    url = g.gateway.base_url().removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url, data=body, headers=headers) as got,
    ):
        return got.status, await got.json()


WRONG = {
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not JSON"),
    "NaN": (b'{"messages": [], "temperature": NaN}', "NaN is not a JSON number"),
    "deep": (b"[" * 100_000, "not JSON"),
    "a list": (b"[]", "it must be a JSON object"),
    "no messages": (b'{"model": "m"}', "messages is None"),
    "no role": (b'{"messages": [{"content": "x"}]}', r"messages\[0\] is"),
    "an image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        r"messages\[0\]\.content\[0\]\.image_url is missing",
    ),
    "half a character": (
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "unpaired surrogate",
    ),
    "half a character as it is": (
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "not JSON",
    ),
    "temperature": (b'{"messages": 1, "temperature": -1}', "messages is 1"),
    "an unknown field": (b'{"mesages": []}', "did you mean 'messages'"),
    "a field not done": (b'{"logit_bias": {"1": 2}}', "logit_bias is not supported"),
    "JSON answers": (
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json"}}',
        "response_format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_request_is_answered_with_what_is_wrong(agents, case):
    import re

    body, text = WRONG[case]

    async def main():
        async with agents.gateway() as g:
            status, answer = await post(g, body)
            assert status == 400
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["type"] == "invalid_request_error"
            assert re.search(text, answer["error"]["message"])
            assert not g.engine.requests
            async with agents.client(g) as client:  # and it still answers
                assert (await ask(client)).choices[0].message.content == "hello there"

    agents.run(main())


def test_other_paths_methods_and_keys_have_their_status(agents):
    async def main():
        async with agents.gateway() as g:
            assert await post(g, None, "/health", "GET", key="") == (200, {"status": "ok"})
            for want, path, method, key in (
                (404, "/v1/completions", "POST", None),
                (405, "/v1/chat/completions", "GET", None),
                (401, "/v1/models", "GET", ""),
                (401, "/v1/models", "GET", "nonsense"),
                (401, "/nonsense/v1/chat/completions", "POST", None),
            ):
                status, answer = await post(g, b"", path, method, key)
                assert status == want, (path, answer)
                assert answer["error"]["message"]

    agents.run(main())


def test_what_the_fleet_refuses_or_cannot_do_has_its_status(agents):
    async def main():
        engine = agents.engine(max_model_len=64)
        async with agents.gateway(engine) as g, agents.client(g) as client:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as error:
                    await ask(client, "x" * 80, stream=stream)
                assert error.value.code == "context_length_exceeded"
                assert error.value.param == "messages"
                assert "maximum context length is 64 tokens" in error.value.message
                assert "resulted in 83 tokens" in error.value.message
                with pytest.raises(openai.BadRequestError, match="maximum context length is 64"):
                    await client.responses.create(model="m", input="x" * 80)
            assert (await post(g, None, "/health", "GET", key=""))[0] == 200
            await g.server.stop()
            with pytest.raises(openai.InternalServerError) as down:
                await ask(client)
            assert down.value.status_code == 503
            status, answer = await post(g, None, "/health", "GET", key="")
            assert (status, answer["error"]["code"]) == (503, "no_server")
            await g.fleet.close()  # as at the end of a run, when applications still ask
            with pytest.raises(openai.InternalServerError, match="has ended") as down:
                await ask(client)
            assert down.value.status_code == 503

    agents.run(main())


REFUSED = {  # by vLLM, and the parameter that is to blame
    "temperature: vLLM does not take the request: temperature must be in [0, 2], got 3.0": (
        "temperature"
    ),
    "top_k must be 0 (disable), or at least 1": "top_k",
    "guide: vLLM does not take the request: a schema": "response_format",
    "min_new_tokens=5 is above": "min_tokens",
    "token 5 is out of the vocabulary": "messages",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_of_the_engine_blames_what_it_names(agents, words):
    class Refusing(agents.engine):
        async def generate(self, request):
            raise ValueError(words)
            yield

    async def main():
        async with agents.gateway(Refusing()) as g, agents.client(g) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await ask(client, temperature=1.5)
            assert error.value.param == REFUSED[words]

    agents.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_is_kept(agents, stream):
    said = CALL + "\n" + CALL.replace('"a": 1', '"a": 9')

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: said)) as g,
            agents.client(g) as client,
            agents.claude(g) as claude,
        ):
            for wanted, options in (
                (1, {"parallel_tool_calls": False}), (2, {"parallel_tool_calls": True}), (2, {}),
            ):  # fmt: skip
                got = await ask(client, tools=[ADD], stream=stream, **options)
                calls = (await read(got))[1] if stream else got.choices[0].message.tool_calls
                assert len(calls) == wanted
                assert json.loads(calls[0].function.arguments)["a"] == 1
                tool = {"type": "function", **ADD["function"], "strict": False}
                asked = {"model": "m", "input": "x", "tools": [tool], **options}
                if stream:
                    async with client.responses.stream(**asked) as events:
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**asked)
                assert len(response.output) == wanted
                assert response.parallel_tool_calls == options.get("parallel_tool_calls", True)
                choice = {"type": "auto", "disable_parallel_tool_use": wanted == 1}
                asked = {
                    "model": "m", "max_tokens": 150, "messages": HELLO, "tool_choice": choice,
                    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                }  # fmt: skip
                if stream:
                    async with claude.messages.stream(**asked) as events:
                        message = await events.get_final_message()
                else:
                    message = await claude.messages.create(**asked)
                assert len(message.content) == wanted

    agents.run(main())


def test_one_call_of_two_goes_back_as_the_model_wrote_it(agents):
    said = iter([CALL + CALL, "ok"])

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: next(said))) as g,
            agents.client(g) as client,
        ):
            got = await ask(client, tools=[ADD], parallel_tool_calls=False)
            reply = got.choices[0].message.model_dump(exclude_none=True)
            (call,) = reply["tool_calls"]
            talk = [*HELLO, reply, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
            await client.chat.completions.create(model="m", messages=talk, tools=[ADD])
            return g.session.interactions

    _, second = agents.run(main())
    assert second.parent == 0


STRICT = (  # as Mistral's templates: turns alternate, and an id has 9 characters
    "{% set ns = namespace(turns=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}"
    "{% set ns.turns = ns.turns + 1 %}{% endif %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('an id') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}<|assistant|>"
    "{# tools <tool_call> #}"
)


def test_a_template_that_takes_calls_as_calls_only_has_tool_loops_too(agents):
    said = iter([CALL, CALL, "3", "ok"])

    async def main():
        engine = agents.engine(lambda *_: next(said))
        async with agents.gateway(engine, template=STRICT) as g, agents.client(g) as client:
            talk = list(HELLO)
            for _ in range(2):
                got = await client.chat.completions.create(model="m", messages=talk, tools=[ADD])
                talk.append(got.choices[0].message.model_dump(exclude_none=True))
                (call,) = talk[-1]["tool_calls"]
                talk.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
            await client.chat.completions.create(model="m", messages=talk, tools=[ADD])
            return g.session.interactions

    kept = agents.run(main())
    assert [i.after for i in kept] == [None, 0, 1]
    assert kept[2].prompt_text.count("<tool_call>{") == 2


THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m[field] %}<think>{{ m[field] }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}<|assistant|>{# tools <tool_call> </think> #}"
)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_that_are_not_the_models_reach_the_template(agents, field):
    """Few-shot examples, say, or answers of another model."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    thought = "<think>hm <x></think>"

    async def main():
        template = "{% set field = '" + field + "' %}" + THINKS
        async with (
            agents.gateway(template=template) as g,
            agents.client(g) as client,
            agents.claude(g) as claude,
        ):
            for name in ("reasoning_content", "reasoning"):
                own = {"role": "assistant", "content": "yes", name: "hm <x>"}
                talk = [*HELLO, own, *HELLO]
                await client.chat.completions.create(model="m", messages=talk)
            talk[1] = {"role": "assistant", "tool_calls": [call], "reasoning": "hm <x>"}
            await client.chat.completions.create(model="m", messages=talk)
            block = {"type": "thinking", "thinking": "hm <x>", "signature": ""}
            text = {"type": "text", "text": "yes"}
            use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
            for content in ([block, text], [block, use]):
                talk[1] = {"role": "assistant", "content": content}
                await claude.messages.create(model="m", max_tokens=9, messages=talk)
            said = {"id": "rs", "type": "reasoning", "summary": []}
            said["content"] = [{"type": "reasoning_text", "text": "hm <x>"}]
            brief = {**said, "content": None}
            brief["summary"] = [{"type": "summary_text", "text": "hm <x>"}]
            answer = {"role": "assistant", "content": "yes"}
            called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            for before, after in ((said, answer), (brief, called)):
                items = [*HELLO, before, after, *HELLO]
                await client.responses.create(model="m", input=items)
            await client.responses.create(model="m", input=[*HELLO, said, *HELLO])
            return [i.prompt_text for i in g.session.interactions]

    *texts, without = agents.run(main())
    assert len(texts) == 7
    for text in texts:
        assert text.count(thought) == 1
        assert f"<|assistant|>{thought}" in text
    assert "<think>" not in without


def test_no_top_k_is_minus_one(agents):
    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            for value in (-1, 0, 5):
                await ask(client, extra_body={"top_k": value})
            with pytest.raises(openai.BadRequestError, match="top_k is -2"):
                await ask(client, extra_body={"top_k": -2})
            return [request.sampling.top_k for request in g.engine.requests]

    assert agents.run(main()) == [0, 0, 5]


def test_training_asks_for_the_masks_of_truncated_draws(agents):
    async def main(fixed):
        async with agents.gateway(temperature_fixed=fixed) as g, agents.client(g) as client:
            await ask(client)
            await ask(client, top_p=0.5)
            await ask(client, extra_body={"min_tokens": 2})
            return [request.sampling.return_masks for request in g.engine.requests]

    assert agents.run(main(True)) == [False, True, True]
    assert agents.run(main(False)) == [False, False, False]


def test_a_template_that_raises_says_so(agents):
    strict = "{{ raise_exception('roles must alternate') }}"

    async def main():
        async with agents.gateway(template=strict) as g, agents.client(g) as client:
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                await ask(client)

    agents.run(main())


def test_variables_of_the_template_are_passed_on_and_its_own_arguments_are_not(agents):
    thinking = "{% if think %}think!{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"

    async def main():
        engine = agents.engine(lambda prompt, *_: prompt)
        async with agents.gateway(engine, template=thinking) as g, agents.client(g) as client:
            body = {"chat_template_kwargs": {"think": True}}
            got = await ask(client, extra_body=body)
            assert got.choices[0].message.content == "think!hello there"
            for name in ("tokenize", "chat_template"):
                with pytest.raises(openai.BadRequestError, match=f"{name} is not a variable"):
                    await ask(client, extra_body={"chat_template_kwargs": {name: ""}})

    agents.run(main())


def test_training_refuses_another_temperature(agents):
    async def main():
        async with (
            agents.gateway(temperature_fixed=True) as g,
            agents.client(g) as client,
        ):
            await ask(client, temperature=1)
            with pytest.raises(openai.BadRequestError, match="leave it out"):
                await ask(client, temperature=0)

    agents.run(main())


BROKEN = {
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "an unknown method": b"G<T / HTTP/1.1\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost\r\n\r\n",
    "two lengths": b"POST /v1/responses HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    "a bad chunk": b"POST /KEY/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a bad encoding": b"POST /KEY/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_http_is_answered_and_leaves_the_terminal_alone(agents, caplog, case):
    async def main():
        async with agents.gateway() as g:
            reader, writer = await asyncio.open_connection("127.0.0.1", g.gateway.port)
            writer.write(BROKEN[case].replace(b"KEY", g.session.key.encode()))
            answer = await reader.readline()
            writer.close()
            assert answer.split()[1] == b"400"

    agents.run(main())
    assert not [r for r in caplog.records if r.levelname != "DEBUG"]


@pytest.mark.parametrize("context", [4096, 1 << 24])
def test_the_loop_turns_while_a_large_body_is_read(agents, context):
    """Ticks of another coroutine between the request's arrival and its answer."""

    async def main():
        engine = agents.engine(lambda *_: "ok", max_model_len=context)
        async with agents.gateway(engine) as g:
            encode, ticks, during = g.gateway.tokenizer.__class__.__call__, 0, []

            async def tick():
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.001)
                    ticks += 1

            def counted(own, text, **options):
                before = ticks
                try:
                    return encode(own, text, **options)
                finally:
                    during.append(ticks - before)

            ticking = asyncio.create_task(tick())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(g.gateway.tokenizer.__class__, "__call__", counted)
                size = 10_000_000 if context == 4096 else 1_000_000
                words = "lorem ipsum " * (size // 12)
                body = json.dumps({"messages": [{"role": "user", "content": words}]})
                status, answer = await post(g, io.BytesIO(body.encode()))
            ticking.cancel()
            if context == 4096:
                assert status == 400
                assert answer["error"]["code"] == "context_length_exceeded"
                assert not during  # no tokenizer could make so little of it
            else:
                assert status == 200
                assert sum(during) > 0  # others ran while it was tokenised

    agents.run(main(), 120)


def test_no_client_is_left_without_an_answer_when_it_stops(agents):
    waiting = []

    def ask_until_gone(url):
        try:
            while True:
                urllib.request.urlopen(url, timeout=60).close()
        except TimeoutError:
            waiting.append(url)
        except OSError:
            return

    for _ in range(5):
        loop = LoopThread("a run's")
        loop.start()
        stopping = gateway.Gateway(None, agents.tokenizer())
        loop.run(stopping.start())
        url = stopping.base_url().removesuffix("/v1") + "/health"
        urllib.request.urlopen(url, timeout=60).close()
        clients = [threading.Thread(target=ask_until_gone, args=(url,)) for _ in range(12)]
        for client in clients:
            client.start()
        loop.run(stopping.stop())
        loop.close()
        for client in clients:
            client.join()
    assert not waiting
