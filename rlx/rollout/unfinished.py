"""Samples of admitted prompts: their tokens go to the journal, and a resumed run continues them.

    workflow ─▶ Attempt.generate ─▶ Fleet.generate ─▶ chunks ─▶ Unfinished.write ─▶ journal
                     ▲ what a killed process had of the same call

A resumed run starts the workflow again, and each call gets what its samples had. A call with
another prompt begins again, because a tool, for example, answered differently.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory, joined_masks, seed_of
from rlx.fleet.requests import Chunk, Sampling
from rlx.fleet.sample import Completion, PartialSample
from rlx.journal.history import Samples

WRITE_SECONDS = 0.5  # interval of the journal's records of tokens


@dataclass(eq=False)
class Attempt:
    """The fleet of one attempt at a prompt."""

    fleet: Any
    seed: int  # of the attempt's task
    kept: Samples  # of a killed process, until a call takes them
    # Chunks that the journal does not have, after call, sample and number of earlier tokens.
    new: list[tuple[int, int, int, Chunk]] = field(default_factory=list)
    continued: int = 0  # tokens of `kept` that calls took
    _asked: Counter[bytes] = field(default_factory=Counter)

    async def generate(
        self, prompt_tokens: Any, sampling: Sampling, n: int, **options: Any
    ) -> list[Completion]:
        """Return `n` completions, as `Fleet.generate`."""
        prompt = np.asarray(prompt_tokens, np.int32).tobytes()
        request = f"{self.seed} {n} {sampling} ".encode() + prompt
        self._asked[request] += 1
        call = seed_of(request + b"%d" % self._asked[request])
        if sampling.seed is None:
            sampling = replace(sampling, seed=call)
        for sample in (samples := [PartialSample(index) for index in range(n)]):
            self._begin(call, sample, sampling, options.get("watch"))
        return await self.fleet.generate(prompt_tokens, sampling, n, samples=samples, **options)

    def _begin(self, call: int, sample: PartialSample, sampling: Sampling, watch: Any) -> None:
        """Add the tokens that a killed process had of a sample, and note the next ones."""
        pieces, index = self.kept.get((call, sample.index)), sample.index
        if pieces and (pieces[-1].stop_reason or not sampling.guide):  # a guide cannot continue
            sample.on_add = watch or sample.on_add
            for piece in self.kept.pop((call, index)):
                sample.add(Chunk(index, **piece.columns, stop_reason=piece.stop_reason))
            self.continued += sample.length
        if not sampling.top_logprobs:  # the journal has none
            sample.on_add = lambda chunk: self.new.append((call, index, sample.length, chunk))


class Unfinished:
    """The attempts under way, on one event loop."""

    def __init__(self, note: Callable[..., int]):  # as of Journal.append
        self._note, self._live = note, dict[int, Attempt]()
        self.kept: dict[int, Samples] = {}  # group_id → what a killed process left, until admitted
        self.continued = self.repeated = 0  # tokens of a killed process that calls took, or did not
        self._timer: asyncio.TimerHandle | None = None

    def restore(self, kept: Mapping[int, Samples], groups: Container[int], ended: bool) -> None:
        """Keep samples of these groups for the attempts to come; if `ended`, only ended ones."""
        for group_id, samples in kept.items():
            for key, pieces in samples.items():
                if group_id in groups and (pieces[-1].stop_reason or not ended):
                    self.kept.setdefault(group_id, {})[key] = pieces
                else:
                    self.repeated += pieces[-1].end

    def counts(self) -> dict[str, int]:
        """Return the prompts, samples and tokens to continue, and the tokens to make again."""
        ends = [pieces[-1].end for samples in self.kept.values() for pieces in samples.values()]
        numbers = {"prompts": len(self.kept), "samples": len(ends), "tokens": sum(ends)}
        return {**numbers, "repeated_tokens": self.repeated}

    def begin(self, group_id: int, fleet: Any, seed: int) -> Attempt:
        attempt = self._live[group_id] = Attempt(fleet, seed, self.kept.pop(group_id, {}))
        if not self._timer:
            self.write()
        return attempt

    def end(self, group_id: int, finished: bool = True) -> None:
        """Forget an attempt that has ended."""
        if attempt := self._live.pop(group_id, None):
            if finished:
                self.continued += attempt.continued
            else:  # the next attempt begins again
                self.repeated += attempt.continued
            self.repeated += sum(pieces[-1].end for pieces in attempt.kept.values())

    def write(self) -> None:
        """Note what came since the last call, and again after a while if attempts are left."""
        new = [(group_id, *each) for group_id, live in self._live.items() for each in live.new]
        for attempt in self._live.values():
            attempt.new.clear()
        if new:
            table = [[*place, len(c.tokens), c.stop_reason] for *place, c in new]
            tokens, logprobs, versions = (
                np.concatenate([getattr(chunk, name) for *_, chunk in new])
                for name in ("tokens", "logprobs", "versions")
            )
            masks = joined_masks([chunk for *_, chunk in new])
            joint = Trajectory(tokens, versions >= 0, logprobs, versions, 0.0, "", "", **masks)
            self._note("tokens", {"pieces": table}, Group(-1, (joint,)))
        later = asyncio.get_running_loop().call_later
        self._timer = later(WRITE_SECONDS, self.write) if self._live else None
