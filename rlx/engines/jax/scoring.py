"""The JAX engine's queue of sequences to score; used on the engine's thread only.

A sequence is scored `chunk` tokens at a time, between decode calls. New weights restart it.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from rlx.engines.jax import kv_cache
from rlx.engines.jax.programs import Programs
from rlx.engines.jax.serving_params import ServingParams
from rlx.fleet.requests import ScoreRequest, Scores


@dataclass(frozen=True, eq=False)
class ScoreJob:
    """A request and the future of its scores; cancelling the future withdraws it."""

    request: ScoreRequest
    future: "Future[Scores]" = field(default_factory=Future)


class Scoring:
    """Scores sequences in order; `programs.prepare_score` must run before the first `step`."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._jobs: deque[ScoreJob] = deque()
        self.restart()

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    def add(self, job: ScoreJob) -> None:
        self._jobs.append(job)

    def restart(self) -> None:
        self._cache: kv_cache.Cache | None = None
        self._parts: list[np.ndarray] = []

    def step(self, params: ServingParams, version: int) -> tuple[ScoreJob, Scores] | None:
        """Score a chunk of the first sequence; return its job and scores after the last chunk."""
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
