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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from rlx.base import place
from rlx.cli import user_code
from rlx.environments import reasoning_tasks
from rlx.rewards import rewards, symbolic
from rlx.rewards.reward_pool import EACH, GROUP, TOGETHER, RewardCall, problem
from rlx.workers.worker_process import WorkerEnd

_RESERVED = ("prompt", "completion", "prompt_ids", "completion_ids")  # of a call; no row's keys
_MOST = 8000  # characters of a traceback
_Calls = Sequence[RewardCall]
_Outcomes = Iterator[tuple[int | None, Any]]  # index, None: the group; its reward or exception


def main() -> None:
    """Compute rewards until the pool closes its end."""
    with suppress(ConnectionError), asyncio.Runner() as runner:
        end = WorkerEnd()
        functions = _load(end)
        while job := end.receive():
            function, calls = functions[job["name"]], pickle.loads(base64.b64decode(job["calls"]))
            failure: dict[str, Any] = {}
            with closing(_outcomes(runner, function, calls)) as outcomes:
                for index, outcome in outcomes:
                    if failure := _failure(function, index, outcome):
                        break
                    end.send(id=job["id"], progress=(index, float(outcome)))
            end.send(id=job["id"], **failure)


def _load(end: WorkerEnd) -> dict[str, Callable]:
    """Import the reward functions, and math-verify where answers need it; send what they are."""
    try:
        functions = {name: rewards.resolve(name) for name in end.first["names"]}
        kinds = {name: (_kind(f), place(f)) for name, f in functions.items()}
        if rewards.math in functions.values():
            symbolic.warm()
        if rewards.reasoning_gym in functions.values():
            reasoning_tasks.tasks()  # imports the package, in seconds
    except BaseException as error:  # SystemExit of a module, too
        end.send(id="", wrong=user_code.where(error))
        raise SystemExit from None
    end.send(id="", ready=(os.getpid(), kinds))
    return functions


def _failure(function: Callable, index: int | None, outcome: Any) -> dict[str, Any]:
    """Return the last message of a job whose `outcome` is no reward, {} for a reward."""
    trace = ""
    if isinstance(outcome, BaseException):
        error = user_code.where(outcome, function, 4)
        trace = "".join(traceback.format_exception(outcome))[-_MOST:]
    elif wrong := problem(outcome):
        error = f"it returned {wrong} {place(function)}"
    else:
        return {}
    return {"index": index, "error": error, "traceback": trace}


def _kind(function: Callable) -> str:
    if "completions" in inspect.signature(function).parameters:
        return GROUP
    return TOGETHER if inspect.iscoroutinefunction(function) else EACH


def _outcomes(runner: asyncio.Runner, function: Callable, calls: _Calls) -> Any:
    """Return a generator of the outcomes of a group, each as soon as it is known."""
    if (kind := _kind(function)) == GROUP:
        return _of_group(runner, function, calls)
    jobs = [_bound(function, call) for call in calls]
    in_turn = ((index, _outcome(job)) for index, job in enumerate(jobs))
    return _together(runner, jobs) if kind == TOGETHER else in_turn


def _together(runner: asyncio.Runner, jobs: Sequence[Callable]) -> _Outcomes:
    async def one(index: int, job: Callable) -> tuple[int, Any]:
        try:
            return index, await job()
        except BaseException as error:
            return index, error

    pending = {runner.get_loop().create_task(one(*each)) for each in enumerate(jobs)}
    try:
        while pending:
            wait = asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done, pending = runner.run(wait)
            yield from (task.result() for task in done)
    finally:
        for task in pending:  # they end when the loop runs again
            task.cancel()


def _of_group(runner: asyncio.Runner, function: Callable, calls: _Calls) -> _Outcomes:
    columns = {key: [call.row[key] for call in calls] for key in calls[0].row}
    for plural, name in zip(rewards.OF_GROUP, _RESERVED, strict=True):
        columns[plural] = [getattr(call, name) for call in calls]
    outcome = _outcome(partial(function, **_accepted_arguments(function, columns)))
    if inspect.iscoroutine(outcome):
        outcome = _outcome(partial(runner.run, outcome))
    if isinstance(outcome, Iterable):
        outcome = _outcome(partial(list, outcome))
    if isinstance(outcome, list) and len(outcome) == len(calls):
        yield from enumerate(outcome)
    elif isinstance(outcome, BaseException):
        yield None, outcome
    else:
        got = f"{len(outcome)} rewards were" if isinstance(outcome, list) else f"{outcome!r} was"
        wanted = f"{len(calls)} completions; return a list with one number for each"
        yield None, ValueError(f"{got} returned for {wanted}")


def _outcome(job: Callable) -> Any:
    """Return what `job` returns, or what it raises; SystemExit too: the worker lives on."""
    try:
        return job()
    except BaseException as error:
        return error


def _bound(function: Callable, call: RewardCall) -> Callable:
    row = {key: value for key, value in call.row.items() if key not in _RESERVED}
    args = (call.prompt, call.completion, call.prompt_ids, call.completion_ids)
    return partial(function, *args, **_accepted_arguments(function, row))


def _accepted_arguments(function: Callable, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return those of the named arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


if __name__ == "__main__":
    main()
