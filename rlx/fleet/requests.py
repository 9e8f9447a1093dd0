"""Requests to an inference engine and its answers, for generation and for scoring.

`wire.py` turns them into messages; this file depends on neither end of the wire.
"""

from dataclasses import dataclass, field

import numpy as np

from rlx.option import option


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options that decide how completions are drawn.

    Attributes:
      temperature: ≥ 0; 0 is greedy. Behaviour logprobs are those of
        log softmax(logits / temperature) over the whole vocabulary (top-p and top-k restrict the
        draw, not the logprob); of the untempered distribution when greedy.
      max_new_tokens, min_new_tokens: counted over the whole completion, `prefix_len` included.
      stop: strings that end a completion as soon as its text contains one (kept in the tokens).
      stop_token_ids: tokens that end a completion (kept in the tokens), besides the model's own.
      seed: each draw is a function of (seed, sample index, position in the completion) alone, so
        a completion never depends on what else is in the batch. None: the engine picks one.
      guide: JSON Schema, as text, that the completion must fit; "": none. Behaviour logprobs are
        then those of the tokens that it leaves. vLLM alone has guides and `top_logprobs`.
      top_logprobs: in [0, 20]; how many of the likeliest tokens are told beside each one drawn.
      unscored: nobody wants behaviour logprobs; an engine may save the work and give NaN.
    """

    temperature: float = option(1.0, "above 0; losses use the same distribution")
    top_p: float = option(1.0, "share of the probability to draw tokens from; 1: all", "(0, 1]")
    top_k: int = option(0, "number of likeliest tokens to draw from; 0: all", "0")
    max_new_tokens: int = option(256, "in an answer, also in answers of a dataset", "1")
    min_new_tokens: int = option(0, "before an answer may end", "0")
    stop: tuple[str, ...] = option((), "texts that end an answer")
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    guide: str = ""
    top_logprobs: int = 0
    unscored: bool = False

    @property
    def truncation(self) -> str:
        """Return the options that keep some tokens from being drawn, "" where none does."""
        options = (
            ("top_p", self.top_p, 1), ("top_k", self.top_k, 0),
            ("min_new_tokens", self.min_new_tokens, 0),
        )  # fmt: skip
        return ", ".join(f"{name}={value:g}" for name, value, off in options if value != off)


TRUNCATED = (
    "some tokens are never drawn, while losses take logprobs over all tokens, so that importance "
    "weights are biased; leave it out"
)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """`n` samples of one prompt, sharing its prefill.

    Attributes:
      prompt_tokens: [T] int32, T ≥ 1; for a continued completion it ends with the tokens so far.
      prefix_len: how many trailing prompt tokens are an earlier part of the same completion.
      first_index: index of the first sample; samples are first_index … first_index + n − 1.
      unwatched: nobody reads tokens before the end; they may come in fewer, later messages.
    """

    request_id: str
    prompt_tokens: np.ndarray
    sampling: Sampling
    n: int = 1
    first_index: int = 0
    prefix_len: int = 0
    priority: int = 0
    unwatched: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sample, in order.

    Attributes:
      index: of the sample.
      tokens, logprobs (nats), versions: one number a token; lists from an engine, arrays (int32,
        float32, int32) from the wire.
      top_tokens, top_logprobs: `Sampling.top_logprobs` numbers a token, one token after another.
      stop_reason: `stop` | `length` | `abort` ends the sample; None: more will come.
    """

    index: int
    tokens: list[int] | np.ndarray = field(default_factory=list)
    logprobs: list[float] | np.ndarray = field(default_factory=list)
    versions: list[int] | np.ndarray = field(default_factory=list)
    stop_reason: str | None = None
    top_tokens: list[int] | np.ndarray = field(default_factory=list)
    top_logprobs: list[float] | np.ndarray = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """A request for the log-probabilities of a given sequence.

    Attributes:
      tokens: [T] int32, 2 ≤ T ≤ max_model_len.
      first: in [1, T − 1], the first token to score; token 0 follows nothing.
      temperature: in [LEAST_TEMPERATURE, MOST_TEMPERATURE]; logprobs are those of
        log softmax(logits / temperature).
    """

    tokens: np.ndarray
    first: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Answer to a ScoreRequest: `logprobs` [T − first] float32, nats, all of weights `version`."""

    logprobs: np.ndarray
    version: int
    values: bool = False  # they are a reward model's numbers after these tokens


MOST_TOP_LOGPROBS = 20
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0  # of scores; vLLM replaces lower ones


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of an engine now.

    `spans` are (name, start_ns, end_ns) on CLOCK_MONOTONIC, those since the last status.
    """

    version: int
    running: int  # sequences decoding now
    queued: int  # sequences waiting for a slot
    slots: int
    max_model_len: int
    tokens_generated: int
    paused: bool
    spans: tuple[tuple[str, int, int], ...] = ()


KV_POLICIES = ("keep", "recompute", "abort")  # what an update does to running requests' caches
