"""Agents as users write them, most with a mistake; `debug_test` has each one named."""

import asyncio
import json
import math
import re
import threading
import time
import urllib.request

import numpy as np
from openai import AsyncOpenAI

MODEL = "tiny-model"
_kept = []
_connections = []
_turn = threading.Lock()
_never = asyncio.Event()


def client(kwargs, **more):
    """As a careful user makes it."""
    names = ("base_url", "api_key", "http_client")
    return AsyncOpenAI(max_retries=0, **{name: kwargs[name] for name in names} | more)


async def ask(kwargs, wish=None, **more):
    """One completion; `wish` says how the server behaves."""
    prompt = [{"role": "user", "content": json.dumps(wish or {})}]
    async with client(kwargs) as found:
        return await found.chat.completions.create(model=MODEL, messages=prompt, **more)


class Good:
    """Two turns, the second as a stream; rewards by id."""

    async def run(self, data, **kwargs):
        first, name = None, ""
        async with client(kwargs) as found:
            prompt = [{"role": "user", "content": json.dumps(data.get("wish", {}))}]
            first = await found.chat.completions.create(model=MODEL, messages=prompt)
            events = await found.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "{}"}], stream=True
            )
            async for event in events:
                name = event.id
                if event.choices[0].finish_reason:
                    break
        return {first.id: 0.0, name: 1.0}


class Sleeps:
    """Blocks the loop in a tool."""

    async def run(self, data, **kwargs):
        await ask(kwargs)
        self.tool()
        return 1.0

    def tool(self):
        time.sleep(0.5)


class AsksInSync:
    """Blocks the loop by a synchronous HTTP request."""

    async def run(self, data, **kwargs):
        body = {"model": MODEL, "messages": [{"role": "user", "content": '{"delay": 0.6}'}]}
        request = urllib.request.Request(
            kwargs["base_url"] + "/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {kwargs['api_key']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return float("choices" in json.load(answer))


class Computes:
    """Holds the interpreter, so that no other thread can look meanwhile."""

    async def run(self, data, **kwargs):
        await ask(kwargs)
        for _ in range(3):  # a watching thread that had no CPU in the first one sees the next
            re.match(r"(a+)+$", "a" * 24 + "b")
        return 1.0


class RaisesForSome:
    """Fails on rows without an answer."""

    async def run(self, data, **kwargs):
        await ask(kwargs)
        return self.grade(data)

    def grade(self, data):
        return float(data["answer"] == "42")


class Hangs:
    """Waits for ever on some rows, for nothing."""

    async def run(self, data, **kwargs):
        if data["number"] == 1:
            await asyncio.Event().wait()
        return 1.0


class Deaf:
    """Does not let itself be cancelled."""

    async def run(self, data, **kwargs):
        while True:
            try:
                await _never.wait()
            except asyncio.CancelledError:
                continue


class Deadlocks:
    """Blocks the loop for good, in the second run of a process."""

    async def run(self, data, **kwargs):
        await asyncio.sleep(0.05)
        _turn.acquire()
        return 1.0


class Returns:
    """What the row says."""

    async def run(self, data, **kwargs):
        found = await ask(kwargs)
        return {
            "nan": math.nan, "none": None, "unknown": {"chatcmpl-999999": 1.0}, "empty": {},
            "array": np.zeros(3), "float32": np.float32(0.5), "text": "1.0", "int": 1,
            "coroutine": asyncio.sleep(0) if data.get("value") == "coroutine" else 0,
            "none_of": {found.id: None},
        }[data["value"]]  # fmt: skip


class TakesTurns:
    """One run at a time: a lock of the class."""

    lock = asyncio.Lock()

    async def run(self, data, **kwargs):
        async with self.lock:
            await ask(kwargs, {"delay": 0.1})
        return 1.0


class Refused:
    """The server refuses some rows."""

    async def run(self, data, **kwargs):
        try:
            await ask(kwargs, data.get("wish"))
        except Exception:
            return 0.0
        return 1.0


class LeavesThings:
    """Tasks, threads and connections."""

    async def run(self, data, **kwargs):
        await ask(kwargs)
        host = kwargs["base_url"].split("/")[2].split(":")
        _connections.append(await asyncio.open_connection(host[0], int(host[1])))
        _kept.append(asyncio.create_task(asyncio.sleep(1000)))
        threading.Thread(target=time.sleep, args=(1000,), name="lost-0", daemon=True).start()
        return 1.0


class WrongModel:
    """Asks for a model that the server does not have."""

    async def run(self, data, **kwargs):
        async with client(kwargs) as found:
            prompt = [{"role": "user", "content": "{}"}]
            await found.chat.completions.create(model="default", messages=prompt)
        return 1.0


class Exits:
    """Would end the program."""

    async def run(self, data, **kwargs):
        await ask(kwargs)
        raise SystemExit(3)


class Arithmetic:
    """Of the packaged model's task, as its server names the model."""

    async def run(self, data, **kwargs):
        async with client(kwargs) as found:
            name = (await found.models.list()).data[0].id
            answer = await found.chat.completions.create(
                model=name, messages=data["messages"], max_tokens=48
            )
        return float(data["answer"] in answer.choices[0].message.content)
