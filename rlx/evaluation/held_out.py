"""Evaluate a run on held-out rows: greedy answers by the fleet, the loss by the trainer, or both.

Two parts meet in one record.

    measure (trainer's thread)            the loss on held-out groups ─┐
    begin (when the fleet has the step's  greedy answers, while  ──────┴▶ take: records, in order
           weights, on any thread)        training goes on
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.base import Group, info_means
from rlx.evaluation.runner import RowRunner
from rlx.evaluation.statistics import RIGHT
from rlx.fleet.requests import Sampling
from rlx.observe.timeline import Timeline
from rlx.rollout.attempts import Patience, Skipped
from rlx.rollout.executor import Executor, group_seed
from rlx.rollout.workflows import Task

CONCURRENCY = 64  # questions at one time, in addition to training's prompts
PRIORITY = 1  # ahead of training's prompts, so that few answers come from newer weights


@dataclass(eq=False, kw_only=True)
class HeldOut:
    """Evaluates steps that are due, each once."""

    rows: Sequence[Mapping[str, Any]]  # questions
    groups: Sequence[Group]  # the same rows as a trainer takes them; empty for rollouts
    sampling: Sampling | None  # of answers; None: there is no fleet to answer
    total_steps: int  # steps of the run, the last of which is evaluated
    patience: Patience  # with failed attempts at a question; however many fail, the run goes on
    timeout: float  # seconds for one question
    done: set[int]  # steps that eval.jsonl has already
    start: int  # the step at which the run begins or goes on
    owed: int  # the last step until then that was due; if it is not done, `start` is evaluated
    timeline: Timeline  # gets a span for each pass over the questions
    elapsed: Callable[[], float]  # returns the seconds of the run until now
    on_skip: Callable[[dict[str, Any]], None]  # takes a failed question's record, on any thread
    say: Callable[[str], None]  # takes one line for the user
    sets: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # further rows
    # Of `n_samples` further answers to each question; None: the greedy one is all.
    random_sampling: Sampling | None = None
    n_samples: int = 0

    def __post_init__(self) -> None:
        self._extra = set[int]()
        if max(self.done, default=-1) < self.owed:  # of `owed` the weights are gone
            self.add(self.start)
        self._losses: dict[int, tuple[dict[str, float], float]] = {}  # and the seconds they took
        self._under_way: deque[tuple[int, Future[dict[str, Any]]]] = deque()

    def due(self, step: int) -> bool:
        """Return whether to evaluate `step`: the first, the last, or one that was added."""
        on_schedule = step == 0 or step >= self.total_steps or step in self._extra
        return on_schedule and bool(self.rows or self.sets) and step not in self.done

    def add(self, step: int) -> None:
        """Make `step` due as well."""
        self._extra.add(step)

    @property
    def under_way(self) -> list[int]:
        """The steps whose evaluations were begun and not yet taken."""
        return [step for step, _ in self._under_way.copy()]  # others are begun meanwhile

    def measure(self, step: int, loss: Callable[[Sequence[Group]], Mapping[str, float]]) -> None:
        """Compute the loss on the held-out groups if `step` is due and there are groups."""
        if self.groups and self.due(step):
            began, losses = time.monotonic(), loss(self.groups)
            means = {f"held_out_{k}": v for k, v in losses.items() if not k.startswith("n_")}
            self._losses[step] = means, time.monotonic() - began

    def begin(self, step: int, executor: Executor) -> None:
        """Start the evaluation of `step`, if it is due, with the servers' current weights."""
        if self.due(step):
            self.done.add(step)
            self._under_way.append((step, executor.loop.submit(self._record(step, executor))))

    def take(self, seconds: float | None = 0.0) -> Iterator[dict[str, Any]]:
        """Yield the records finished within `seconds`, in order; None: all of them."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._under_way:
            step, future = self._under_way[0]
            wait([future], None if end is None else max(0.0, end - time.monotonic()))
            if not future.done():
                return
            self._under_way.popleft()
            try:
                yield future.result()
            except Exception as error:
                self.done.discard(step)  # it is due again, and the run goes on
                self.say(f"no evaluation of step {step}: {type(error).__name__}: {error}")

    async def _record(self, step: int, executor: Executor) -> dict[str, Any]:
        """Return the line of eval.jsonl; runs on the executor's loop."""
        began, (losses, loss_seconds) = time.monotonic(), self._losses.pop(step, ({}, 0.0))
        record = {"step": step, "version": step, "num_questions": len(self.rows), **losses}
        if self.sampling:
            runner = RowRunner(
                executor.loop, executor.fleet, concurrency=CONCURRENCY, timeout=self.timeout,
                patience=replace(self.patience, rate=1.0), say=self.say,
            )  # fmt: skip
            sets = {"": self.rows, **self.sets}
            with self.timeline.span("evaluation", "evaluation", track="held-out", step=step):
                scores = (self._scores(step, name, executor, runner) for name in sets)
                for set_scores in await asyncio.gather(*scores):
                    record |= set_scores
        seconds = loss_seconds + time.monotonic() - began
        return {**record, "seconds": seconds, "elapsed_seconds": self.elapsed()}

    async def _scores(self, step: int, name: str, executor: Executor, runner: RowRunner) -> dict:
        """Return what is recorded of the set `name`; "": the rows."""
        began, rows = time.monotonic(), self.sets[name] if name else self.rows
        if not rows:
            return {}

        async def answers(sampling: Sampling, n: int, priority: int) -> list[Group]:
            """Return the groups of the questions that did not fail."""
            seed, groups = sampling.seed or 0, []
            tasks = (  # with one seed the draws of all questions would be the same
                Task(row, i, group_seed(seed, i, 0), sampling, n, priority)
                for i, row in enumerate(rows)
            )
            for future in [runner.submit(executor.workflow, task) for task in tasks]:
                try:
                    groups.append(await asyncio.wrap_future(future))
                except Skipped as skipped:
                    label = {"set": name} if name else {}
                    self.on_skip({**skipped.record("eval"), **label, "step": step})
            return groups

        assert self.sampling
        # Further sets and samples wait in line with training's prompts.
        groups = await answers(self.sampling, 1, 0 if name else PRIORITY)
        trajectories = [t for group in groups for t in group.trajectories]
        scores = {
            # Training goes on meanwhile: the version of the newest token.
            "version_end": max((int(t.versions.max()) for t in trajectories), default=step),
            "greedy_acc": sum(g.trajectories[-1].run_reward > RIGHT for g in groups) / len(rows),
            "mean_tokens": sum(t.num_trained for t in trajectories) / max(1, len(groups)),
            "failed": len(rows) - len(groups),
            **info_means(trajectories),
        }
        if self.random_sampling and (n := self.n_samples):
            samples = await answers(self.random_sampling, n, 0)
            runs = [{t.run_id: t.run_reward for t in group.trajectories} for group in samples]
            right = [[reward > RIGHT for reward in each.values()] for each in runs]
            scores["sample_acc"] = sum(sum(each) / len(each) for each in right) / len(rows)
            scores[f"pass@{n}"] = sum(map(any, right)) / len(rows)
        if not name:
            return scores
        more = {"num_questions": len(rows), "seconds": time.monotonic() - began}
        return {f"{name}/{key}": value for key, value in (scores | more).items()}
