"""Table of the samples in decoding slots: continuous batching as host state.

Requests wait by priority, then arrival. Each sample takes the lowest free slot until it ends.
Samples start only between decode calls, and every call gives a running sample all of its steps. So
a token's place in its call depends only on its position, as independence of the batch requires.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlx.engines.jax.guides import Guide
from rlx.fleet.requests import Chunk, Request
from rlx.model import kept_tokens

MAX_STOPS = 8  # stop tokens a slot can have

# Called with a sample's new tokens; returns how many to keep if it ends, else None.
StopText = Callable[[list[int]], int | None]


def sample_key(seed: int, index: int) -> np.uint64:
    """Return the 64-bit key of sample `index` of a request with `seed`."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def uniforms(keys: NDArray[np.uint64], positions: np.ndarray, steps: int) -> NDArray[np.float32]:
    """Return the draws of `steps` positions of each sample: [S, steps] float32 in [0, 1).

    SplitMix64 as a counter-based generator: mix(key + (position + 1)·γ). Source: Steele, Lea,
    Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.

    Args:
      keys: [S] uint64. positions: [S] int, of the first draw in the completion.
    """
    ahead: NDArray[np.uint64] = np.arange(1, steps + 1, dtype=np.uint64)
    counters: NDArray[np.uint64] = positions.astype(np.uint64)[:, None] + ahead
    z = keys[:, None] + counters * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)) * 2.0**-24).astype(np.float32)


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request in flight."""

    request: Request
    seed: int  # the request's, or picked by the engine
    stops: tuple[int, ...]  # stop tokens, at most MAX_STOPS
    stop_text: Callable[[], StopText] | None = None  # makes one for each sample
    guide: Guide | None = None  # of the request's schema, with the tokens before its new ones
    sink: Any = None  # asyncio.Queue of its chunks
    waiting: int = field(init=False)  # samples that have not started
    cancelled: bool = False

    def __post_init__(self):
        self.waiting = self.request.n


@dataclass(eq=False, slots=True)
class SlotSample:
    """One completion in a slot."""

    live: LiveRequest
    index: int
    tokens: list[int]  # prompt and completion so far; all except the last are in the cache
    prompt_load: int  # which load brought the weights of the prompt's keys and values
    stop_text: StopText | None
    guide: Guide | None = None


class SlotStart(NamedTuple):
    """A sample that takes a slot; its prompt's cache is copied from `source`, or None: computed."""

    slot: int
    sample: SlotSample
    source: int | None


class DecodeInputs(NamedTuple):
    """Arrays for a decode call, one row per slot."""

    # [S, 6] int32, columns TOKEN to MASKED: last token, cached tokens, tokens still wanted (0 if
    # idle), tokens before a stop token is allowed, top-k. The last is 0 for
    # logprobs over all tokens, 2 for those drawn from, 1 if these are wanted, too
    numbers: np.ndarray
    chances: np.ndarray  # [S, 2] float32: temperature, top-p
    stops: np.ndarray  # [S, MAX_STOPS] int32, −1 for none
    uniforms: np.ndarray  # [S, steps] float32
    allowed: np.ndarray | None = None  # as of `sampling.Restriction`, of a call with guides


def idle_inputs(slots: int, steps: int) -> DecodeInputs:
    """Return the inputs of slots that want no token."""
    return DecodeInputs(
        np.zeros((slots, 6), np.int32),
        np.ones((slots, 2), np.float32),
        np.full((slots, MAX_STOPS), -1, np.int32),
        np.zeros((slots, steps), np.float32),
    )


TOKEN, LENGTH, BUDGET, MINIMUM, TOP_K, MASKED = range(6)
TEMPERATURE, TOP_P = range(2)
PLAIN, MASKS, GUIDED = range(3)  # kinds of decode programs, see `programs.Shape`


class Slots:
    """The table of `count` slots and the queue for it; a decode call has `steps` tokens."""

    def __init__(self, count: int, steps: int, max_model_len: int):
        self.count, self.steps, self.max_model_len = count, steps, max_model_len
        self.samples: list[SlotSample | None] = [None] * count
        self._numbers, self._chances, self._stops, *_ = idle_inputs(count, steps)
        self._keys = np.zeros(count, np.uint64)
        self._positions = np.zeros(count, np.int64)
        self._queue: list[tuple[int, int, LiveRequest]] = []
        self._arrivals = itertools.count()

    @property
    def running(self) -> int:
        return sum(sample is not None for sample in self.samples)

    @property
    def queued(self) -> int:
        """Samples waiting for a slot."""
        return sum(live.waiting for *_, live in self._queue if not live.cancelled)

    @property
    def used(self) -> int:
        """1 + the highest slot in use."""
        return max((slot + 1 for slot, sample in enumerate(self.samples) if sample), default=0)

    @property
    def longest(self) -> int:
        """Largest number of cached tokens of a slot."""
        return int(self._numbers[:, LENGTH].max())

    @property
    def kind(self) -> int:
        """The kind of program that the samples need."""
        if any(sample.guide for sample in self.samples if sample):
            return GUIDED
        return MASKS if self._numbers[:, MASKED].any() else PLAIN

    def add(self, live: LiveRequest) -> None:
        heapq.heappush(self._queue, (-live.request.priority, next(self._arrivals), live))

    def cancel(self, live: LiveRequest) -> None:
        """Drop a request and free its slots."""
        live.cancelled = True
        for slot, sample in enumerate(self.samples):
            if sample is not None and sample.live is live:
                self._free(slot)

    def clear(self) -> list[LiveRequest]:
        """Drop every request; return them."""
        queued = [live for *_, live in self._queue if not live.cancelled]
        started = [sample.live for sample in self.samples if sample]
        lives = list(dict.fromkeys([*queued, *started]))
        for live in lives:
            self.cancel(live)
        return lives

    def admit(self, load: int) -> list[SlotStart]:
        """Give free slots to waiting samples.

        A sample copies its prompt's cache from a sample of the same request, if that was computed
        with the current weights.
        """
        starts: list[SlotStart] = []
        sources = [(i, s.live) for i, s in enumerate(self.samples) if s and s.prompt_load == load]
        for slot in [slot for slot, sample in enumerate(self.samples) if sample is None]:
            live = self._next()
            if live is None:
                break
            index = live.request.first_index + live.request.n - live.waiting
            live.waiting -= 1
            source = next((other for other, owner in sources if owner is live), None)
            starts.append(SlotStart(slot, self._start(slot, live, index, load), source))
        return starts

    def _next(self) -> LiveRequest | None:
        while self._queue:
            live = self._queue[0][2]
            if live.waiting and not live.cancelled:
                return live
            heapq.heappop(self._queue)
        return None

    def _start(self, slot: int, live: LiveRequest, index: int, load: int) -> SlotSample:
        request, sampling = live.request, live.request.sampling
        prompt = request.prompt_tokens.tolist()
        stop_text = live.stop_text() if live.stop_text else None
        guide = live.guide.begin(()) if live.guide else None
        sample = SlotSample(live, index, prompt, load, stop_text, guide)
        self.samples[slot] = sample
        room = min(sampling.max_new_tokens - request.prefix_len, self.max_model_len - len(prompt))
        minimum = sampling.min_new_tokens - request.prefix_len
        masked = 1 if sampling.return_masks and sampling.temperature > 0 else 2 * bool(guide)
        numbers = prompt[-1], len(prompt) - 1, room, max(minimum, 0), sampling.top_k, masked
        self._numbers[slot] = numbers
        self._chances[slot] = sampling.temperature, sampling.top_p
        self._stops[slot] = -1
        self._stops[slot, : len(live.stops)] = live.stops
        self._keys[slot] = sample_key(live.seed, index)
        self._positions[slot] = request.prefix_len
        return sample

    def inputs(self) -> DecodeInputs:
        """Return the arrays of the next decode call, for all slots."""
        draws = uniforms(self._keys, self._positions, self.steps)
        numbers, allowed = self._numbers.copy(), None
        sets = {slot: s.guide.allowed() for slot, s in enumerate(self.samples) if s and s.guide}
        if sets:  # a token a call, because the set of the next one depends on it
            numbers[list(sets), BUDGET] = 1
            allowed = np.full((self.count, len(next(iter(sets.values())))), 255, np.uint8)
            allowed[list(sets)] = list(sets.values())
        return DecodeInputs(numbers, self._chances.copy(), self._stops.copy(), draws, allowed)

    def accept(
        self, tokens: np.ndarray, logprobs: np.ndarray, counts: np.ndarray, version: int,
        kept: np.ndarray | None = None, vocab: int = 0,
    ) -> list[tuple[LiveRequest, Chunk]]:  # fmt: skip
        """Add a decode call's results, and free slots of ended samples; return a chunk of each.

        Args:
          tokens, logprobs: [B, steps], of the first B slots.
          counts: [B], how many of each row are valid.
          kept: [B, steps, W] uint8, of a vocabulary of `vocab`; None: no sample wants it.
        """
        out = []
        for slot, count in enumerate(counts.tolist()):
            sample = self.samples[slot]
            if sample is None or not count:
                continue
            new = tokens[slot, :count].tolist()
            count, reason = self._cut_length(slot, sample, new)
            new = new[:count]
            sample.tokens += new
            if sample.guide:
                sample.guide.add(new)
            self._positions[slot] += count
            row = self._numbers[slot]
            row[TOKEN] = new[-1]
            row[LENGTH] += count
            row[BUDGET] -= count
            row[MINIMUM] = max(row[MINIMUM] - count, 0)
            chunk = Chunk(
                sample.index, new, logprobs[slot, :count].tolist(), [version] * count, reason
            )
            if kept is not None and row[MASKED] == 1:
                data, sizes = kept_tokens.compress(kept[slot, :count], vocab)
                chunk = replace(chunk, kept=data, kept_sizes=sizes)
            out.append((sample.live, chunk))
            if reason:
                self._free(slot)
        return out

    def _cut_length(self, slot: int, sample: SlotSample, new: list[int]) -> tuple[int, str | None]:
        """Return how many new tokens to keep, and the stop reason if the sample ends."""
        if sample.stop_text:
            stop = sample.stop_text(new)
            if stop is not None:
                return stop, "stop"
        if new[-1] in sample.live.stops:
            return len(new), "stop"
        return len(new), "length" if len(new) >= self._numbers[slot, BUDGET] else None

    def _free(self, slot: int) -> None:
        self.samples[slot] = None
        self._numbers[slot] = 0
        self._chances[slot] = 1

    def moves(self, bucket: int) -> list[tuple[int, int]]:
        """Move all samples to the first `bucket` slots if they fit; return (source, target) pairs.

        The caller must copy the cache.
        """
        high = [slot for slot in range(bucket, self.count) if self.samples[slot] is not None]
        low = [slot for slot in range(bucket) if self.samples[slot] is None]
        if len(high) > len(low):
            return []
        pairs = list(zip(high, low, strict=False))
        for source, target in pairs:
            self.samples[target] = self.samples[source]
            for array in (self._numbers, self._chances, self._stops, self._keys, self._positions):
                array[target] = array[source]
            self._free(source)
        return pairs
