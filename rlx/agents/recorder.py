"""Starts the recording proxy, gives each run an address at it, and reads what it noted."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

from rlx.agents.exchange import Call
from rlx.agents.recording_proxy import HOST
from rlx.base import UserError, install

_START_SECONDS = 60.0


class Recorder:
    """A context manager: the proxy lives inside.

    Args:
      base_url: of the server, `http://host:port/v1`.
      api_key: the real one; agents get `api_key` in its place and never see it.
      model: put in every request of an agent; empty: the agent's own stays.
    """

    def __init__(self, base_url: str, api_key: str, model: str = ""):
        parts = urllib.parse.urlsplit(base_url)
        self._path = parts.path.rstrip("/")
        self.api_key = f"rlx-{secrets.token_hex(12)}"
        self._settings = {
            "origin": f"{parts.scheme}://{parts.netloc}",
            "api_key": api_key,
            "secret": self.api_key,
            "model": model,
        }
        self._done: list[Call] = []

    def __enter__(self) -> "Recorder":
        _spare_loopback()
        environment = dict(os.environ)
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (root, environment.get("PYTHONPATH", "")))
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlx.agents.recording_proxy"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,  # Ctrl-C is for us: the report still asks it
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(self._settings) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.strip():
            self.__exit__()
            raise UserError(
                f"the recording proxy did not start (its words are above); {install('agents')}"
            )
        self._root = f"http://{HOST}:{int(line)}/{self.api_key}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def base_url(self, run: int) -> str:
        """What a run gets as `base_url`; its calls are known by it."""
        return f"{self._root}/{run}{self._path}"

    def calls(self) -> tuple[list[Call], list[Call]]:
        """(finished, unanswered) calls until now; an answer that an agent has is among the first.

        `path` is what follows the base_url.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self._root}/calls?since={len(self._done)}", timeout=30) as answer:
            found = json.load(answer)
        self._done += [self._call(fields) for fields in found["done"]]
        open_ = [self._call(fields) for fields in found["open"]]
        # Some agents leave a stream at its stop reason: that call is as good as finished.
        stopped = [call for call in open_ if call.stop_reason]
        return [*self._done, *stopped], [call for call in open_ if not call.stop_reason]

    def _call(self, fields: dict) -> Call:
        return Call(**{**fields, "path": fields["path"].removeprefix(self._path)})


def _spare_loopback() -> None:
    """Keeps clients that follow HTTP_PROXY from asking it for the way to this machine."""
    if any(os.environ.get(name) for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")):
        for name in ("NO_PROXY", "no_proxy"):
            known = os.environ.get(name, "")
            if HOST not in known.split(","):
                os.environ[name] = ",".join(filter(None, (known, HOST)))
