"""Make recorded samples again, each decode call with the weights that it had."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request
from rlx.fleet.sample import Completion, PartialSample


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded sample."""

    request: Request  # for this sample only
    completion: Completion
    # Decode calls, from 1, before which its cache was computed again from its tokens.
    prefills: frozenset[int] = frozenset()

    def stride(self, steps: int) -> int:
        """Return how many tokens a decode call samples: 1 with a guide, otherwise `steps`."""
        return 1 if self.request.sampling.guide else steps

    def calls(self, steps: int) -> list[int]:
        """Return the version of each decode call of `steps` tokens."""
        return self.completion.versions[:: self.stride(steps)].tolist()


class Regenerator(JaxEngine):
    """A JaxEngine without a thread and an event loop.

    `kv` is as `fleet.kv_on_update`; `options` are those of JaxEngine.
    """

    def __init__(self, model_path: str, kv: str, **options: Any):
        super().__init__(model_path, **options)
        self._kv = "keep" if kv == "keep" else "recompute"  # `abort` has the same bits
        self._prepare()
        self._version = -1  # unlike every recorded one

    def make(
        self, recordings: Sequence[Recording], weights: Callable[[int], str]
    ) -> list[Completion]:
        """Return what the engine makes of each request, in as many decode calls as recorded.

        `weights` gives a version's safetensors file or HF directory. ValueError as `generate`.
        """
        completions: dict[Recording, Completion] = {}
        for batch in batches(recordings, self._steps, self._slots.count):
            completions |= self._make(batch, weights)
        return [completions[recording] for recording in recordings]

    def _make(
        self, batch: Sequence[Recording], weights: Callable[[int], str]
    ) -> dict[Recording, Completion]:
        lives = {self._checked(recording.request): recording for recording in batch}
        for live in lives:
            live.stop_text = asyncio.run(self._stop_strings(live.request))
            if live.request.sampling.guide:
                live.guide = self._guide(live.request)
            live.sink = PartialSample(0)
            self._slots.add(live)
        for call, version in enumerate(batch[0].calls(self._steps)):
            if version != self._version:
                self._swap(self._read(weights(version)), version, self._kv)
            running = [(slot, s.live) for slot, s in enumerate(self._slots.samples) if s]
            self._prefill([[slot] for slot, live in running if call in lives[live].prefills])
            self._tick()
        self._slots.clear()
        for live in lives:
            live.sink.stop_reason = live.sink.stop_reason or "length"
        return {recording: live.sink.completion() for live, recording in lives.items()}

    def _call_loop(self, function: Callable, *args: Any) -> None:
        """Take the results of a decode call at once."""
        for live, chunk in args[0]:
            live.sink.add(chunk)

    def end(self) -> None:
        """End the thread that compiles."""
        self._programs.close()


def batches(recordings: Sequence[Recording], steps: int, most: int) -> list[list[Recording]]:
    """Divide recordings into batches of at most `most`, each for one series of decode calls.

    The first of a batch has the most calls, and the others have the versions of its first calls.
    """
    groups: list[list[Recording]] = []
    for recording in sorted(recordings, key=lambda r: len(r.completion.tokens), reverse=True):
        calls = recording.calls(steps)
        same = (b for b in groups if len(b) < most and b[0].calls(steps)[: len(calls)] == calls)
        if (batch := next(same, None)) is None:
            groups.append(batch := [])
        batch.append(recording)
    return groups
