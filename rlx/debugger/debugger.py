"""Debug an agent in three steps: the server, one run, many concurrent runs. Imports aiohttp."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from rich.console import Console

from rlx.agents import returns
from rlx.agents.workflow import NO_COMPLETION, AgentError, AgentOptions, run_agent, worker_kind
from rlx.cli.command import say
from rlx.cli.text import duration
from rlx.debugger.agent_runs import AgentRun, Row, findings, latencies, transcript
from rlx.debugger.forwarder import HOST, Forwarder
from rlx.doctor import table
from rlx.doctor.findings import Finding, problems
from rlx.observe.progress_bar import ProgressBar
from rlx.workers.worker_pool import Evicted, WorkerError, WorkerPool
from rlx.workers.worker_process import WorkerLimits

_GRACE = 5.0  # seconds that a run may take to end after its timeout


class Debugger:
    """Runs an agent in worker processes, as in training, and prints the results.

    Args:
      agent, kwargs: its class, see `loading.load_class`, and the constructor's arguments.
      options: of its processes; None gives them this process's environment.
      base_url, api_key, model: see `Forwarder`.
      timeout: seconds of a run; 0 for no limit.
    """

    def __init__(
        self, agent: str, kwargs: Mapping[str, Any], options: AgentOptions | None,
        base_url: str, api_key: str, model: str, timeout: float,
    ):  # fmt: skip
        options = options or AgentOptions(limits=WorkerLimits(environment=tuple(os.environ)))
        block_seconds = min(filter(None, (options.block_seconds, timeout)))
        options = replace(options, block_seconds=block_seconds, host=HOST)
        self._workers = WorkerPool(worker_kind(agent, kwargs, options), options.workers)
        self._server, self._timeout = Forwarder(base_url, api_key, model), timeout

    def run(self, steps: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
        """Run the rows of each step concurrently, until a step has a problem; return a report.

        Raises:
          UserError: the server does not answer, or the agent cannot be created.
        """
        return asyncio.run(self._run(steps))

    async def _run(self, steps: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
        async with self._server:
            began, numbers = time.monotonic(), count()
            models = await self._server.models()
            answers = f"answers in {duration(time.monotonic() - began)}: {', '.join(models[:4])}"
            finding = Finding("server", "models", "ok", answers)
            table.section("server", [finding], Console(highlight=False))
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
        title, began = "one run" if len(runs) == 1 else f"{len(runs)} runs", time.monotonic()
        with ProgressBar() as bar:
            for done, each in enumerate(asyncio.as_completed(map(self._make, runs)), 1):
                await each
                bar.show(title, done, len(runs))
        seconds = time.monotonic() - began
        say("\n" + "\n".join(transcript(runs[0], began) if len(runs) == 1 else [title]))
        found = list(findings(title, runs, seconds))
        table.section(title, found, Console(highlight=False))
        ok, failed = not problems(found), sum(bool(run.error) for run in runs)
        counts = {"ok": ok, "done": len(runs) - failed, "failed": failed, "seconds": seconds}
        return {**counts, **latencies(runs), "runs": list(map(asdict, runs))}

    async def _make(self, run: AgentRun) -> None:
        """Make one run; set its reward or error."""
        began, seconds = time.monotonic(), self._timeout or None
        url, key = self._server.base_url(run.number), self._server.api_key
        try:
            # The worker ends the run after `seconds`; if the run blocks it, it is killed.
            async with asyncio.timeout(seconds and 2 * seconds + _GRACE):
                value = await run_agent(self._workers, run.row, url, key, seconds)
        except TimeoutError:
            run.error = "it ignores cancellation; re-raise CancelledError"
        except (AgentError, WorkerError, Evicted) as error:
            text = str(error) or "its process was ended because of another run"
            run.error, _, run.traceback = text.partition("\n")
        run.seconds, run.calls = time.monotonic() - began, self._server.calls(run.number)
        if not run.error:
            ids = {call.completion_id for call in run.calls if call.completion_id and call.ok}
            run.error = returns.mistake(value, ids) if ids else NO_COMPLETION
            run.reward = None if run.error else value
