"""Run agents in a process of their own: `python -m rlx.agents.worker N`, started by `workflow`.

    first       {"class", "kwargs", "report": seconds, "no_proxy": host}
    a job       {"data": JSON, "base_url", "api_key", "seconds": limit or null}
    its end     {"value", "parts" of RewardParts} or {"error", "traceback"}

`worker_pool` has the other messages. Runs are in the main thread, as libraries that use signals
need it (math-verify does). A run that blocks the loop holds up this process and not the gateway;
past a limit the process is killed.
"""

import asyncio
import contextlib
import importlib
import json
import os
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from rlx.agents import loading, returns
from rlx.base import UserError
from rlx.cli.user_code import frames, line, place_of, words
from rlx.system.threads import in_thread
from rlx.workers.worker_process import WorkerEnd

_PLACEHOLDER = "the-key-is-in-base_url"  # for clients that insist on one and were given none
_LOOK = 0.1  # seconds between two looks at the event loop


def http_clients() -> Callable[[], Any]:
    """Return a function that makes an agent's `http_client`; all share one connection pool.

    The clients, of the HTTP library that `openai` uses, ignore proxies; without `openai` they are
    None. Closing one, as `async with AsyncOpenAI(http_client=…)` does, keeps the pool open.
    """
    try:
        base = importlib.import_module("openai").DefaultAsyncHttpxClient
    except (ImportError, AttributeError):
        return lambda: None
    names = [c.__module__ for c in base.__mro__ if c.__name__ == "AsyncClient"]
    library: Any = importlib.import_module(names[0].partition(".")[0])
    limits = library.Limits(max_connections=None, max_keepalive_connections=256)
    # On other nodes $SSL_CERT_FILE holds the certificate of the trainer's gateway.
    verify = ssl.create_default_context() if os.environ.get("SSL_CERT_FILE") else True
    pool = library.AsyncHTTPTransport(limits=limits, trust_env=False, verify=verify)

    class SharedPool(library.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            return await pool.handle_async_request(request)

    return lambda: library.AsyncClient(
        transport=SharedPool(), trust_env=False, follow_redirects=True, timeout=None
    )


def watch_loop(late: Callable[[float, str], None]) -> None:
    """Watch this thread's loop; while blocked, call `late` elsewhere with seconds and line."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def watch() -> None:
        while not loop.is_closed():
            turned, start = threading.Event(), time.monotonic()
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(turned.set)
            while not turned.wait(_LOOK) and not loop.is_closed():
                late(time.monotonic() - start, place_of(frames(thread)))
            time.sleep(_LOOK)

    threading.Thread(target=watch, name="rlx-loop-watch", daemon=True).start()


def _bypass_proxy(host: str) -> None:
    """Exclude a host from HTTP_PROXY, if one is set."""
    names = (f"{kind}_proxy" for kind in ("http", "https", "all"))
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in names):
        for name in ("NO_PROXY", "no_proxy"):
            hosts = os.environ.get(name, "").split(",")
            os.environ[name] = ",".join(filter(None, [*hosts, *({host} - set(hosts))]))


class Worker:
    """The runs of one agent class in this process."""

    def __init__(self, end: WorkerEnd):
        self._end = end
        self._runs: dict[str, asyncio.Task] = {}

    async def serve(self) -> None:
        """Load the class, then start and cancel runs as asked, until the other end closes."""
        first = self._end.first
        _bypass_proxy(first["no_proxy"])
        try:
            cls = loading.load_class(first["class"])
            loading.instance(cls, first["kwargs"])
            loading.kind(cls)
        except UserError as error:
            return self._end.send(id="", wrong=str(error))
        self._new_client, self._patience = http_clients(), first["report"]
        self._end.send(id="", ready=True)
        watch_loop(self._late)
        while message := await in_thread(self._end.receive):
            if "cancel" not in message:
                run = asyncio.create_task(self._run(cls, first["kwargs"], message))
                self._runs[message["id"]] = run
            elif task := self._runs.get(message["cancel"]):
                task.cancel()
        for task in self._runs.values():
            task.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)

    async def _run(self, cls: type, kwargs: Mapping[str, Any], message: Mapping) -> None:
        number, limit = message["id"], asyncio.timeout(message["seconds"])
        try:
            data, names = json.loads(message["data"]), ("base_url", "api_key")
            options = {name: message[name] for name in names} | {"http_client": self._new_client()}
            async with limit:
                value = await loading.instance(cls, kwargs).run(data, **options)
            ids = list(value) if isinstance(value, Mapping) else []
            if value is None:  # reported over HTTP, or the gateway names the mistake
                self._end.send(id=number, value=None)
            elif wrong := returns.mistake(value, ids):
                self._end.send(id=number, error=wrong, traceback="")
            else:
                parts = dict(getattr(value, "parts", {}))
                self._end.send(id=number, value=returns.plain(value), parts=parts)
        except asyncio.CancelledError:
            self._end.send(id=number, error="it was cancelled", traceback="")
        except BaseException as error:  # SystemExit too: the process has other runs
            text, at = words(error, 1000), error
            if limit.expired() and error.__cause__:
                text, at = f"it did not end in {message['seconds']:g} s", error.__cause__
            text = f"{text} {line(at)}".rstrip()
            trace = "" if isinstance(error, UserError) else traceback.format_exc()[-8000:]
            self._end.send(id=number, error=text, traceback=trace)
        finally:
            del self._runs[number]

    def _late(self, seconds: float, at: str) -> None:
        if seconds > self._patience:
            self._end.send(blocked=at, seconds=seconds)


def main() -> None:
    """Serve the runs that come by the socket named on the command line."""
    end = WorkerEnd()
    os.environ.setdefault("OPENAI_API_KEY", _PLACEHOLDER)
    with contextlib.suppress(ConnectionError, KeyboardInterrupt):
        asyncio.run(Worker(end).serve())


if __name__ == "__main__":
    main()
