"""Debug an agent in three steps: the server, one run, many concurrent runs. Imports aiohttp."""

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, cycle, islice
from typing import Any

import numpy as np
from rich.console import Console

from rlx.agents import returns, workflow
from rlx.agents.agent_options import AgentOptions
from rlx.base import UserError
from rlx.cli.command import say
from rlx.cli.findings import Finding, problems, section
from rlx.cli.text import duration
from rlx.debugger.forwarder import HOST, Forwarder, ModelCall, shorten
from rlx.observe.progress import ProgressBar
from rlx.rollout import data
from rlx.workers.worker_pool import Evicted, WorkerError, WorkerPool
from rlx.workers.worker_process import WorkerLimits

SAMPLE = {"question": "What is 12 + 30? Answer with a number.", "answer": "42"}
Row = tuple[int, Mapping[str, Any]]  # index in the data, row as agents get it
_GENERATED = 4096  # rows of a config whose data is generated
_GRACE = 5.0  # seconds that a run may take to end after its timeout
_MOST = 8  # groups of failures that are shown
_LEVELS = {"p50": 0.5, "p95": 0.95, "max": 1.0}  # quantiles


@dataclass(slots=True)
class AgentRun:
    """One run and its result."""

    number: int
    index: int  # of the row in the data
    row: Mapping[str, Any]
    seconds: float = 0.0
    reward: Any = None  # a number, or numbers by completion id; None after a failure
    error: str = ""  # such as `KeyError: 'answer' (agent.py, line 14)`, or ""
    traceback: str = ""
    calls: list[ModelCall] = field(default_factory=list)


class Debugger:
    """Runs an agent in worker processes, as in training, and prints the results."""

    def __init__(
        self,
        agent: str,  # its class, see `loading.load_class`
        kwargs: Mapping[str, Any],  # of the class
        options: AgentOptions | None,  # None gives the processes this one's environment
        server: Forwarder,
        timeout: float,  # seconds of a run; 0 for no limit
    ):
        options = options or AgentOptions(limits=WorkerLimits(environment=tuple(os.environ)))
        block_seconds = min(filter(None, (options.block_seconds, timeout)))
        options = replace(options, block_seconds=block_seconds, host=HOST)
        self._workers = WorkerPool(workflow.worker_kind(agent, kwargs, options), options.workers)
        self._server, self._timeout = server, timeout

    def run(self, steps: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
        """Run the rows of each step concurrently, until a step has a problem; return a report."""
        return asyncio.run(self._run(steps))

    async def _run(self, steps: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
        async with self._server:
            start, numbers = time.monotonic(), count()
            models = await self._server.models()
            answers = f"answers in {duration(time.monotonic() - start)}: {', '.join(models[:4])}"
            finding = Finding("server", "models", "ok", answers)
            section("server", [finding], Console(highlight=False))
            report: dict[str, Any] = {"models": models, "ok": True}
            try:
                await self._workers.start()
                for name, rows in steps.items():
                    if not report["ok"]:
                        say("\nfix this run before running many, or give --steps=2")
                        break
                    report[name] = await self._step([AgentRun(next(numbers), *r) for r in rows])
                    report["ok"] = report[name]["ok"]
            finally:
                await self._workers.close()
        return report

    async def _step(self, runs: Sequence[AgentRun]) -> dict[str, Any]:
        """Make concurrent runs, print their results, and return them."""
        title, start = "one run" if len(runs) == 1 else f"{len(runs)} runs", time.monotonic()
        with ProgressBar() as bar:
            for done, future in enumerate(asyncio.as_completed(map(self._make, runs)), 1):
                await future
                bar.show(title, done, len(runs))
        seconds = time.monotonic() - start
        say("\n" + "\n".join(_transcript(runs[0], start) if len(runs) == 1 else [title]))
        findings = list(_findings(title, runs, seconds))
        section(title, findings, Console(highlight=False))
        ok, failed = not problems(findings), sum(bool(run.error) for run in runs)
        counts = {"ok": ok, "done": len(runs) - failed, "failed": failed, "seconds": seconds}
        return {**counts, **_latencies(runs), "runs": list(map(asdict, runs))}

    async def _make(self, run: AgentRun) -> None:
        start, seconds = time.monotonic(), self._timeout or None
        url, key = self._server.base_url(run.number), self._server.api_key
        try:
            # The worker ends the run after `seconds`; if the run blocks it, it is killed.
            async with asyncio.timeout(seconds and 2 * seconds + _GRACE):
                value = await workflow.run_agent(self._workers, run.row, url, key, seconds)
        except TimeoutError:
            run.error = "it ignores cancellation; re-raise CancelledError"
        except (workflow.AgentError, WorkerError, Evicted) as error:
            text = str(error) or "its process was ended because of another run"
            run.error, _, run.traceback = text.partition("\n")
        run.seconds, run.calls = time.monotonic() - start, self._server.calls(run.number)
        if not run.error:
            ids = {call.completion_id for call in run.calls if call.completion_id and call.ok}
            run.error = returns.mistake(value, ids) if ids else workflow.NO_COMPLETION
            run.reward = None if run.error else value


def steps(steps: str, rows: Sequence[Row], batch: int, group: int) -> dict[str, list[Row]]:
    """Return the rows of the steps in --steps: `one`, and `many`, `batch` rows × `group` runs."""
    if steps not in ("1", "2", "1,2"):
        raise UserError(f"--steps={steps} is invalid; give 1, 2 or 1,2")
    if min(batch, group) < 1:
        raise UserError(f"--batch={batch} and --group={group} must be 1 or more")
    choices = {"1": ("one", [rows[0]]), "2": ("many", [*islice(cycle(rows), batch)] * group)}
    return dict(choices[step] for step in steps.split(","))


def load_rows(path: str, selection: str = "", config: Any = None) -> list[Row]:
    """Return rows of a file, else of a config's training data, else a sample, with `messages`.

    `selection` is `7`, `7:20` or `7:`, as in --rows, or "" for all. UserError if it is no range or
    empty, or the data cannot be read.
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
    bounds = re.fullmatch(r"(\d*)(:?)(\d*)", selection)
    if not bounds:
        raise UserError(f"--rows={selection!r} is not a range; write 7, 7:20 or 7:")
    first = int(bounds[1] or 0)
    last = first + 1 if bounds[1] and not bounds[2] else int(bounds[3] or len(rows))
    if not rows[first:last]:
        raise UserError(f"--rows={selection} selects none of {len(rows)} rows; they count from 0")
    return [(i, workflow.with_messages(rows[i], key, system)) for i in range(len(rows))[first:last]]


def _latencies(runs: Sequence[AgentRun]) -> dict[str, dict[str, float]]:
    """Return quantiles of the seconds of successful runs and of answered calls."""
    good = {"run_seconds": [run.seconds for run in runs if not run.error]}
    good["call_seconds"] = [call.seconds for run in runs for call in run.calls if call.ok]
    return {
        name: {level: float(np.quantile(seconds, q)) for level, q in _LEVELS.items()}
        for name, seconds in good.items() if seconds
    }  # fmt: skip


def _findings(area: str, runs: Sequence[AgentRun], seconds: float) -> Iterator[Finding]:
    """Yield findings: counts of runs, grouped failures, grouped refused calls, latencies."""
    rewards = [run.reward for run in runs if not run.error]
    summary = f"{len(rewards)} of {len(runs)} ok, in {duration(seconds)}"
    if rewards:
        means = [np.mean([*r.values()] if isinstance(r, Mapping) else r) for r in rewards]
        summary += f", mean reward {np.mean(means):.3g}"
    yield Finding(area, "runs", "ok" if len(rewards) == len(runs) else "problem", summary)
    for same in _alike([run for run in runs if run.error]):
        rows = sorted({run.index for run in same})
        text = f"{len(same)} × {same[0].error} (rows {', '.join(map(str, rows[:4]))})"
        yield Finding(area, "failed", "problem", text, f"look at one: --steps=1 --rows={rows[0]}")
    calls = [call for run in runs for call in run.calls]
    refused = [call for call in calls if not call.ok]
    for alike in _alike(refused):
        text = f"{len(alike)} × {alike[0].status or 'not answered'}: {alike[0].error}"
        yield Finding(area, "calls", "warning", text, "look at the server's log and its limits")
    if calls and not refused:
        yield Finding(area, "calls", "ok", f"{len(calls)} of {len(calls)} answered")
    for name, levels in _latencies(runs).items() if len(runs) > 1 else ():
        text = ", ".join(f"{level} {duration(value)}" for level, value in levels.items())
        yield Finding(area, name.replace("_", " "), "ok", text)


def _transcript(run: AgentRun, start: float) -> Iterator[str]:
    """Yield lines about a run's calls and its result; `start` in monotonic seconds."""
    for number, call in enumerate(run.calls, 1):
        times = f"at {duration(call.begin - start)} · took {duration(call.seconds)}"
        yield f"call {number}  {call.path}  {call.model}  {times} · {call.stop_reason or '–'}"
        error = ("error", f"{call.status or 'no answer'}: {call.error}")
        end = ("answer", call.answer or "(empty)") if call.ok else error
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
