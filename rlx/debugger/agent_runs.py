"""Rows to run an agent on, and the results of its runs: grouped failures and latencies."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np

from rlx.agents.workflow import with_messages
from rlx.base import UserError
from rlx.cli.text import duration
from rlx.debugger.model_call import ModelCall, shorten
from rlx.doctor.findings import Finding
from rlx.rollout import data

SAMPLE = {"question": "What is 12 + 30? Answer with a number.", "answer": "42"}
Row = tuple[int, Mapping[str, Any]]  # index in the data, row as agents get it
_GENERATED = 4096  # rows of a config whose data is generated
_MOST = 8  # groups of failures that are shown
_LEVELS = {"p50": 0.5, "p95": 0.95, "max": 1.0}  # quantiles


def steps(steps: str, rows: Sequence[Row], batch: int, group: int) -> dict[str, list[Row]]:
    """Return the rows of the steps in --steps: `one`, and `many`, `batch` rows × `group` runs."""
    if steps not in ("1", "2", "1,2"):
        raise UserError(f"--steps={steps} is invalid; give 1, 2 or 1,2")
    if min(batch, group) < 1:
        raise UserError(f"--batch={batch} and --group={group} must be 1 or more")
    found = {"1": ("one", [rows[0]]), "2": ("many", [*islice(cycle(rows), batch)] * group)}
    return dict(found[step] for step in steps.split(","))


def load_rows(path: str, wanted: str = "", config: Any = None) -> list[Row]:
    """Return rows of a file, else of a config's training data, else a sample, with `messages`.

    Args:
      wanted: `7`, `7:20` or `7:`, as in --rows; "" for all.

    Raises:
      UserError: `wanted` is no range or empty, or the data cannot be read.
    """
    key, system, answer, rows = "question", "", "", [SAMPLE]
    names = [path] if path else []
    if config is not None:
        key, system = config.data.question_key, config.data.system_prompt
        answer = config.data.answer_key if config.data.answer_key != "answer" else ""
        names = names or [name for name, _ in data.named_sources(config.data)]
        if not names:
            rows = data.GENERATED[config.data.kind](config.seed, "train", _GENERATED)
    if names:
        rows = [row for name in names for row in data.load(name, "", answer)]
    bounds = re.fullmatch(r"(\d*)(:?)(\d*)", wanted)
    if not bounds:
        raise UserError(f"--rows={wanted!r} is not a range; write 7, 7:20 or 7:")
    first = int(bounds[1] or 0)
    last = first + 1 if bounds[1] and not bounds[2] else int(bounds[3] or len(rows))
    if not rows[first:last]:
        raise UserError(f"--rows={wanted} selects none of {len(rows)} rows; they count from 0")
    return [(i, with_messages(rows[i], key, system)) for i in range(len(rows))[first:last]]


@dataclass(slots=True)
class AgentRun:
    """One run and its result.

    Attributes:
      index: of the row in the data.
      reward: a number, or numbers by completion id; None after a failure.
      error: such as `KeyError: 'answer' (agent.py, line 14)`, or "".
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
    """Return quantiles of the seconds of successful runs and of answered calls."""
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
    """Yield findings: counts of runs, grouped failures, grouped refused calls, latencies."""
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
    """Yield lines about a run's calls and its result; `began` in monotonic seconds."""
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
    """Group failures by exception, line and status, the largest group first."""
    groups = defaultdict(list)
    for one in failed:
        kind, place = one.error.partition(":")[0], re.findall(r"\([^(]*, line \d+\)$", one.error)
        groups[getattr(one, "status", 0), re.sub(r"\d+", "#", kind), *place].append(one)
    return sorted(groups.values(), key=len, reverse=True)[:_MOST]
