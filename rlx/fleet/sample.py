"""State of the samples of one `generate` call; a sample may take several requests.

If a server is lost, a sample continues on another one by a request whose prompt ends with the
tokens so far.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.base import joined_masks
from rlx.fleet.requests import Chunk, Request, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished sample."""

    tokens: np.ndarray  # [T] int32, including the stop token
    logprobs: np.ndarray  # [T] float32, nats
    versions: np.ndarray  # [T] int32, policy version of each token
    stop_reason: str  # stop | length
    top_tokens: np.ndarray | None = None  # [T · k] int32, k = `Sampling.top_logprobs`
    top_logprobs: np.ndarray | None = None  # [T · k] float32
    kept_sizes: np.ndarray | None = None  # as of a Trajectory
    kept: np.ndarray | None = None


@dataclass(eq=False)
class PartialSample:
    """An unfinished sample: the chunks of all its requests; `on_add` is called before each."""

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    length: int = 0  # tokens
    stop_reason: str | None = None
    on_add: Callable[[Chunk], None] = lambda chunk: None

    def add(self, chunk: Chunk) -> None:
        """Append `chunk`; an abort ends the request, not the sample."""
        self.on_add(chunk)
        self.chunks.append(chunk)
        self.length += len(chunk.tokens)
        if chunk.stop_reason != "abort":
            self.stop_reason = chunk.stop_reason

    def tokens(self) -> np.ndarray:
        """Return the tokens so far, [length] int32."""
        return self._joined("tokens", np.int32)

    def completion(self) -> Completion:
        assert self.stop_reason
        integers = ("tokens", "versions", "top_tokens")
        arrays = {name: self._joined(name, np.int32) for name in integers}
        arrays |= {name: self._joined(name, np.float32) for name in ("logprobs", "top_logprobs")}
        return Completion(stop_reason=self.stop_reason, **arrays, **joined_masks(self.chunks))

    def _joined(self, name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(getattr(c, name) for c in self.chunks)])


@dataclass(frozen=True, eq=False)
class GenerateCall:
    """Arguments of one `Fleet.generate` call."""

    prompt: np.ndarray
    sampling: Sampling
    session: str | None
    priority: int
    watch: Callable[[Chunk], None] | None = None
    images: tuple[str, ...] = ()  # in the prompt

    def request(self, samples: Sequence[PartialSample]) -> Request:
        """Return a request that continues `samples`, a part returned by `split`."""
        first = samples[0]
        return Request(
            uuid.uuid4().hex, np.concatenate([self.prompt, first.tokens()]), self.sampling,
            n=len(samples), first_index=first.index, prefix_len=first.length,
            priority=self.priority, unwatched=self.watch is None, images=self.images,
        )  # fmt: skip

    def finished(self, sample: PartialSample, max_model_len: int = 0) -> bool:
        """Return whether `sample` needs no more requests; `max_model_len` is 0 if unknown."""
        # The stop reason of a full sample may have been lost with its server.
        if sample.stop_reason is None and sample.length:
            full = max_model_len and len(self.prompt) + sample.length >= max_model_len
            if full or sample.length >= self.sampling.max_new_tokens:
                sample.stop_reason = "length"
        return sample.stop_reason is not None


def split(samples: list[PartialSample]) -> list[list[PartialSample]]:
    """Divide `samples` into requests: runs of neighbours without tokens, or single samples."""
    parts: list[list[PartialSample]] = []
    for sample in samples:
        last = parts[-1][-1] if parts else None
        if last and not sample.length and not last.length and sample.index == last.index + 1:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
