"""A gateway at a low limit of open files, before strangers and bursts that are processes."""

import asyncio
import logging
import math
import resource
import ssl
import sys

import pytest
import trustme

from rlx.agents import http_listener
from rlx.agents.api_gateway import Gateway
from rlx.fleet.requests import Timeouts
from rlx.fleet.tls import Tls

MORE_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
"""
# Opens connections that it leaves after a part of a request, says so, and keeps them.
STRANGER = """
import socket, sys
kept = [socket.socket() for _ in range(int(sys.argv[2]))]
for one in kept:
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", int(sys.argv[1])))
print("open", flush=True)
import time
while True:
    for one in kept:
        try:
            one.send(sys.argv[3].encode().decode("unicode_escape").encode())
        except OSError:
            pass
    time.sleep(0.2)
"""
# Sends requests at once, each on a connection of its own, and prints how often each status came.
BURST = """
import asyncio, collections, sys, aiohttp
async def main(url, key, count):
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async def ask():
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(url + "/chat/completions", json=body, headers=headers) as r:
                await r.read()
                return r.status
        found = await asyncio.gather(*(ask() for _ in range(count)), return_exceptions=True)
    print(dict(collections.Counter(map(str, found))))
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.fixture
def few_files():
    """A limit of 256 open files for this process, which has some already."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def stranger(port, count, part):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MORE_FILES + STRANGER, str(port), str(count), part,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert await process.stdout.readline() == b"open\n"
    return process


async def end(process):
    process.kill()
    await process.wait()


@pytest.mark.parametrize(
    "part", ["", "GET / HTT", "POST /v1/rewards HTTP/1.1\\r\\nContent-Length: 9\\r\\n\\r\\n"]
)
def test_connections_of_a_stranger_keep_nobody_from_an_answer(
    agents, few_files, part, monkeypatch, caplog
):
    """Half a request, or none: each would take a descriptor for ever."""
    monkeypatch.setattr(http_listener, "_LIMITS_WHEN_FULL", (0.2, 0.2, 0.2))

    async def main():
        async with agents.gateway() as g:
            process = await stranger(g.gateway.port, 1100, part)
            try:
                async with agents.client(g, timeout=60) as client:
                    messages = [{"role": "user", "content": "hello"}]
                    got = await client.chat.completions.create(model="m", messages=messages)
            finally:
                await end(process)
            return got.choices[0].message.content

    assert agents.run(main(), 90) == "hello"
    assert len(caplog.messages) <= 2


def test_a_burst_beyond_the_limit_of_open_files_is_answered(agents, few_files, monkeypatch, caplog):
    """Only idle connections are closed, and no server counts as lost, on a busy machine too."""
    monkeypatch.setattr(http_listener, "_LIMITS_WHEN_FULL", (math.inf, math.inf, 0.2))
    caplog.set_level(logging.WARNING)

    async def main():
        async with agents.gateway(limits=Timeouts(hang_seconds=60.0)) as g:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", MORE_FILES + BURST, g.gateway.base_url(), g.session.key,
                "500", stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            return (await process.communicate())[0].decode().strip()

    assert agents.run(main(), 300) == "{'200': 500}"
    assert len(caplog.messages) <= 2


def test_half_a_request_is_closed_after_its_time(agents, monkeypatch):
    """Also where there is room, and half a handshake too; a request under way is not."""
    monkeypatch.setattr(http_listener, "_LIMITS", (0.3, 0.3, float("inf")))

    async def main():
        async with agents.gateway() as g:
            parts = (
                b"",
                b"POST /v1/chat",
                b"POST /v1/rewards HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
            )
            streams = [await asyncio.open_connection("127.0.0.1", g.gateway.port) for _ in parts]
            for (_, writer), part in zip(streams, parts, strict=True):
                writer.write(part)
            for reader, writer in streams:
                await reader.read()  # to its end; of half a head the end is an error 400
                writer.close()
            g.engine.step_seconds = 0.2  # its answer takes longer than the limits
            async with agents.client(g) as client:
                messages = [{"role": "user", "content": "hello"}]
                got = await client.chat.completions.create(model="m", messages=messages)
                return got.choices[0].message.content

    assert agents.run(main()) == "hello"


def test_half_a_handshake_is_closed_after_its_time(agents, monkeypatch, tmp_path):
    monkeypatch.setattr(http_listener, "_HANDSHAKE_SECONDS", 0.3)
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        own := tmp_path / "own.pem"
    )

    async def main():
        async with agents.fleet(agents.engine()) as (fleet, _):
            gateway = Gateway(fleet, agents.tokenizer(), tls=Tls(str(own), str(own)))
            await gateway.start()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                assert await reader.read() == b""
                writer.close()
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", gateway.port, ssl=context
                )
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                assert b"200 OK" in await reader.read()
                writer.close()
            finally:
                await gateway.stop()

    agents.run(main())
