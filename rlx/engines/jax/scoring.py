"""The sequences that the JAX engine has to score, and the one it is at. Of the engine's thread.

A sequence is scored `chunk` tokens at a time, so that decoding goes on in between; the next one
begins when it is done. New weights have it begin again: its scores are those of one version.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from rlx.engines.jax import decode
from rlx.engines.jax.programs import Programs
from rlx.fleet.requests import ScoreRequest, Scores


@dataclass(frozen=True, eq=False)
class Job:
    """One request and who waits for its scores; cancelling `future` withdraws it."""

    request: ScoreRequest
    future: "Future[Scores]" = field(default_factory=Future)


class Scoring:
    """First come, first served.

    Args:
      programs: with the program for scores prepared.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self._jobs: deque[Job] = deque()
        self.restart()

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        """Puts `job` at the end."""
        self._jobs.append(job)

    def restart(self) -> None:
        """Forgets what has been computed of the sequence that is being scored."""
        self._cache: decode.Cache | None = None
        self._parts: list[np.ndarray] = []

    def step(self, params: decode.ServingParams, version: int) -> tuple[Job, Scores] | None:
        """Scores one chunk of the first sequence; gives its scores after the last one."""
        job, chunk = self._jobs[0], self._programs.plan.chunk
        if job.future.cancelled():
            self._leave()
            return None
        tokens, first = job.request.tokens, job.request.first
        start = len(self._parts) * chunk
        part, self._cache = self._programs.score(
            params, self._cache, tokens, start, first, job.request.temperature
        )
        self._parts.append(part)
        if start + chunk < len(tokens) - 1:
            return None
        logprobs = np.concatenate(self._parts)[first - 1 : len(tokens) - 1]
        self._leave()
        return job, Scores(logprobs, version)

    def _leave(self) -> None:
        self._jobs.popleft()
        self.restart()
