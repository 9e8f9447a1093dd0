"""A process that computes rewards: `python -m rlx.rewards.reward_worker N`, by `reward_pool` alone.

    in    pickles: (path of modules, reward's name) first, then (reward's name, pickled calls)
    out   a line of JSON each: {"ready": true}, then for each call of a task
          {"value", "start", "end"}, or {"error", "start", "end"}, with which the task ends

What it says is data alone: its reader may not trust it.
"""

import json
import os
import pickle
import sys
import time
import traceback
from typing import Any

from rlx.rewards import rewards, symbolic
from rlx.rewards.reward_pool import problem
from rlx.rewards.worker_process import own_end

_RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")  # row keys that would clash
_MOST = 8000  # characters of a traceback


def main() -> None:
    """Computes until the other end closes."""
    with own_end() as end, end.makefile("rb") as stream:

        def say(**message: Any) -> None:
            end.sendall(json.dumps(message).encode() + b"\n")

        try:
            path, name = pickle.load(stream)
            sys.path[:] = [p for p in path if p not in sys.path] + sys.path
            _prepare(name)
            say(ready=True, pid=os.getpid())
            while True:
                _compute(say, *pickle.load(stream))
        except (EOFError, ConnectionError):
            pass


def _prepare(name: str) -> None:
    """Import the reward function and what it is slow to load."""
    try:
        rewards.resolve(name)
        if rewards.REWARDS.get(name) in (rewards.math, rewards.arithmetic):
            symbolic.warm()
    except Exception:
        pass  # reported, with its traceback, by the first task


def _compute(say: Any, name: str, pickled: bytes) -> None:
    """Say the reward of each call, until the first that fails."""
    start = time.monotonic_ns()
    try:
        function = rewards.resolve(name)
        for call in pickle.loads(pickled):
            row = {key: value for key, value in call.row.items() if key not in _RESERVED}
            value = function(
                call.prompt, call.completion, call.prompt_ids, call.completion_ids, **row
            )
            if error := problem(value):
                say(error=f"it returned {error}", start=start, end=time.monotonic_ns())
                return
            say(value=float(value), start=start, end=time.monotonic_ns())
            start = time.monotonic_ns()
    except ConnectionError:  # nobody waits for it
        raise
    except BaseException:  # SystemExit too: the worker reports and lives
        say(error=traceback.format_exc()[-_MOST:], start=start, end=time.monotonic_ns())


if __name__ == "__main__":
    main()
