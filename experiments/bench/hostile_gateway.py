"""Send a gateway process requests that no client should send, and report how it copes.

    python -m experiments.bench.hostile_gateway --requests=10000

`python -m rlx.gateway` runs with a real engine (JAX, the embedded model). It gets malformed,
oversized, slow and cancelled requests among good ones. Keys are also tried on each other's ids. The
exit status is 1 if it died, answered a 5xx, refused a good request, or accepted another session's
id. It is also 1 if memory or file descriptors grew (tolerances: MEMORY_MB, DESCRIPTORS).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

MEMORY_MB = 48  # allowed growth of the process after the first tenth of the requests
DESCRIPTORS = 4
KEYS = [f"sk-{k}" for k in range(8)]
TALK = [{"role": "user", "content": "What is 3 + 4?"}]
GOOD = {  # route → body
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 4},
    "/v1/responses": {"input": "What is 1 + 1?", "max_output_tokens": 4},
    "/v1/messages": {"messages": TALK, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": TALK},
}
WRONG = [  # fields that replace those of a good request
    {"messages": 5, "input": 5}, {"temperature": "hot"}, {"max_tokens": -1}, {"max_tokens": 10**30},
    {"messages": [{"role": "nobody"}], "input": [{"type": "x"}]}, {"stop": [[]], "tools": [5]},
    {"messages": [[]] * 99, "input": [None]}, {"n": 10**9, "tools": "x"}, {"logit_bias": {"a": 1}},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}], "input": [{"content": {}}]},
    {"response_format": {"type": "json_schema"}, "text": {"format": 7}, "output_config": 7},
    {"tools": [{"type": "function", "function": {"name": "f"}, "name": "f"}], "tool_choice": "x"},
    {"previous_response_id": "resp_1"}, {"top_logprobs": 99}, {"\ud800": 1}, {"seed": 2**80},
]  # fmt: skip
KINDS = {  # kind → weight
    "good": 20, "wrong": 30, "garbage": 15, "no http": 8, "slow": 8, "cancelled": 12, "stranger": 8,
    "large": 1, "huge": 0.1,
}  # fmt: skip
GARBAGE = [
    b"", b"{", b"[" * 50_000, b'{"a": NaN}', b"\xff\xfe", b"null", b'"x"',
    b'{"messages": "' + b"\xf0" * 99, b'{"stream": true, "messages": [{}]}',
]  # fmt: skip
NO_HTTP = [
    b"\x16\x03\x01\r\n\r\n", b"G<T / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    b"POST /v1/responses HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]  # fmt: skip


class Client:
    """Sends raw requests to one port; `statuses` counts (kind, status), with 0 for no answer."""

    def __init__(self, port: int):
        self.port, self.statuses, self.ids = port, Counter(), {}

    async def send(self, data: bytes, read: bool = True, hold: float = 0.0) -> tuple[int, bytes]:
        """Return (status, body) of the answer on a new connection; (0, b"") if there is none."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(hold)
            if not read:
                return 0, b""
            answer = await asyncio.wait_for(reader.read(), 60)
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split()[1]) if head else 0, body
        except ConnectionError:
            return 0, b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    @staticmethod
    def http(path: str, body: bytes, key: str, method: str = "POST", length: int = -1) -> bytes:
        """Return the answer to a request that closes its connection."""
        size = len(body) if length < 0 else length
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nConnection: close\r\n"
        return f"{head}Content-Length: {size}\r\n\r\n".encode() + body

    async def one(self, draw: random.Random) -> None:
        """Send one request of a random kind."""
        path, key = draw.choice(list(GOOD)), draw.choice(KEYS)
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        body, hold, read, length = json.dumps(GOOD[path]).encode(), 0.0, True, -1
        if kind == "wrong":
            body = json.dumps({**GOOD[path], **draw.choice(WRONG)}).encode()
        elif kind == "garbage":
            body = draw.choice([*GARBAGE, draw.randbytes(99)])
        elif kind == "slow":  # the rest of the body is never sent
            hold, read, length = draw.uniform(0, 0.5), False, len(body) + 50
        elif kind == "cancelled":
            hold, read = draw.uniform(0, 0.05), False
            stream = path != "/v1/messages/count_tokens" and draw.random() < 0.5
            body = json.dumps({**GOOD[path], **({"stream": True} if stream else {})}).encode()
        elif kind == "stranger":
            other = draw.choice([self.ids.get(draw.choice(KEYS), "x"), "x" * 5000, "", "é"])
            path, key = (f"/{other}{path}", key) if other.isascii() and other else (path, other)
        elif kind in ("large", "huge"):
            words = "lorem ipsum " * ((17 << 20 if kind == "huge" else 1 << 20) // 12)
            field = "input" if "responses" in path else "messages"
            value = words if field == "input" else [{"role": "user", "content": words}]
            body = json.dumps({**GOOD[path], field: value}).encode()
        data = self.http(path, body, key, length=length)
        data = draw.choice(NO_HTTP) if kind == "no http" else data
        status, answer = await self.send(data, read, hold)
        self.statuses[kind, status] += 1
        if kind == "good" and status == 200 and "count" not in path:
            self.ids[key] = json.loads(answer)["id"]

    async def cross(self) -> list[str]:
        """Try each session's key on another session's ids."""
        for key in KEYS:
            body = json.dumps(GOOD["/v1/responses"]).encode()
            status, answer = await self.send(self.http("/v1/responses", body, key))
            assert status == 200, (status, answer)
            self.ids[key] = json.loads(answer)["id"]
        wrong = [] if len(set(self.ids.values())) == len(KEYS) else ["two sessions share an id"]
        for key in KEYS:
            for own, other in self.ids.items():
                body = {**GOOD["/v1/responses"], "previous_response_id": other}
                tries = (
                    (400, "/v1/responses", json.dumps(body).encode(), "POST", key),
                    (404, f"/v1/responses/{other}", b"", "GET", key),
                    (401, f"/{other}/v1/models", b"", "GET", key),
                    (401, "/v1/models", b"", "GET", other),
                )
                for want, path, body, method, asked in tries:
                    status, _ = await self.send(self.http(path, body, asked, method))
                    if status != want:
                        wrong.append(f"{key} at {path} of {own}: {status}, not {want}")
        return wrong


def held(pid: int) -> tuple[float, int]:
    """Return (MB of resident memory, open file descriptors) of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


async def attack(port: int, pid: int, requests: int, at_once: int, seed: int) -> dict:
    """Send the requests; return the counts and, under `wrong`, each violation."""
    client, draw = Client(port), random.Random(seed)
    wrong = await client.cross()
    waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    for _, writer in waiting:  # clients that begin a request and send nothing more
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    numbers = iter(range(requests))

    async def several(until: int) -> None:
        for number in numbers:
            await client.one(draw)
            if number >= until:
                return

    before = (0.0, 0)
    for until in (requests // 10, requests):
        await asyncio.gather(*(several(until) for _ in range(at_once)))
        await asyncio.sleep(1.0)
        before = held(pid) if until < requests else before
    for _, writer in waiting:
        writer.close()
    wrong += await client.cross()
    await asyncio.sleep(1.0)
    after = held(pid)
    grown, more = after[0] - before[0], after[1] - before[1]
    wrong += [f"{n} answers {s} to {k}" for (k, s), n in client.statuses.items() if s >= 500]
    wrong += [
        f"{n} answers {s} to good requests"
        for (k, s), n in client.statuses.items()
        if k == "good" and s != 200
    ]
    if grown > MEMORY_MB:
        wrong.append(f"memory grew by {grown:.1f} MB")
    if more > DESCRIPTORS:
        wrong.append(f"{more} more file descriptors")
    return {
        "requests": requests,
        "statuses": {f"{kind} {s}": n for (kind, s), n in sorted(client.statuses.items())},
        "memory_mb": [round(before[0], 1), round(after[0], 1)],
        "descriptors": [before[1], after[1]],
        "wrong": wrong,
    }


async def run(requests: int, at_once: int = 32, seed: int = 0) -> dict:
    """Start a gateway, attack it, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(KEYS))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rlx.gateway", "--model=rlx:arithmetic", "--port=0",
            "--slots=16", "--max-model-len=64", f"--keys={keys}", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            said = json.loads(await process.stdout.readline())
            port = int(said["base_url"].rpartition(":")[2].partition("/")[0])
            found = await attack(port, said["pid"], requests, at_once, seed)
            if process.returncode is not None:
                found["wrong"].append(f"it ended with {process.returncode}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
        return found


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    found = asyncio.run(run(a.requests, a.at_once, a.seed))
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
