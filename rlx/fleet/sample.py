"""Samples of one `generate` call, each put together from as many requests as it takes.

Pure state: `client.py` sends the requests. A sample that a lost server began goes on elsewhere as a
request whose prompt ends with the tokens so far.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.fleet.requests import Chunk, Request, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished sample.

    Attributes:
      tokens: [T] int32, the stop token included. logprobs: [T] float32, nats.
      versions: [T] int32, the policy version that produced each token.
      stop_reason: `stop` | `length`.
      top_tokens, top_logprobs: [T · k] int32, float32; k: `Sampling.top_logprobs`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop_reason: str
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(eq=False)
class PartialSample:
    """One sample in the making: the chunks of all requests so far."""

    index: int
    chunks: list[Chunk] = field(default_factory=list)
    length: int = 0  # tokens so far
    stop_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Append `chunk`; an abort ends the request, not the sample."""
        self.chunks.append(chunk)
        self.length += len(chunk.tokens)
        if chunk.stop_reason != "abort":
            self.stop_reason = chunk.stop_reason

    def tokens(self) -> np.ndarray:
        """Return the tokens so far, [length] int32."""
        return self._joined("tokens", np.int32)

    def completion(self) -> Completion:
        """Return the sample, which must have a stop reason."""
        assert self.stop_reason
        logprobs = self._joined("logprobs", np.float32)
        versions = self._joined("versions", np.int32)
        tops = self._joined("top_tokens", np.int32), self._joined("top_logprobs", np.float32)
        return Completion(self.tokens(), logprobs, versions, self.stop_reason, *tops)

    def _joined(self, name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(getattr(c, name) for c in self.chunks)])


@dataclass(frozen=True, eq=False)
class GenerateCall:
    """Arguments that all samples of one `Fleet.generate` share."""

    prompt: np.ndarray
    sampling: Sampling
    session: str | None
    priority: int
    watch: Callable[[Chunk], None] | None = None

    def request(self, samples: Sequence[PartialSample]) -> Request:
        """Return the request for the rest of `samples`: one part of what `split` returns."""
        first = samples[0]
        return Request(
            request_id=uuid.uuid4().hex,
            prompt_tokens=np.concatenate([self.prompt, first.tokens()]),
            sampling=self.sampling,
            n=len(samples),
            first_index=first.index,
            prefix_len=first.length,
            priority=self.priority,
            unwatched=self.watch is None,
        )

    def finished(self, sample: PartialSample, max_model_len: int = 0) -> bool:
        """Return whether `sample` needs no further request.

        A sample that fills its budget or the context is given `length` when its stop reason was
        lost with its server.

        Args:
          max_model_len: of the server that had it last, tokens; 0: unknown.
        """
        if sample.stop_reason is None and sample.length:
            full = max_model_len and len(self.prompt) + sample.length >= max_model_len
            if full or sample.length >= self.sampling.max_new_tokens:
                sample.stop_reason = "length"
        return sample.stop_reason is not None


def split(samples: list[PartialSample]) -> list[list[PartialSample]]:
    """Cut `samples` into what one request can hold: neighbours without tokens, or single ones."""
    parts: list[list[PartialSample]] = []
    for sample in samples:
        last = parts[-1][-1] if parts else None
        if last and not sample.length and not last.length and sample.index == last.index + 1:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
