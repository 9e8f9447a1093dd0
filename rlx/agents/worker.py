"""A process that runs agents: `python -m rlx.agents.worker N`, by `workers.py` alone.

    in    a line of JSON each: {"class", "kwargs", "path", "report": seconds, "no_proxy": host}
          first, then
          {"id", "data", "base_url", "api_key", "seconds"} starts a run and {"cancel": id} stops one
    out   {"ready": true} | {"wrong": text}, then {"id", "value"} | {"id", "error", "traceback"};
          {"blocked": text, "seconds": s} while a run keeps the loop from turning

Runs are in the main thread, as libraries that use signals need it (math-verify does). A run that
blocks the loop holds up this process and not the gateway; past a limit the process is killed.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from rlx.agents import loading, returns
from rlx.agents.http_clients import HttpClients, spare
from rlx.agents.loop_watch import watch_loop
from rlx.base import UserError
from rlx.cli.user_code import line, words
from rlx.workers.worker_process import inherited_socket, search_first

_PLACEHOLDER = "the-key-is-in-base_url"  # for clients that insist on one and were given none


class Worker:
    """The runs of one agent class in this process."""

    def __init__(self, end: socket.socket):
        self._end = end
        self._write = threading.Lock()
        self._runs: dict[str, asyncio.Task] = {}

    def say(self, **message: Any) -> None:
        """Write one line, from any thread."""
        data = json.dumps(message).encode() + b"\n"
        with self._write:
            while data:
                try:
                    data = data[self._end.send(data) :]
                except BlockingIOError:
                    select.select([], [self._end], [])

    async def serve(self) -> None:
        """Load the class, then start and cancel runs as told, until the other end closes."""
        reader, _ = await asyncio.open_connection(sock=self._end, limit=1 << 30)
        first = json.loads(await reader.readline())
        search_first(first["path"])
        spare(first["no_proxy"])
        try:
            cls = loading.load_class(first["class"])
            loading.instance(cls, first["kwargs"])
            loading.kind(cls)
        except UserError as error:
            self.say(wrong=str(error))
            return
        self._clients, self._patience = HttpClients(), first["report"]
        self.say(ready=True)
        watch_loop(self._late)
        while read := await reader.readline():
            message = json.loads(read)
            if "cancel" in message:
                if task := self._runs.get(message["cancel"]):
                    task.cancel()
                continue
            task = asyncio.create_task(self._run(cls, first["kwargs"], message))
            self._runs[message["id"]] = task
            await asyncio.sleep(0)  # it begins: one cancelled before that would never be answered
        for task in self._runs.values():
            task.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        await self._clients.close()

    async def _run(self, cls: type, kwargs: Mapping[str, Any], message: Mapping) -> None:
        number, limit = message["id"], asyncio.timeout(message["seconds"])
        try:
            async with limit:
                value = await loading.instance(cls, kwargs).run(
                    message["data"], base_url=message["base_url"], api_key=message["api_key"],
                    http_client=self._clients.new(),
                )  # fmt: skip
            ids = list(value) if isinstance(value, Mapping) else []
            if value is None:  # told over HTTP, or a mistake that the gateway's side names
                self.say(id=number, value=None)
            elif wrong := returns.mistake(value, ids):
                self.say(id=number, error=wrong, traceback="")
            else:
                self.say(id=number, value=returns.plain(value))
        except asyncio.CancelledError:
            self.say(id=number, error="it was cancelled", traceback="")
        except BaseException as error:  # SystemExit too: the process has other runs
            text, at = words(error, 1000), error
            if limit.expired() and error.__cause__:
                text, at = f"it did not end in {message['seconds']:g} s", error.__cause__
            text = f"{text} {line(at)}".rstrip()
            self.say(id=number, error=text, traceback=traceback.format_exc()[-8000:])
        finally:
            del self._runs[number]

    def _late(self, seconds: float, at: str) -> None:
        """Report a blocked loop, again and again."""
        if seconds > self._patience:
            self.say(blocked=at, seconds=seconds)


def main() -> None:
    """Serve the runs that come by the socket named on the command line."""
    end = inherited_socket()
    os.environ.setdefault("OPENAI_API_KEY", _PLACEHOLDER)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(Worker(end).serve())


if __name__ == "__main__":
    main()
