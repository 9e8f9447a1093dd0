"""Casts: the tensors of one publish go to all servers at once, by a group of torch.distributed.

    Fleet ─▶ Sender ─▶ process (rlx/engines/vllm/vllm_cast.py) ─▶ group ─▶ each server's worker
      └── Publish with a PublishCast: the file's head, place in the group ─▶ each server

A server stages what comes while it decodes. It takes part once it has checked names and shapes. The
process begins without servers that are late. A cast that breaks changes nothing; the file follows.
"""

import asyncio
import json
import math
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from rlx.base import UserError
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.tls import is_loopback
from rlx.system.host_port import split_address
from rlx.system.threads import in_thread

BACKENDS = ("nccl", "gloo")  # between GPUs, between CPUs
BUCKET = 1 << 30  # bytes; larger only where one tensor is
READY_SECONDS = 10.0  # the sender waits for servers
PATIENCE_SECONDS = 30.0  # for one bucket
_START_SECONDS = 120.0  # of the process, which imports torch
_END_SECONDS = 2.0  # of a cast, after the servers' replies
_PROGRAM = (sys.executable, "-m", "rlx.engines.vllm.vllm_cast")
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # in its bucket, bytes
    end: int


Bucket = tuple[Entry, ...]


def buckets(head: bytes, limit: int = BUCKET) -> tuple[Bucket, ...]:
    """Cut the tensors of a safetensors file into buckets, in the file's order.

    `head` is the file up to its first tensor. ValueError if it does not describe a file of weights.
    """
    parts: list[list[Entry]] = []
    try:
        table = json.loads(head[8:])
        table.pop("__metadata__", None)
        for name, row in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            size = math.prod(row["shape"]) * _SIZES[row["dtype"]]
            start = parts[-1][-1].end if parts else 0
            if not parts or start + size > limit:
                parts.append([])
                start = 0
            shape = tuple(row["shape"])
            parts[-1].append(Entry(name, row["dtype"], shape, start, start + size))
        total = sum(bucket[-1].end for bucket in parts)
        if total != max((row["data_offsets"][1] for row in table.values()), default=0):
            raise ValueError("its tensors do not follow each other")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the head of the weights is damaged: {error!r}") from error
    return tuple(map(tuple, parts))


# A receiver's way through one cast.


@dataclass(frozen=True)
class Went:
    """The sender began, with the servers at these places."""

    places: tuple[int, ...]


@dataclass(frozen=True)
class Came:
    """The bucket with this number came; `good` if its sum is the sender's."""

    number: int
    good: bool


@dataclass(frozen=True)
class Broke:
    """Nothing more will come."""

    reason: str


@dataclass(frozen=True)
class CastProgress:
    """State of a receiver; `done` or `reason` is its end, and nothing leads out of it."""

    place: int
    count: int  # of buckets
    started: bool = False
    came: int = 0
    reason: str = ""  # why it failed

    @property
    def done(self) -> bool:
        return self.started and self.came == self.count and not self.reason


def after(state: CastProgress, event: Went | Came | Broke) -> CastProgress:
    """Return the state after `event`; what is out of order is a failure."""
    if state.done or state.reason:
        return state
    match event:
        case Went(places) if not state.started:
            if state.place in places:
                return replace(state, started=True)
            return replace(state, reason="the sender began without this server")
        case Came(number, good) if state.started and number == state.came:
            if good:
                return replace(state, came=number + 1)
            return replace(state, reason=f"bucket {number} was damaged")
        case Broke(reason):
            return replace(state, reason=f"{reason} after {state.came} of {state.count} buckets")
    return replace(state, reason=f"{event} came after {state.came} of {state.count} buckets")


# The trainer's side.


class Sender:
    """The process that sends; it is started by the first cast, and again after one that broke."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def offers(
        self, backend: str, path: str, addresses: Sequence[str]
    ) -> AsyncIterator[tuple[list[pb.PublishCast], Callable[[], Awaitable[None]]]]:
        """Cast the file at `path` while the block runs, if there are `addresses`.

        Yields a message for each server, none if the process has died; and a function that ends
        the cast early. UserError if `backend` cannot be used here.
        """
        reply, casts = None, list[pb.PublishCast]()
        try:
            try:
                casts = await self._begin(backend, path, addresses) if addresses else []
            except OSError as error:  # a name that does not resolve any more, for one
                self._say(f"no cast by {backend}: {error}; servers get the file")
            reply = asyncio.create_task(self._next_line(None)) if casts else None
            yield casts, self.end
            if reply:
                await asyncio.wait([reply], timeout=_END_SECONDS)
        finally:
            if addresses and not (reply and reply.done() and "sent" in reply.result()):
                await self.end()
                if reply:
                    await reply

    async def _begin(
        self, backend: str, path: str, addresses: Sequence[str]
    ) -> list[pb.PublishCast]:
        hosts = await asyncio.gather(*(in_thread(own_host, a) for a in addresses))
        host = next((h for h in hosts if not is_loopback(h)), hosts[0])
        if not self._process:
            self._process = await asyncio.create_subprocess_exec(
                *_PROGRAM, backend, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        job = {"path": path, "count": len(hosts), "host": host}
        assert self._process.stdin
        with suppress(ConnectionError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            await self._process.stdin.drain()
        reply = await self._next_line(_START_SECONDS)
        if "port" not in reply:
            if reason := reply.get("refusal"):
                raise UserError(f"fleet.publish={backend}: {reason}; set it to path or stream")
            raise OSError("its process has died, see above")
        with open(path, "rb") as file:
            head = head_of(file)
        options = {"backend": backend, "host": host, "port": reply["port"], "head": head}
        return [pb.PublishCast(**options, place=place) for place in range(len(hosts))]

    async def end(self) -> None:
        """End the process; servers that still receive notice it at once."""
        process, self._process = self._process, None
        if process:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _next_line(self, seconds: float | None) -> dict[str, Any]:
        """Return the process's next line; {} if there is none."""
        lines: Any = self._process and self._process.stdout
        try:
            async with asyncio.timeout(seconds):
                return json.loads(await lines.readline() or b"{}")
        except (TimeoutError, ValueError):
            return {}


def require(backend: str) -> None:
    """Raise UserError unless this environment can send by `backend`."""
    code = f"from rlx.engines.vllm import vllm_cast; print(vllm_cast.missing({backend!r}))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_START_SECONDS
        )
        lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
    except subprocess.TimeoutExpired:
        lines = ["torch was not imported in time"]
    if lines:
        raise UserError(f"fleet.publish={backend}: {lines[-1]}; set it to path or stream")


def head_of(file: BinaryIO) -> bytes:
    """Read a safetensors file up to its first tensor."""
    size = file.read(8)
    return size + file.read(int.from_bytes(size, "little"))


def own_host(address: str) -> str:
    """Return this machine's address on the way to host:port."""
    host, port = split_address(address)
    family, kind, *_, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]
