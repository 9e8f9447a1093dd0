"""An MCP server by the package's own class: `mcp_server.py [--http=PORT] [TOOL …]`, else stdio."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools of a test")
calls = 0


@server.tool(name="add-all")
def add_all(numbers: list[float], factor: int = 1, label: str = "", exact: bool = True) -> str:
    """Adds numbers."""
    return f"{label}{factor * sum(numbers):g} {exact}"


@server.tool()
def count() -> int:
    """Counts the calls of this process."""
    global calls
    calls += 1
    return calls


@server.tool()
def process() -> int:
    """Tells the process id."""
    return os.getpid()


@server.tool()
def picture() -> Image:
    """Shows a picture."""
    return Image(data=b"\x89PNG\r\n", format="png")


@server.tool()
def refuse(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Blocks the whole server."""
    time.sleep(1000)
    return "never"


@server.tool()
def calculator(expression: str) -> str:
    """Computes."""
    return str(eval(expression, {"__builtins__": {}}))


if __name__ == "__main__":
    _, *kept = sys.argv
    if kept and kept[0].startswith("--http="):
        server.run("streamable-http", host="127.0.0.1", port=int(kept[0].partition("=")[2]))
    for tool in asyncio.run(server.list_tools()) if kept else ():
        if tool.name not in kept:
            server.remove_tool(tool.name)
    server.run()
