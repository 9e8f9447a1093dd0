"""vLLM's own OpenAI endpoint on the engine that serves the fleet, for curl or the `openai` package.

On loopback alone, and only the routes in OPEN: vLLM's API key guards /v1 alone, and other routes
stop or change the engine. With a token, callers send it as their API key.
"""

import asyncio
import contextlib
import socket
from typing import Any

from rlx.base import UserError

OPEN = ("/v1/models", "/v1/completions", "/v1/chat/completions")
_HOST = "127.0.0.1"


def bind(port: int) -> socket.socket:
    """Return a socket bound to `port`, before a model loads; raises UserError if it is taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(
            f"cannot serve OpenAI's API on {_HOST}:{port}: {error}; choose another --openai-port"
        ) from None
    return listening


class Endpoint:
    """HTTP endpoint on a bound socket, on the running event loop.

    Args:
      llm: vLLM's AsyncLLM; its own requests and the fleet's share every batch.
    """

    def __init__(self, llm: Any, listening: socket.socket, token: str | None):
        self._llm, self._listening, self._token = llm, listening, token
        self._server: Any = None
        self._task: asyncio.Task | None = None

    async def start(self) -> None:
        """Begin to answer."""
        import uvicorn

        class _Server(uvicorn.Server):
            def capture_signals(self):  # rlx.serve handles them
                return contextlib.nullcontext()

        config = uvicorn.Config(await self._app(), log_level="warning", lifespan="off")
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._listening]))

    async def stop(self) -> None:
        """End its connections."""
        if self._task:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._listening.close()

    async def _app(self) -> Any:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        flags = ["--model", self._llm.model_config.model]
        flags += ["--api-key", self._token] if self._token else []
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        app.router.routes[:] = [
            route for route in app.router.routes if getattr(route, "path", "") in OPEN
        ]
        await init_app_state(self._llm, app.state, args, tasks)
        return app
