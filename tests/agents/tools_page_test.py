"""Agents that call tools over OpenAI's API ask the model with tools that comes with rlx."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.agents.calculator import WithCalculator, computed
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Sampling
from rlx.model.directory import resolve

PAGE = Path("docs/tools.md").read_text()
MODEL = str(resolve("rlx:calculator"))


def test_the_embedded_model_calls_a_calculator_over_openai_s_api(agents):
    """Its chat template has tools, and the gateway finds its calls."""
    ask = {}
    exec(re.search(r"```python\n(# ask.py.*?)```", PAGE, re.DOTALL)[1], ask)
    asked = []

    def calculate(expression):
        asked.append(expression)
        return "30312"

    async def main():
        engine = JaxEngine(MODEL, slots=2, max_model_len=192)
        async with agents.gateway(engine, tokenizer=MODEL) as g:
            found = g.gateway.base_url(), g.session.key, "calculator:739+48=?", calculate
            return await asyncio.to_thread(ask["ask"], *found), g.session.interactions

    messages, interactions = agents.run(main(), 120)
    assert len(asked) == 1
    assert re.fullmatch(r"739[+*-]\d+", asked[0]), "a small model may miscopy a digit"
    _, call, output, answer = messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"expression": asked[0]}
    assert output["content"] == "30312"
    assert answer["content"] == "\\boxed{30312}", "it says what the tool said"
    first, second = interactions
    assert second.parent == 0, "one conversation, and no token sampled twice"
    tokens = [*first.prompt_tokens, *first.completion.tokens.tolist()]
    assert list(second.prompt_tokens)[: len(tokens)] == tokens


def test_the_agent_with_a_calculator_computes_what_the_model_calls_and_judges_its_answer(agents):
    row = {"messages": [{"role": "user", "content": "calculator:739+48=?"}]}

    async def main(max_calls, answer):
        engine = JaxEngine(MODEL, slots=2, max_model_len=192)
        greedy = Sampling(temperature=0.0, max_new_tokens=96)
        async with agents.gateway(engine, greedy, tokenizer=MODEL) as g:
            given = {"base_url": g.gateway.base_url(), "api_key": g.session.key}
            reward = await WithCalculator(max_calls).run({**row, "answer": answer}, **given)
            return reward, g.session.interactions

    reward, (call, answer) = agents.run(main(4, "787"), 120)
    left, right = re.search(r"(\d+)\+(\d+)", call.text).groups()
    shown = str(int(left) + int(right))  # 787, where no digit was miscopied
    assert f"{shown}<" in answer.prompt_text
    assert answer.text == f"\\boxed{{{shown}}}"
    assert reward == float(shown == "787")
    assert agents.run(main(4, shown), 120)[0] == 1.0
    reward, asked = agents.run(main(0, shown), 120)
    assert (reward, len(asked)) == (0.0, 1), "a call too many is worth nothing"


@pytest.mark.parametrize(("arguments", "said"), [
    ('{"expression": "6 * 7"}', "42"),
    ('{"expression": ["6", "7"]}', "Error: expression must be of type string"),
    ('{"sum": "6 + 7"}', "Error: "), ("[1]", "Error: "), ("6 * 7", "Error: "),
])  # fmt: skip
def test_whatever_a_model_calls_a_calculator_with_it_is_told_a_value_or_an_error(arguments, said):
    assert asyncio.run(computed(SimpleNamespace(arguments=arguments))).startswith(said)
