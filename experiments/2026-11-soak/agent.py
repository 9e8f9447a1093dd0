"""The agent of soak.py: one question, one answer, through the gateway."""

from openai import AsyncOpenAI


class Adds:
    """Ask once; return 1.0 if the answer has the right number, else 0.0."""

    async def run(self, data, **extra_kwargs):
        """Return the reward of one request to the gateway."""
        async with AsyncOpenAI(**extra_kwargs) as client:
            got = await client.chat.completions.create(model="default", messages=data["messages"])
        return float(data["answer"] in (got.choices[0].message.content or ""))
