"""The Responses API over the gateway, asked by OpenAI's own client and its Agents SDK."""

import json
from contextlib import AsyncExitStack

import openai
import pytest

from rlx.agents import chat, responses
from rlx.agents.dialects import ApiError

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
NOTHING = {"type": "function", "name": "go", "parameters": None}  # as the API has it
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_a_response_is_what_the_model_said(agents):
    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            got = await client.responses.create(
                model="m", instructions="be kind", input="hello", max_output_tokens=3
            )
            return got, g.session.interactions[0]

    got, kept = agents.run(main())
    assert got.output_text == "hel"
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.id == kept.completion_id
    assert kept.prompt_text == "<|system|>be kind<|end|><|user|>hello<|end|><|assistant|>"
    assert (got.usage.output_tokens, got.usage.input_tokens) == (3, len(kept.prompt_tokens))


def test_tools_go_round_and_the_conversation_is_one_sequence(agents):
    said = iter([f"let me see {CALL}", "it is 3"])

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: next(said))) as g,
            agents.client(g) as client,
        ):
            talk = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
            got = await client.responses.create(model="m", input=talk, tools=[ADD, NOTHING])
            words, call = got.output
            assert words.content[0].text == "let me see "
            assert json.loads(call.arguments) == {"a": 1, "b": 2}
            talk += [item.model_dump(exclude_none=True) for item in got.output]
            talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
            got = await client.responses.create(model="m", input=talk, tools=[ADD, NOTHING])
            assert got.output_text == "it is 3"
            return g.session.interactions

    first, second = agents.run(main())
    assert second.parent == 0
    tokens = [*first.prompt_tokens, *first.completion.tokens]
    assert second.prompt_tokens[: len(tokens)].tolist() == tokens


def test_a_stream_says_the_same_as_a_whole_answer(agents):
    said = iter([f"let me see {CALL}"] * 2 + ["cut short"])

    async def main():
        async with (
            agents.gateway(agents.engine(lambda *_: next(said))) as g,
            agents.client(g) as client,
        ):
            whole = await client.responses.create(model="m", input="1+2?", tools=[ADD])
            async with client.responses.stream(model="m", input="1+2?", tools=[ADD]) as stream:
                kinds = [event.type async for event in stream]
                built = await stream.get_final_response()
            cut = [
                event
                async for event in await client.responses.create(
                    model="m", input="x", max_output_tokens=3, stream=True
                )
            ]
            words = [e.delta for e in cut if e.type == "response.output_text.delta"]
            assert cut[-1].type == "response.incomplete"
            short = cut[-1].response
            return whole, kinds, built, words, short, g.session.interactions

    whole, kinds, built, words, short, kept = agents.run(main())
    assert [i.type for i in built.output] == [i.type for i in whole.output]
    assert built.output_text == whole.output_text == "let me see "
    assert built.output[1].arguments == whole.output[1].arguments
    assert built.usage == whole.usage
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 2
    assert ("".join(words), short.output_text, short.status) == ("cut", "cut", "incomplete")
    assert [k.completion_id for k in kept][1:] == [built.id, short.id]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": 1}, "stream"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": 5}, "input"), ({"input": [5]}, "input[0]"), ({"inptu": "x"}, "inptu"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         "messages[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "messages[0].content[0].image_url.url"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"), ({"tools": 5}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format.json_schema"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(agents, fields, param):
    with pytest.raises(ApiError) as error:
        chat.read(responses.to_chat({"input": "x", **fields}), agents.sampling)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.witnesses
def test_the_tutorials_agent_runs_on_the_agents_sdk(agents):
    sdk = pytest.importorskip("agents", reason="openai-agents is not installed")
    said = iter([CALL, "it is 3"])

    @sdk.function_tool
    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    async def main():
        engine = agents.engine(lambda *_: next(said))
        async with agents.gateway(engine) as g, AsyncExitStack() as ending:
            url = g.gateway.base_url(g.session)
            client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
            ending.push_async_callback(client.close)
            config = sdk.RunConfig(
                model_provider=sdk.OpenAIProvider(openai_client=client), model="default",
                tracing_disabled=True,
            )  # fmt: skip
            agent = sdk.Agent(name="calculator", instructions="Use the tools.", tools=[add])
            result = await sdk.Runner.run(
                agent, input="1+2?", session=sdk.SQLiteSession("math"), run_config=config
            )
            return result.final_output, g.session.interactions

    output, (first, second) = agents.run(main())
    assert output == "it is 3"
    assert second.parent == 0
    assert "<|tool|>3.0<|end|>" in second.prompt_text
    assert first.tool_calls == 1
