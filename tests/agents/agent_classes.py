"""Agents of the tests, as users write them; loaded by their file's name."""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time

from openai import AsyncOpenAI, OpenAI


class Repeat:
    """Asks `turns` times, each time with all that was said before; 1 if the answer came."""

    def __init__(self, turns=1, **options):
        self.turns, self.options = turns, options

    async def run(self, data, **extra_kwargs):
        async with AsyncOpenAI(**extra_kwargs) as client:
            messages = list(data["messages"])
            for turn in range(self.turns):
                got = await client.chat.completions.create(
                    model="default", messages=messages, **self.options
                )
                words = got.choices[0].message.content
                messages += [
                    {"role": "assistant", "content": words},
                    {"role": "user", "content": f"again {turn} {data['question']}"},
                ]
        return float(data["answer"] in words)


class NoKey:
    """As the evaluation tutorial has it: base_url and http_client, and no api_key."""

    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"], http_client=extra_kwargs["http_client"],
            max_retries=0,
        )  # fmt: skip
        got = await client.chat.completions.create(model="x", messages=data["messages"])
        return got.choices[0].message.content == data["answer"]


class OwnClient:
    """Has a client of its own, which follows the environment's proxies."""

    async def run(self, data, base_url, api_key, **extra_kwargs):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await client.chat.completions.create(model="x", messages=data["messages"])
        return float("example.com" in os.environ["NO_PROXY"])


class Credits:
    """A reward for the first and the last of three completions."""

    async def run(self, data, **extra_kwargs):
        client, messages, ids = AsyncOpenAI(**extra_kwargs), list(data["messages"]), []
        for _ in range(3):
            got = await client.chat.completions.create(model="x", messages=messages)
            ids.append(got.id)
            messages += [{"role": "assistant", "content": got.choices[0].message.content},
                         {"role": "user", "content": "more"}]  # fmt: skip
        return {ids[0]: 0.25, ids[2]: 1}


class Fork:
    """Goes on in two ways from its first answer."""

    async def run(self, data, **extra_kwargs):
        client, messages = AsyncOpenAI(**extra_kwargs), list(data["messages"])
        got = await client.chat.completions.create(model="x", messages=messages)
        messages.append({"role": "assistant", "content": got.choices[0].message.content})
        for words in ("one", "two"):
            more = [*messages, {"role": "user", "content": words}]
            await client.chat.completions.create(model="x", messages=more)
        return 1.0


class MathVerify:
    """Grades in its own thread, with a library that will only do so in the main one."""

    async def run(self, data, **extra_kwargs):
        from math_verify import parse, verify

        client = AsyncOpenAI(**extra_kwargs)
        got = await client.chat.completions.create(model="x", messages=data["messages"])
        return float(verify(parse(data["answer"]), parse(got.choices[0].message.content)))


class Misbehaves:
    """Does what the row says."""

    async def run(self, data, **extra_kwargs):
        how = data["how"]
        if how == "silent":
            return 1.0
        client = AsyncOpenAI(**extra_kwargs)
        got = await client.chat.completions.create(model="x", messages=data["messages"])
        if how == "raises":
            raise LookupError("no such tool")
        if how == "exits":
            raise SystemExit(3)
        if how == "dies":
            os._exit(3)
        if how == "stubborn":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        if how == "blocks":
            time.sleep(60)
        if how == "waits":
            await asyncio.sleep(60)
        returned = {"nan": float("nan"), "none": None, "text": "good", "other": {"id": 1.0}}
        return returned[how] if how in returned else float(bool(got))


class ToldLater:
    """Returns nothing; its reward is told when it is over, in a form that the row names."""

    async def run(self, data, base_url, api_key, http_client):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        got = await client.chat.completions.create(model="x", messages=data["messages"])
        for body in ({"reward": {"nobody's": 1}}, {"reward": 10**400}, {"reward": "1"}, [], {}):
            wrong = await http_client.post(f"{base_url}/rewards", json=body)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reward")
        own = {"by run": 3, "by id": {got.id: 0.5}}
        command = [sys.executable, "-c", TELL, f"{base_url}/rewards", json.dumps(own[data["how"]])]
        subprocess.Popen(command)


TELL = """
import json, sys, urllib.request
body = json.dumps({"reward": json.loads(sys.argv[2])}).encode()
urllib.request.urlopen(urllib.request.Request(sys.argv[1], body)).read()
"""


class Unlucky:
    """Two turns; a row of each third number meets a fault of its own between them, once."""

    async def run(self, data, **extra_kwargs):
        turns = Repeat(turns=2)
        how = ("raises", "exits", "blocks", "dies")[data["number"] // 3 % 4]
        mark = pathlib.Path(data["place"]) / f"{how}-{data['number']}"
        if data["number"] % 3 == 0 and not mark.exists():
            mark.touch()
            await Misbehaves().run({**data, "how": how}, **extra_kwargs)
        return await turns.run(data, **extra_kwargs)


class AsTheRowSays:
    """Any of the others, so that one process does for many tests."""

    async def run(self, data, **extra_kwargs):
        agent = globals()[data["agent"]](**data.get("options", {}))
        return await agent.run(data, **extra_kwargs)


class Blocking:
    """Waits with the synchronous client: its process waits with it, the gateway does not."""

    async def run(self, data, **extra_kwargs):
        extra_kwargs.pop("http_client")
        with OpenAI(**extra_kwargs) as client:
            client.chat.completions.create(model="x", messages=data["messages"])
        return 1.0


class Counter:
    """State of one run is not another's."""

    def __init__(self):
        self.runs = 0

    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(**extra_kwargs)
        await client.chat.completions.create(model="x", messages=data["messages"])
        self.runs += 1
        return self.runs


class NotAsync:
    def run(self, data, **extra_kwargs):
        return 1.0


class NoNames:
    async def run(self, data):
        return 1.0


class NoRun:
    async def rum(self, data, **extra_kwargs):
        return 1.0


class Refuses:
    def __init__(self, tool):
        raise ValueError(f"no tool {tool}")

    async def run(self, data, **extra_kwargs):
        return 1.0


NUMBER = 5
