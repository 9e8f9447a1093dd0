"""Call the tools of MCP servers: commands over stdio and URLs, by the package `mcp`.

A command's process ends with its connection, and with this process.
"""

import asyncio
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlx.base import UserError, packages_of
from rlx.cli.command import say
from rlx.cli.user_code import words
from rlx.system.threads import run_alone

_START_SECONDS = 60.0  # npx and uvx may download the server first
_SILENT_SECONDS = 10.0  # a server that answered nothing for so long is started again
# Codes of JSON-RPC for a closed connection and an ended session; None: the transport failed.
_BROKEN = (-32000, -32600, None)
# A server that hangs does not notice that its input ended, so the kernel kills it (PDEATHSIG).
_RUN = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9,0,0,0);os.execvp(sys.argv[1],sys.argv[1:])"


class ToolError(Exception):
    """A failed call, with a message for the model."""


@dataclass(frozen=True)
class McpTool:
    """A tool of a server, as `rlx.rollout.tools` takes one."""

    name: str  # an identifier
    description: str
    parameters: Mapping[str, Any]
    called: str  # the server's name of the tool
    server: "McpServer"

    async def run(self, /, **arguments: Any) -> str:
        """Return the output as text; raise ToolError."""
        return await self.server.call(self.called, arguments)

    async def aclose(self) -> None:
        await self.server.aclose()


def tools(address: str) -> list[McpTool]:
    """Return the tools of a server, which must answer within a minute.

    The address is http:// or https://, or a command, where `$NAME` is a variable of the
    environment. UserError if there is no package `mcp`, no such program, no answer, or no tool.
    """

    async def listed() -> list[Any]:
        async with _connected(address) as client:
            page = await client.list_tools()
            items = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                items += page.tools
        return items

    server = McpServer(address)
    if not (items := run_alone(listed(), "tools of an MCP server", 2 * _START_SECONDS)):
        raise UserError("the server lists no tools; give another one")
    return [
        McpTool(
            re.sub(r"\W", "_", tool.name), tool.description or "",
            {"properties": {}, **tool.input_schema}, tool.name, server,
        )
        for tool in items
    ]  # fmt: skip


class McpServer:
    """A server at an address; all calls share one connection, which the first one makes."""

    def __init__(self, address: str):
        self._address, self._answered, self._reported = address, 0.0, ""
        self._client: asyncio.Future | None = None  # of the current connection
        self._ended = asyncio.Event()  # of the current connection; set to close it
        self._connections = set[asyncio.Task]()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool answers; raise ToolError if it fails or the server is gone."""
        now = asyncio.get_running_loop().time
        if self._client is None:
            self._client, self._ended = asyncio.get_running_loop().create_future(), asyncio.Event()
            task = asyncio.create_task(self._connect(self._client, self._ended))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        ready, ended = self._client, self._ended
        try:
            client = await asyncio.shield(ready)
            began = now()
            try:
                result = await client.call_tool(name, dict(arguments))
            except asyncio.CancelledError:  # the answer's time is over
                if self._answered < began <= now() - _SILENT_SECONDS:
                    self._end(ended, f"no answer for {now() - began:.0f} s")
                raise
        except Exception as error:
            if getattr(error, "code", None) in _BROKEN:
                self._end(ended, _reason(error))  # the next call makes another connection
            raise ToolError(_reason(error)) from None
        self._answered = now()
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise ToolError(text)
        return text

    async def aclose(self) -> None:
        """Close the connection, and with it a command's process; the next call makes another."""
        self._ended.set()
        self._client = None
        await asyncio.gather(*self._connections)

    async def _connect(self, ready: asyncio.Future, ended: asyncio.Event) -> None:
        """Hold a connection until `ended`."""
        try:  # in one task: anyio's scopes must be left by the task that entered them
            async with _connected(self._address) as client:
                ready.set_result(client)
                await ended.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # nobody may be waiting for it any more
            self._end(ended, _reason(error))

    def _end(self, ended: asyncio.Event, why: str) -> None:
        """Close a connection, and report why, unless that is done."""
        if self._ended is ended and not ended.is_set():
            ended.set()
            self._client = None
            if why != self._reported:
                self._reported = why
                say(f"MCP server {self._address}: {why}; the next call starts it again", sys.stderr)


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[Any]:
    """Connect to a server; raise UserError, with the last words of a command, if that fails."""
    with packages_of("mcp", "MCP tools need packages"):
        import mcp
    with tempfile.TemporaryFile("w+") as log:
        place: Any = address
        if not re.match("https?://", address):
            command = ["-ISc", _RUN, *_command(address)]
            server = mcp.StdioServerParameters(command=sys.executable, args=command)
            place = mcp.stdio_client(server, errlog=log)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(_START_SECONDS):
                    client = await stack.enter_async_context(mcp.Client(place))
            except Exception as error:
                log.seek(0)
                last = (log.read().strip() or _reason(error)).splitlines()[-1]
                raise UserError(f"the server does not answer: {last[:200]}") from error
            yield client


def _command(address: str) -> list[str]:
    """Return a command's words with the values of variables; UserError if one is missing."""
    command = [os.path.expandvars(word) for word in shlex.split(address)]
    for word in command:
        if unset := re.search(r"\$\{?(\w+)", word):
            raise UserError(f"the variable {unset[1]} is not set; set it, or leave out {unset[0]}")
    if not command or not shutil.which(command[0]):
        raise UserError(f"no program {' '.join(command[:1])!r}; write mcp:COMMAND or mcp:URL")
    return command


def _reason(error: BaseException) -> str:
    """Return why a call or a connection failed, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {_START_SECONDS:g} s"
    readable = isinstance(error, UserError) or hasattr(error, "code")  # an MCPError
    return " ".join(str(error).split())[:300] if readable else words(error)


def _text(block: Any) -> str:
    """Return a part of a result as text; of an image its data URI, of sound `[audio]`."""
    if block.type == "image":
        return f"data:{block.mime_type};base64,{block.data}"
    resource = getattr(block, "resource", None)
    return str(getattr(block, "text", None) or getattr(resource, "text", "") or f"[{block.type}]")
