"""Compute rewards for `reward_pool`: `python -m rlx.rewards.reward_worker N`.

    first       {"names": [reward, …]}; ready: [process id, {name: [kind, place]}]
    a job       {"name", "calls": base64 of pickled calls of one group}
    progress    [index, value] of each call
    its end     {} or {"index", "error", "traceback"}

It sends nothing but JSON, because the pool must not unpickle what untrusted code may have written.
"""

import asyncio
import base64
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rlx.base import place
from rlx.cli import user_code
from rlx.rewards import rewards, symbolic
from rlx.rewards.reward_pool import EACH, GROUP, TOGETHER, RewardCall, problem
from rlx.workers.worker_process import WorkerEnd

_RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")  # of a call; no row's keys
_MOST = 8000  # characters of a traceback
_Calls = Sequence[RewardCall]
_Report = Callable[[int | None, Any], Mapping[str, Any]]  # as `_report`


def main() -> None:
    """Compute rewards until the pool closes its end."""
    with suppress(ConnectionError), asyncio.Runner() as runner:
        end = WorkerEnd()
        functions = _load(end)
        while job := end.receive():
            function, calls = functions[job["name"]], pickle.loads(base64.b64decode(job["calls"]))
            report = partial(_report, end, job["id"], function)
            end.send(id=job["id"], **_compute(report, runner, function, calls))


def _load(end: WorkerEnd) -> dict[str, Callable]:
    """Import the reward functions, and math-verify where answers need it; send what they are."""
    try:
        functions = {name: rewards.resolve(name) for name in end.first["names"]}
        kinds = {name: (_kind(f), place(f)) for name, f in functions.items()}
        if rewards.math in functions.values():
            symbolic.warm()
    except BaseException as error:  # SystemExit of a module, too
        end.send(id="", wrong=user_code.where(error))
        raise SystemExit from None
    end.send(id="", ready=(os.getpid(), kinds))
    return functions


def _report(end: WorkerEnd, job: str, function: Callable, index: int | None, found: Any) -> dict:
    """Send a reward; return the last message of a job with one that failed, of others {}.

    Args:
      index: of the completion; None: the whole group. found: its reward, or what was raised.
    """
    trace = ""
    if isinstance(found, BaseException):
        error = user_code.where(found, function, 4)
        trace = "".join(traceback.format_exception(found))[-_MOST:]
    elif wrong := problem(found):
        error = f"it returned {wrong} {place(function)}"
    else:
        end.send(id=job, progress=(index, float(found)))
        return {}
    return {"index": index, "error": error, "traceback": trace}


def _kind(function: Callable) -> str:
    """Return which calls a function takes, by its signature."""
    if "completions" in inspect.signature(function).parameters:
        return GROUP
    return TOGETHER if inspect.iscoroutinefunction(function) else EACH


def _compute(
    report: _Report, runner: asyncio.Runner, function: Callable, calls: _Calls
) -> Mapping[str, Any]:
    """Report the reward of each call, up to the first that fails; return the last message."""
    kind = _kind(function)
    found: Iterable[tuple[int | None, Any]]
    if kind == TOGETHER:
        return runner.run(_together(report, [_bound(function, call) for call in calls]))
    if kind == GROUP:
        found = _of_group(runner, function, calls)
    else:
        found = ((i, _outcome(_bound(function, call))) for i, call in enumerate(calls))
    return next(filter(None, (report(index, value) for index, value in found)), {})


async def _together(report: _Report, jobs: Sequence[Callable]) -> Mapping[str, Any]:
    """Report the rewards of an async function, each when it is there."""

    async def one(index: int, job: Callable) -> tuple[int, Any]:
        try:
            return index, await job()
        except BaseException as error:
            return index, error

    tasks = [asyncio.ensure_future(one(index, job)) for index, job in enumerate(jobs)]
    for done in asyncio.as_completed(tasks):
        if failed := report(*await done):
            for task in tasks:  # they end when the loop runs again
                task.cancel()
            return failed
    return {}


def _of_group(
    runner: asyncio.Runner, function: Callable, calls: _Calls
) -> Iterable[tuple[int | None, Any]]:
    """Return the rewards of a function that takes the group, or what it raised, for no index."""
    columns = {key: [call.row[key] for call in calls] for key in calls[0].row}
    for plural, name in zip(rewards.OF_GROUP, _RESERVED, strict=True):
        columns[plural] = [getattr(call, name) for call in calls]
    found = _outcome(partial(function, **_accepted(function, columns)))
    if inspect.iscoroutine(found):
        found = _outcome(partial(runner.run, found))
    values = found if isinstance(found, BaseException) else _outcome(partial(list, found))
    if not isinstance(values, list):
        return [(None, found)]
    if len(values) == len(calls):
        return enumerate(values)
    wrong = f"{len(values)} rewards were returned for {len(calls)} completions"
    return [(None, ValueError(wrong))]


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


if __name__ == "__main__":
    main()
