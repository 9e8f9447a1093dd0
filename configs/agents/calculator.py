"""An agent with a calculator, which computes the calls of the model until the model answers."""

import json
import re

from openai import AsyncOpenAI

from rlx.rollout.tools import Calculator, ToolError, call

TOOL = {"name": Calculator.name, "description": Calculator.description}


class WithCalculator:
    """A conversation by OpenAI's official client, with function calls.

    Args:
      max_calls: allowed answers with calls; the reward is 0 beyond
    """

    def __init__(self, max_calls=4):
        self.max_calls = max_calls

    async def run(self, data, **kwargs):
        """Return 1.0 if the last number of the answer is right, else 0.0."""
        messages = list(data["messages"])
        tools = [{"type": "function", "function": {**TOOL, "parameters": Calculator.parameters}}]
        async with AsyncOpenAI(**kwargs) as client:  # base_url, api_key, http_client
            for _ in range(self.max_calls + 1):
                got = await client.chat.completions.create(
                    model="default", messages=messages, tools=tools
                )
                said = got.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    numbers = re.findall(r"-?\d+", said.content or "")
                    return float(numbers[-1:] == [data["answer"]])
                for asked in said.tool_calls:
                    output = await computed(asked.function)
                    messages.append({"role": "tool", "tool_call_id": asked.id, "content": output})
        return 0.0


async def computed(function):
    """Return the calculator's output for a call's arguments, or an error text for the model."""
    try:
        return await call(Calculator(), json.loads(function.arguments))
    except (ToolError, TypeError, ValueError) as error:
        return f"Error: {error}"
