"""The process that computes rewards for `reward_pool`: `python -m rlx.rewards.reward_worker N`.

    in    pickles: (sys.path, reward's name) first, then (reward's name, pickled calls)
    out   a line of JSON each: {"pid"}, then for each call of a task
          {"value", "start", "end"}, or {"error", "start", "end"}, with which the task ends

It sends nothing but JSON, because the pool must not unpickle what untrusted code may have written.
"""

import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlx.rewards import rewards, symbolic
from rlx.rewards.reward_pool import problem
from rlx.rewards.worker_process import inherited_socket

_RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")  # row keys that would clash
_MOST = 8000  # characters of a traceback


def main() -> None:
    """Compute rewards until the pool closes its end."""
    with inherited_socket() as pool, pool.makefile("rb") as stream:

        def send(**message: Any) -> None:
            pool.sendall(json.dumps(message).encode() + b"\n")

        try:
            path, name = pickle.load(stream)
            sys.path[:] = [p for p in path if p not in sys.path] + sys.path
            _prepare(name)
            send(pid=os.getpid())
            while True:
                _compute(send, *pickle.load(stream))
        except (EOFError, ConnectionError):
            pass


def _prepare(name: str) -> None:
    """Import the reward function, and math-verify if it uses that."""
    try:
        rewards.resolve(name)
        if rewards.REWARDS.get(name) in (rewards.math, rewards.arithmetic):
            symbolic.warm()
    except Exception:
        pass  # reported, with its traceback, by the first task


def _compute(send: Callable[..., None], name: str, pickled: bytes) -> None:
    """Send the reward of each call, up to the first that fails."""
    start = time.monotonic_ns()
    try:
        function = rewards.resolve(name)
        for call in pickle.loads(pickled):
            row = {key: value for key, value in call.row.items() if key not in _RESERVED}
            value = function(
                call.prompt, call.completion, call.prompt_ids, call.completion_ids, **row
            )
            if error := problem(value):
                send(error=f"it returned {error}", start=start, end=time.monotonic_ns())
                return
            send(value=float(value), start=start, end=time.monotonic_ns())
            start = time.monotonic_ns()
    except ConnectionError:  # the pool has gone
        raise
    except BaseException:  # SystemExit too: the worker reports and lives
        send(error=traceback.format_exc()[-_MOST:], start=start, end=time.monotonic_ns())


if __name__ == "__main__":
    main()
