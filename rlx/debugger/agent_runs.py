"""Runs of an agent, and what they gave: failures in groups, quantiles of seconds. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.cli.text import duration
from rlx.debugger.model_call import ModelCall, shorten
from rlx.doctor.findings import Finding

_MOST = 8  # kinds of failures that are shown
_LEVELS = {"p50": 0.5, "p95": 0.95, "max": 1.0}  # quantiles


@dataclass(slots=True)
class AgentRun:
    """One run, and how it ended.

    Attributes:
      number: of the run in the whole session; `index`: of its row in the data.
      reward: a number, or numbers by completion id; None where it failed.
      error: `KeyError: 'answer' (agent.py, line 14)`; "" where it did not fail.
    """

    number: int
    index: int
    row: Mapping[str, Any]
    seconds: float = 0.0
    reward: Any = None
    error: str = ""
    traceback: str = ""
    calls: list[ModelCall] = field(default_factory=list)


def latencies(runs: Sequence[AgentRun]) -> dict[str, dict[str, float]]:
    """Return quantiles of the seconds of runs that did not fail, and of answered calls."""
    values = {
        "run": [run.seconds for run in runs if not run.error],
        "call": [call.seconds for run in runs for call in run.calls if call.ok],
    }
    return {
        f"{kind}_seconds": {name: float(np.quantile(own, q)) for name, q in _LEVELS.items()}
        for kind, own in values.items()
        if own
    }


def findings(area: str, runs: Sequence[AgentRun], seconds: float) -> Iterator[Finding]:
    """Yield how many runs are well, kinds of failures and of refused calls, and latencies."""
    rewards = [run.reward for run in runs if not run.error]
    found = f"{len(rewards)} of {len(runs)} ok, in {duration(seconds)}"
    if rewards:
        each = [np.mean([*r.values()] if isinstance(r, Mapping) else r) for r in rewards]
        found += f", mean reward {np.mean(each):.3g}"
    yield Finding(area, "runs", "ok" if len(rewards) == len(runs) else "problem", found)
    for same in _alike([run for run in runs if run.error]):
        rows = sorted({run.index for run in same})
        text = f"{len(same)} × {same[0].error} (rows {', '.join(map(str, rows[:4]))})"
        remedy = f"look at one: --steps=1 --rows={rows[0]}"
        yield Finding(area, "failed", "problem", text, remedy)
    calls = [call for run in runs for call in run.calls]
    refused = [call for call in calls if not call.ok]
    for alike in _alike(refused):
        text = f"{len(alike)} × {alike[0].status or 'not answered'}: {alike[0].error}"
        yield Finding(area, "calls", "warning", text, "look at the server's log and its limits")
    if calls and not refused:
        yield Finding(area, "calls", "ok", f"{len(calls)} of {len(calls)} answered")
    for name, levels in latencies(runs).items() if len(runs) > 1 else ():
        text = ", ".join(f"{level} {duration(value)}" for level, value in levels.items())
        yield Finding(area, name.replace("_", " "), "ok", text)


def transcript(run: AgentRun, began: float) -> Iterator[str]:
    """Yield the calls of a run and its end, as lines.

    Args:
      began: seconds, monotonic.
    """
    for number, call in enumerate(run.calls, 1):
        times = f"at {duration(call.begin - began)} · took {duration(call.seconds)}"
        yield f"call {number}  {call.path}  {call.model}  {times} · {call.stop_reason or '–'}"
        end = ("answer", call.answer or "(empty)")
        if not call.ok:
            end = ("error", f"{call.status or 'no answer'}: {call.error}")
        for role, text in [*call.messages, end]:
            yield f"{role:>11}  " + text.strip().replace("\n", f"\n{'':13}")
    if run.error:
        yield "\n".join(filter(None, (run.error, run.traceback.rstrip())))
    else:
        yield f"returned {shorten(repr(run.reward))} after {duration(run.seconds)}"


def _alike(failed: Sequence[Any]) -> list[list[Any]]:
    """Return groups of the same exception, place and status, the largest first."""
    groups = defaultdict(list)
    for one in failed:
        kind, place = one.error.partition(":")[0], re.findall(r"\([^(]*, line \d+\)$", one.error)
        groups[getattr(one, "status", 0), re.sub(r"\d+", "#", kind), *place].append(one)
    return sorted(groups.values(), key=len, reverse=True)[:_MOST]
