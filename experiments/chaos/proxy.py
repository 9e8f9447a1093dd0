"""A TCP proxy whose connections can be delayed, cut, truncated or swallowed."""

import asyncio
import math
from contextlib import suppress

from rlx.system.threads import LoopThread


class Proxy:
    """Forwards connections to a port of this machine, in a thread of its own.

    Attributes:
      port: where it listens. delay: seconds added to each read. swallow: whether bytes are lost.
      left: bytes to forward until all connections are cut.
    """

    def __init__(self, target: int):
        self.delay, self.swallow, self.left = 0.0, False, math.inf
        self._target, self._writers = target, set[asyncio.StreamWriter]()
        self._loop = LoopThread("proxy")
        self._loop.start()
        self._server = self._loop.run(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon(self._cut)

    def close(self) -> None:
        """Stop listening, reset every connection and end the thread."""
        self._loop.call_soon(self._server.close)
        self.cut()
        self._loop.close()

    def _cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._pump(reader, to), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.delay)
                if not self.swallow:
                    writer.write(data[: int(min(self.left, len(data)))])
                    await writer.drain()
                self.left -= len(data)
                if self.left <= 0:
                    self._cut()
        self._writers.discard(writer)
        writer.close()
