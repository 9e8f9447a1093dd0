"""Agents as users write them, most with a mistake; `debug_test` has each one named."""

import asyncio
import json
import math
import threading

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

MODEL = "tiny-model"
_turn = threading.Lock()


def prompt(wish):
    """One message; `wish` says how the server behaves."""
    return [{"role": "user", "content": json.dumps(wish)}]


async def ask(kwargs, wish=(), model=MODEL):
    """One completion."""
    async with AsyncOpenAI(max_retries=0, **kwargs) as found:
        return await found.chat.completions.create(model=model, messages=prompt(dict(wish)))


class Good:
    """Three turns: the second is left where its stream stops, the third is Anthropic's."""

    async def run(self, data, **kwargs):
        name, keys = "", {key: kwargs[key] for key in ("base_url", "api_key")}
        async with AsyncOpenAI(max_retries=0, **kwargs) as found:
            first = await found.chat.completions.create(
                model=MODEL, messages=prompt(data.get("wish", {}))
            )
            events = await found.chat.completions.create(
                model=MODEL, messages=prompt({}), stream=True
            )
            async for event in events:
                name = event.id
                if event.choices[0].finish_reason:
                    break
        async with AsyncAnthropic(max_retries=0, **keys) as found:
            last = await found.messages.create(model=MODEL, messages=prompt({}), max_tokens=8)
        return {first.id: 0.0, name: 1.0, last.id: 0.5}


class AsTheRowSays:
    """One mistake, or none."""

    async def run(self, data, **kwargs):
        how, found = data["how"], await ask(kwargs, data.get("wish", {}), data.get("model", MODEL))
        if how == "raises":
            return self.grade(data)
        if how == "exits":
            raise SystemExit(3)
        if how == "hangs":
            await asyncio.Event().wait()
        while how == "deaf":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        if how == "blocks":
            _turn.acquire()
            _turn.acquire()
        return {"nan": math.nan, "none": None, "unknown": {"no-id": 1.0}, "text": "1.0",
                "none of": {found.id: None}}.get(how, 1.0)  # fmt: skip

    def grade(self, data):
        return float(data["answer"] == "42")


class SharedClient:
    """Makes one client for all runs: training could not tell them apart."""

    client = None

    async def run(self, data, **kwargs):
        own = SharedClient.client = SharedClient.client or AsyncOpenAI(**kwargs)
        await own.chat.completions.create(model=MODEL, messages=prompt({}))
        return 1.0


class Arithmetic:
    """Of the packaged model's task, as its server names the model."""

    async def run(self, data, **kwargs):
        async with AsyncOpenAI(max_retries=0, **kwargs) as found:
            name = (await found.models.list()).data[0].id
            answer = await found.chat.completions.create(
                model=name, messages=data["messages"], max_tokens=48
            )
        return float(data["answer"] in answer.choices[0].message.content)
