"""The process that computes rewards for `reward_pool`: `python -m rlx.rewards.reward_worker N`.

    in    pickles: (sys.path, rewards' names) first, then (a name, pickled calls of one group)
    out   a line of JSON each: {"pid", "functions": {name: [kind, place]}} or {"pid", "error"}, then
          for each call of a task {"index", "value", "start", "end"}, or {"index", "error", …}, with
          which the task ends

It sends nothing but JSON, because the pool must not unpickle what untrusted code may have written.
"""

import asyncio
import inspect
import json
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlx.base import UserError, place
from rlx.cli import user_code
from rlx.rewards import rewards, symbolic
from rlx.rewards.reward_pool import EACH, GROUP, TOGETHER, RewardCall, problem
from rlx.workers.worker_process import inherited_socket, search_first

_RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")  # of a call; no row's keys
_MOST = 8000  # characters of a traceback
_Send = Callable[[Mapping[str, Any]], None]
_Calls = Sequence[RewardCall]


def main() -> None:
    """Compute rewards until the pool closes its end."""
    with inherited_socket() as pool, pool.makefile("rb") as stream, asyncio.Runner() as runner:

        def send(message: Mapping[str, Any]) -> None:
            pool.sendall(json.dumps(message).encode() + b"\n")

        try:
            path, names = pickle.load(stream)
            search_first(path)
            functions = _load(names, send)
            while True:
                name, calls = pickle.load(stream)
                _compute(send, runner, functions[name], pickle.loads(calls))
        except (EOFError, ConnectionError):
            pass


def _load(names: Sequence[str], send: _Send) -> dict[str, Callable]:
    """Import the reward functions, and math-verify where answers need it; send what they are."""
    try:
        functions = {name: rewards.resolve(name) for name in names}
        kinds = {name: (_kind(f), place(f)) for name, f in functions.items()}
        if rewards.math in functions.values():
            symbolic.warm()
    except BaseException as error:  # SystemExit of a module, too
        said = str(error) if isinstance(error, UserError) else user_code.where(error)
        send({"pid": os.getpid(), "error": said})
        return {}
    send({"pid": os.getpid(), "functions": kinds})
    return functions


def _kind(function: Callable) -> str:
    """Return which calls a function takes, by its signature."""
    if "completions" in inspect.signature(function).parameters:
        return GROUP
    return TOGETHER if inspect.iscoroutinefunction(function) else EACH


def _compute(send: _Send, runner: asyncio.Runner, function: Callable, calls: _Calls) -> None:
    """Send the reward of each call, up to the first that fails."""
    kind = _kind(function)
    if kind == GROUP:
        messages = _of_group(runner, function, calls)
    elif kind == TOGETHER:
        return runner.run(_together(send, function, [_bound(function, call) for call in calls]))
    else:
        jobs = (_bound(function, call) for call in calls)
        messages = (
            _message(function, index, time.monotonic_ns(), _outcome(job))
            for index, job in enumerate(jobs)
        )
    for message in messages:
        send(message)
        if "error" in message:
            return None


async def _together(send: _Send, function: Callable, jobs: Sequence[Callable]) -> None:
    """Send the rewards of an async function, each when it is there."""

    async def one(index: int, job: Callable) -> dict[str, Any]:
        start = time.monotonic_ns()
        try:
            found = await job()
        except BaseException as error:
            found = error
        return _message(function, index, start, found)

    tasks = [asyncio.ensure_future(one(index, job)) for index, job in enumerate(jobs)]
    for done in asyncio.as_completed(tasks):
        send(message := await done)
        if "error" in message:
            for task in tasks:  # they end when the loop runs again
                task.cancel()
            return


def _of_group(runner: asyncio.Runner, function: Callable, calls: _Calls) -> Iterator[dict]:
    start = time.monotonic_ns()
    columns = {key: [call.row[key] for call in calls] for key in calls[0].row}
    for plural, name in zip(rewards.OF_GROUP, _RESERVED, strict=True):
        columns[plural] = [getattr(call, name) for call in calls]
    found = _outcome(partial(function, **_accepted(function, columns)))
    if inspect.iscoroutine(found):
        found = _outcome(partial(runner.run, found))
    values = found if isinstance(found, BaseException) else _outcome(partial(list, found))
    if isinstance(values, list) and len(values) != len(calls):
        found = ValueError(f"{len(values)} rewards were returned for {len(calls)} completions")
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield _message(function, index, start, value)
        return
    yield _message(function, None, start, found)


def _outcome(job: Callable) -> Any:
    """Return what `job` returns, or what it raises; SystemExit too: the worker lives on."""
    try:
        return job()
    except BaseException as error:
        return error


def _bound(function: Callable, call: RewardCall) -> Callable:
    """Return the function with the arguments of one completion."""
    row = {key: value for key, value in call.row.items() if key not in _RESERVED}
    given = (call.prompt, call.completion, call.prompt_ids, call.completion_ids)
    return partial(function, *given, **_accepted(function, row))


def _accepted(function: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the named arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _message(function: Callable, index: int | None, start: int, found: Any) -> dict[str, Any]:
    """Return the message of a reward, or of why it is none; `index` None: of the whole group."""
    message = {"index": index, "start": start, "end": time.monotonic_ns(), "traceback": ""}
    if isinstance(found, BaseException):
        message["traceback"] = "".join(traceback.format_exception(found))[-_MOST:]
        return {**message, "error": user_code.where(found, function, 4)}
    if error := problem(found):
        return {**message, "error": f"it returned {error} {place(function)}"}
    return {**message, "value": float(found)}


if __name__ == "__main__":
    main()
