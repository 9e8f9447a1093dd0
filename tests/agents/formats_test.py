"""Answers in a format, logprobs of the likeliest tokens, and thoughts, in all three APIs."""

import importlib.util
import json
from functools import partial

import openai
import pytest
from pydantic import BaseModel

from rlx.engines.jax.jax_engine import JaxEngine

ASK = [{"role": "user", "content": "What is 3 + 4?"}]
MODEL = "rlx/assets/arithmetic"
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{# <think></think> #}"
)


class Answer(BaseModel):
    """What is asked for."""

    text: str
    number: int


SCHEMA = Answer.model_json_schema()
SAID = '{"text": "seven", "number": 7}'
GUIDED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def test_a_schema_goes_down_to_the_engine_from_each_api(agents):
    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: SAID)) as g,
            agents.client(g) as client, agents.claude(g) as other,
        ):  # fmt: skip
            one = await client.chat.completions.parse(
                model="m", messages=ASK, response_format=Answer
            )
            two = await client.responses.parse(model="m", input=ASK, text_format=Answer)
            three = await other.messages.parse(
                model="m", max_tokens=90, messages=ASK, output_format=Answer
            )
            await client.chat.completions.create(
                model="m", messages=ASK, response_format={"type": "json_object"}
            )
            parsed = (one.choices[0].message.parsed, two.output_parsed, three.parsed_output)
            return parsed, [r.sampling.guide for r in g.engine.requests]

    parsed, guides = agents.run(main())
    assert parsed == (Answer(text="seven", number=7),) * 3
    *schemas, anything = map(json.loads, guides)
    assert anything == {"type": "object"}
    assert all(set(s["properties"]) == {"text", "number"} for s in schemas)


def test_the_jax_engine_answers_by_a_schema_and_names_what_it_refuses(agents):
    schema = {"type": "object", "properties": {"sum": {"enum": [7, 8]}},
              "required": ["sum"], "additionalProperties": False}  # fmt: skip
    installed = importlib.util.find_spec("llguidance") is not None

    def form(schema):
        return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}

    async def main():
        engine = JaxEngine(MODEL, slots=2, max_model_len=64)
        async with agents.gateway(engine, tokenizer=MODEL) as g, agents.client(g) as client:
            ask = partial(client.chat.completions.create, model="m", messages=ASK)
            if installed:
                answer = await ask(response_format=form(schema))
                assert json.loads(answer.choices[0].message.content)["sum"] in (7, 8)
            refused = [
                ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "by the JAX engine"),
                ({"response_format": form({"enum": []})}, "response_format",
                 "has no answer" if installed else r"\[guidance\]"),
            ]  # fmt: skip
            for fields, param, words in refused:
                with pytest.raises(openai.BadRequestError, match=words) as error:
                    await ask(**fields)
                assert error.value.param == param

    agents.run(main(), 120)


def test_a_guide_excludes_tools_and_training_gets_its_masks(agents):
    tool = {"type": "function", "function": {"name": "f"}}
    options = {"model": "m", "messages": ASK, "response_format": GUIDED}

    async def main():
        async with agents.gateway(temperature_fixed=True) as g, agents.client(g) as client:
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await client.chat.completions.create(**options, tools=[tool])
            await client.chat.completions.create(**options)
            return [request.sampling for request in g.engine.requests]

    (sampling,) = agents.run(main())
    assert json.loads(sampling.guide) == SCHEMA
    assert sampling.return_masks


def test_the_likeliest_tokens_stand_beside_each_drawn_one(agents):
    fields = {"logprobs": True, "top_logprobs": 3}

    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            whole = await client.chat.completions.create(model="m", messages=ASK, n=2, **fields)
            stream = await client.chat.completions.create(
                model="m", messages=ASK, stream=True, **fields
            )
            pieces = [c.logprobs.content async for e in stream for c in e.choices if c.logprobs]
            response = await client.responses.create(
                model="m", input=ASK, top_logprobs=3, include=["message.output_text.logprobs"]
            )
            return (
                whole.choices,
                [t for p in pieces for t in p],
                response.output[0].content[0].logprobs,
            )

    choices, streamed, response = agents.run(main())
    for found in (choices[0].logprobs.content, choices[1].logprobs.content, streamed, response):
        assert "".join(t.token for t in found) == "What is 3 + 4?"
        for token in found:
            assert [t.token for t in token.top_logprobs] == [token.token, "!", '"']
            assert token.top_logprobs[0].logprob == token.logprob
            assert token.top_logprobs[1].logprob == -1.0


def test_the_same_words_said_twice_keep_each_its_own_thoughts(agents):
    thoughts = {1: "at once", 2: "once more", 3: "as ever"}

    async def main():
        said = "<think>{}</think>7"
        engine = agents.engine(lambda p, *_: said.format(thoughts[p.count("<|user|>")]))
        async with agents.gateway(engine, template=THINKING) as g, agents.client(g) as client:
            talk = list(ASK)
            for _ in thoughts:
                got = await client.chat.completions.create(model="m", messages=talk)
                reply = got.choices[0].message.model_dump(exclude_none=True)
                talk += [reply, {"role": "user", "content": "sure?"}]
            return g.session.interactions

    kept = agents.run(main())
    assert [i.parent for i in kept] == [None, 0, 1]
    assert kept[2].prompt_text.count(thoughts[1]) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_have_their_own_place_and_go_back_as_they_were(agents, begun):
    thought, words = "three and four", "it is 7 < 8"
    raw = f"<think>{thought}</think>\n\n{words}"

    async def main():
        engine = agents.engine(lambda *_: raw.removeprefix("<think>" if begun else ""))
        template = THINKING + "<think>" * begun
        async with (
            agents.gateway(engine, template=template) as g,
            agents.client(g) as client, agents.claude(g) as other,
        ):  # fmt: skip
            chat = await client.chat.completions.create(model="m", messages=ASK)
            stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            deltas = [c.delta async for event in stream for c in event.choices]
            response = await client.responses.create(model="m", input=ASK)
            async with client.responses.stream(model="m", input=ASK) as events:
                built = [event async for event in events][-1].response
            message = await other.messages.create(model="m", max_tokens=99, messages=ASK)
            async with other.messages.stream(model="m", max_tokens=99, messages=ASK) as events:
                streamed = await events.get_final_message()
            said = chat.choices[0].message
            talk = [*ASK, said.model_dump(exclude_none=True), {"role": "user", "content": "so?"}]
            await client.chat.completions.create(model="m", messages=talk)
            return said, deltas, (response, built), (message, streamed), g.session.interactions

    said, deltas, responses, messages, kept = agents.run(main())
    assert (said.reasoning_content, said.content) == (thought, words)
    pieces = [getattr(d, "reasoning_content", None) or "" for d in deltas]
    assert len([p for p in pieces if p]) > 1
    assert ("".join(pieces), "".join(d.content or "" for d in deltas)) == (thought, words)
    for got in responses:
        assert [i.type for i in got.output] == ["reasoning", "message"]
        assert (got.output[0].content[0].text, got.output_text) == (thought, words)
    for got in messages:
        assert [b.type for b in got.content] == ["thinking", "text"]
        assert (got.content[0].thinking, got.content[1].text) == (thought, words)
    last = kept[-1]
    if begun:  # the prompt's own tag is no part of the conversation
        assert last.parent is None
    else:
        assert last.parent is not None
        assert last.prompt_text.count(thought) == 1


SAYS = {  # what the model says → the content that the agent gets
    "plain": ("é😊漢!", "é😊漢!"),
    "thoughts": ("<think>hm é</think>\n\n漢 42", "漢 42"),
    "thoughts after a blank": ("\n <think>hm</think>\n\n漢 42", "漢 42"),
    "thoughts alone": ("<think>hm", ""),
    "stop": ("漢 42 é END", "漢 42 é "),
    "call": ('漢: <tool_call>{"name": "f", "arguments": {}}</tool_call>', "漢: "),
    "call alone": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ""),
    "cut": ("<think>a</think>漢漢", "漢\ufffd"),
}


@pytest.mark.parametrize("case", SAYS)
def test_logprobs_are_those_of_the_contents_tokens(agents, case):
    said, content = SAYS[case]
    template = agents.engine().tokenizer.chat_template + "{# <think></think> #}"
    tool = {"type": "function", "function": {"name": "f"}}
    options = {"logprobs": True, "top_logprobs": 3, "tools": [tool], "stop": ["END"]}
    options |= {"max_tokens": len(said.encode()) - 1} if case == "cut" else {}
    asked = {"model": "m", "messages": ASK, **options}

    async def main():
        engine = agents.engine(lambda *_: said)
        async with agents.gateway(engine, template=template) as g, agents.client(g) as client:
            whole = (await client.chat.completions.create(**asked, n=2)).choices
            stream = await client.chat.completions.create(**asked, stream=True)
            choices = [c async for e in stream for c in e.choices]
            items = {"model": "m", "input": ASK, "top_logprobs": 3}
            tool = {"type": "function", "name": "f", "parameters": {}}
            response = await client.responses.create(**items, tools=[tool])
            return whole, choices, response, g.session.interactions[0].completion

    whole, pieces, response, drawn = agents.run(main())
    streamed = [t for c in pieces if c.logprobs for t in c.logprobs.content]
    assert "".join(c.delta.content or "" for c in pieces) == content
    late = 0  # tokens never come before their text
    for c in pieces:
        late += len((c.delta.content or "").encode())
        late -= sum(len(t.bytes) for t in (c.logprobs.content if c.logprobs else []))
        assert late >= 0 or case == "cut"
    for found in (*(c.logprobs.content for c in whole), streamed):
        assert b"".join(bytes(t.bytes) for t in found).decode(errors="replace") == content
        first = said.encode().find(content.rstrip("\ufffd").encode())
        wanted = drawn.logprobs[first : first + len(found)].tolist()
        assert [t.logprob for t in found] == pytest.approx(wanted)
        assert all(t.top_logprobs[0].bytes == t.bytes for t in found)
    if case in ("plain", "thoughts", "thoughts after a blank", "call"):
        (text,) = [p for i in response.output if i.type == "message" for p in i.content]
        assert b"".join(bytes(t.bytes) for t in text.logprobs).decode() == text.text == content


@pytest.mark.vllm
def test_vllm_answers_by_the_schema_and_tells_the_likeliest_tokens(agents, tmp_path):
    from transformers import AutoTokenizer

    from rlx.agents.api_gateway import Gateway
    from rlx.fleet.client import Fleet
    from rlx.launch.local import LocalServers

    async def main(servers):
        fleet = Fleet(servers.wait(), token=servers.token)
        await fleet.connect()
        gateway = Gateway(fleet, AutoTokenizer.from_pretrained(MODEL))
        await gateway.start()
        try:
            key = gateway.sessions.open(agents.sampling).key
            url = gateway.base_url()
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                schema = {"type": "object", "properties": {"sum": {"enum": [7, 8]}},
                          "required": ["sum"], "additionalProperties": False}  # fmt: skip
                form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
                options = {"model": "m", "messages": ASK, "logprobs": True}
                got = await client.chat.completions.create(
                    **options, response_format=form, top_logprobs=4, n=2
                )
                plain = await client.chat.completions.create(**options, max_tokens=4)
                bad = {"name": "s", "schema": {"type": "nothing"}}
                form = {"type": "json_schema", "json_schema": bad}
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(**options, response_format=form)
            return got, plain, error.value
        finally:
            await gateway.stop()
            await fleet.close()

    options = {"engine": "vllm", "slots": 4, "max_model_len": 256}
    with LocalServers(MODEL, workdir=tmp_path, **options) as servers:
        got, plain, error = agents.run(main(servers), 240)
    for choice in got.choices:
        assert json.loads(choice.message.content)["sum"] in (7, 8)
        for token in choice.logprobs.content:
            tops = [t.logprob for t in token.top_logprobs]
            assert (len(tops), tops) == (4, sorted(tops, reverse=True))
            assert token.logprob <= tops[0] <= 0
    assert all(t.top_logprobs == [] for t in plain.choices[0].logprobs.content)
    assert error.param == "response_format"
