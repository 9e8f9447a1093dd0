"""The gateway over real HTTP and gRPC, asked by OpenAI's own client."""

import asyncio
import json

import numpy as np
import openai
import pytest

HELLO = [{"role": "user", "content": "hello there"}]


def test_a_completion_is_what_the_model_said_and_is_recorded(agents):
    async def main():
        async with agents.gateway() as g, agents.client(g) as client:
            got = await client.chat.completions.create(model="any", messages=HELLO, logprobs=True)
            (kept,) = g.session.interactions
            return got, kept, g.engine.requests[0]

    got, kept, request = agents.run(main())
    (choice,) = got.choices
    assert (choice.message.content, choice.finish_reason) == ("hello there", "stop")
    assert got.model == "any"
    prompt = "<|user|>hello there<|end|><|assistant|>"
    tokenizer = agents.tokenizer()
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert request.prompt_tokens.tolist() == kept.prompt_tokens.tolist() == ids
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), 12)
    assert kept.completion_id == got.id
    assert kept.raw == "hello there<|end|>"
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx(
        kept.completion.logprobs.tolist()
    )
    assert [t.token for t in choice.logprobs.content] == [*"hello there", "<|end|>"]
    assert kept.completion.versions.tolist() == [0] * 12
