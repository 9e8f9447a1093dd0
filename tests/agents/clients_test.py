"""Frameworks as they are installed, unmodified, against the gateway."""

import json
import re

import openai
import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.witnesses, pytest.mark.filterwarnings("ignore")]  # of frameworks
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Answer(BaseModel):
    """An answer in words and as a number."""

    text: str
    number: int


def reply(prompt, seed, index):
    """A call of the tool that there is, the answer after it, or JSON."""
    said = json.dumps({"text": "seven", "number": 7})
    if prompt.endswith('"arguments":'):
        return said + "}\n</tool_call>"
    if "<|tool|>" in prompt:
        return "it is 3"
    return CALL if re.search("tools <tool_call>: .*add", prompt) else said


def test_langchain_calls_tools_and_parses_answers_by_all_its_methods(agents):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is missing")

    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    async def main():
        async with (
            agents.gateway(agents.engine(reply)) as g,
            openai.DefaultAsyncHttpxClient() as http,
        ):
            model = langchain.ChatOpenAI(
                model="m", base_url=g.gateway.base_url(g.session), api_key="any", max_retries=0,
                http_async_client=http,
            )  # fmt: skip
            called = await model.bind_tools([add]).ainvoke("1+2?")
            streamed = "".join([piece.text async for piece in model.astream("3+4?")])
            methods = ("json_schema", "function_calling", "json_mode")
            parsed = [
                await model.with_structured_output(Answer, method=method).ainvoke("3+4?")
                for method in methods
            ]
            return called.tool_calls, json.loads(streamed), parsed, g.engine.requests

    calls, streamed, parsed, requests = agents.run(main(), 60)
    assert [(c["name"], c["args"]) for c in calls] == [("add", {"a": 1, "b": 2})]
    assert streamed == {"text": "seven", "number": 7}
    assert parsed == [Answer(text="seven", number=7)] * 3
    guides = [json.loads(r.sampling.guide or "null") for r in requests[-3:]]
    assert guides[0]["properties"].keys() == {"text", "number"}
    assert guides[1:] == [None, {"type": "object"}]


@pytest.mark.parametrize("responses", [False, True])
def test_the_agents_sdk_streams_a_loop_of_tools(agents, responses):
    sdk = pytest.importorskip("agents", reason="openai-agents is missing")

    @sdk.function_tool
    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    async def main():
        async with agents.gateway(agents.engine(reply)) as g:
            url = g.gateway.base_url(g.session)
            async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
                provider = sdk.OpenAIProvider(openai_client=client, use_responses=responses)
                config = sdk.RunConfig(model_provider=provider, model="m", tracing_disabled=True)
                agent = sdk.Agent(name="calculator", tools=[add])
                run = sdk.Runner.run_streamed(agent, input="1+2?", run_config=config)
                deltas = [
                    event.data.delta
                    async for event in run.stream_events()
                    if event.type == "raw_response_event"
                    and event.data.type == "response.output_text.delta"
                ]
                return "".join(deltas), run.final_output, g.session.interactions

    streamed, output, (_, second) = agents.run(main(), 60)
    assert streamed == output == "it is 3"
    assert second.parent == 0
