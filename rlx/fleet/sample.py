"""The samples of one `generate`, over as many calls as they take. Pure; the client drives them."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.fleet.requests import Request, Sampling
from rlx.fleet.wire import Piece


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished sample.

    Attributes:
      tokens: [T] int32, the stop token included. logprobs: [T] float32, nats.
      versions: [T] int32, the policy version that produced each token.
      stop_reason: `stop` | `length`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop_reason: str


@dataclass(eq=False)
class Sample:
    """One sample being made, over as many calls as it takes."""

    index: int
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    length: int = 0
    stop_reason: str | None = None

    def add(self, piece: Piece) -> None:
        _, tokens, logprobs, versions, reason = piece
        self.parts.append((tokens, logprobs, versions))
        self.length += len(tokens)
        if reason != "abort":
            self.stop_reason = reason

    def joined(self, column: int, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(part[column] for part in self.parts)])

    def completion(self) -> Completion:
        assert self.stop_reason
        return Completion(
            tokens=self.joined(0, np.int32),
            logprobs=self.joined(1, np.float32),
            versions=self.joined(2, np.int32),
            stop_reason=self.stop_reason,
        )


@dataclass(frozen=True, eq=False)
class Job:
    """What the samples of one `generate` share.

    `watch` is told a sample's index, and its next tokens and logprobs, as they come.
    """

    prompt: np.ndarray
    sampling: Sampling
    session: str | None
    priority: int
    watch: Callable[[int, np.ndarray, np.ndarray], None] | None = None

    def request(self, samples: Sequence[Sample]) -> Request:
        """The rest of `samples`: fresh neighbours, or one that has tokens already."""
        first = samples[0]
        return Request(
            request_id=uuid.uuid4().hex,
            prompt_tokens=np.concatenate([self.prompt, first.joined(0, np.int32)]),
            sampling=self.sampling,
            n=len(samples),
            first_index=first.index,
            prefix_len=first.length,
            priority=self.priority,
        )


def finished(sample: Sample, job: Job, max_model_len: int = 0) -> bool:
    """Whether `sample` needs no further call.

    Args:
      max_model_len: of the server that had it last, tokens; 0: unknown. A sample that filled its
        budget or the context is done with `length`, though its stop reason was lost on the way.
    """
    if sample.stop_reason is None and sample.length:
        full = max_model_len and len(job.prompt) + sample.length >= max_model_len
        if full or sample.length >= job.sampling.max_new_tokens:
            sample.stop_reason = "length"
    return sample.stop_reason is not None


def split(samples: list[Sample]) -> list[list[Sample]]:
    """Cuts `samples` into what one request can hold: neighbours without tokens, or single ones."""
    parts: list[list[Sample]] = []
    for sample in samples:
        last = parts[-1][-1] if parts else None
        if last and not sample.length and not last.length and sample.index == last.index + 1:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts
