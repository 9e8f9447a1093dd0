"""A run's held-out evaluations: greedy answers by the fleet, the loss by the trainer, or both.

    measure (trainer's thread)            the loss on held-out groups ─┐
    begin (when the fleet has the step's  greedy answers, beside  ─────┴▶ take: records, in order
           weights, on any thread)        training

Rollouts have no held-out loss: their rows have questions and no answers to learn. A run without
servers has no answers.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ml_collections import ConfigDict

from rlx.base import Group
from rlx.observe.timeline import Timeline
from rlx.rollout.attempts import skip_record
from rlx.rollout.executor import Executor
from rlx.run import run_records
from rlx.run.inputs import Inputs, evaluation_sampling, has_servers


class HeldOut:
    """Evaluations that are due, under way and done; once a step each.

    Args:
      config, inputs: of the run.
      done: steps that eval.jsonl has already.
      start: the step that the run begins or goes on at.
      timeline: gets a span for each pass over the questions.
      elapsed: seconds of the run until now.
      on_skip: takes the `failures.skip_record` of each question that failed; on any thread.
      say: takes one line for the user.
    """

    def __init__(
        self,
        config: ConfigDict,
        inputs: Inputs,
        done: Iterable[int],
        start: int,
        timeline: Timeline,
        elapsed: Callable[[], float],
        on_skip: Callable[[dict[str, Any]], None] = lambda record: None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self._on_skip, self._say = on_skip, say
        self._config, self._inputs, self._timeline = config, inputs, timeline
        self._elapsed, self._served = elapsed, has_servers(config)
        self._done, self._extra = set(done), set[int]()
        if max(self._done, default=-1) < self._last_due(start):
            self.add(start)  # whose weights are here; those of the one that was cut off are gone
        self._losses: dict[int, tuple[dict[str, float], float]] = {}  # and the seconds they took
        self._under_way: deque[tuple[int, Future[dict[str, Any]]]] = deque()

    def due(self, step: int) -> bool:
        """Whether this step is evaluated: the first, the last, and every so many between."""
        every = self._config.eval.every_steps
        ends = step == 0 or step >= self._config.total_steps
        wanted = ends or (every > 0 and step % every == 0) or step in self._extra
        return wanted and bool(self._inputs.eval_rows) and step not in self._done

    def add(self, step: int) -> None:
        """Has `step` evaluated too."""
        self._extra.add(step)

    @property
    def under_way(self) -> list[int]:
        """The steps whose evaluations were begun and not taken."""
        return [step for step, _ in self._under_way]

    def measure(self, step: int, loss: Callable[[Sequence[Group]], Mapping[str, float]]) -> None:
        """Computes the loss after `step` on the held-out groups, if it is due and they exist."""
        if self._inputs.held_out and self.due(step):
            began = time.monotonic()
            found = run_records.held_out_losses(loss(self._inputs.held_out))
            self._losses[step] = found, time.monotonic() - began

    def begin(self, step: int, executor: Executor) -> None:
        """Starts the evaluation of `step`, if it is due, with the weights that servers have now."""
        if self.due(step):
            self._done.add(step)
            self._under_way.append((step, executor.submit(self._record(step, executor))))

    def take(self, seconds: float | None = 0.0) -> Iterator[dict[str, Any]]:
        """The records of those that are finished within `seconds`, in order; None: of all.

        An evaluation never ends a run: one that cannot be made is told of, and is due again.
        """
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
                self._done.discard(step)
                self._say(f"no evaluation of step {step}: {type(error).__name__}: {error}")

    def _last_due(self, step: int) -> int:
        """The last step until `step` that is evaluated by rule."""
        every = self._config.eval.every_steps
        return step - step % every if every > 0 else 0

    async def _record(self, step: int, executor: Executor) -> dict[str, Any]:
        """The record of one evaluation; runs on the executor's thread."""
        began, scores = time.monotonic(), []
        losses, spent = self._losses.pop(step, ({}, 0.0))
        if self._served:
            with self._timeline.span("evaluation", "evaluation", track="held-out", step=step):
                sampling = evaluation_sampling(self._config)
                answers = executor.evaluate(self._inputs.eval_rows, sampling)
                scores = await asyncio.wrap_future(answers)
        for score in scores:
            if "error" in score:
                index, attempts = score["index"], self._config.rollout.max_attempts
                row = self._inputs.eval_rows[index]
                found = skip_record("eval", index, index, row, attempts, score["error"])
                self._on_skip({**found, "step": step})
        return run_records.eval_record(
            step,
            scores,
            num_questions=len(self._inputs.eval_rows),
            losses=losses,
            seconds=spent + time.monotonic() - began,
            elapsed_seconds=self._elapsed(),
        )
