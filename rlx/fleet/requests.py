"""Requests to an inference engine, for generation and scoring, and their deadlines."""

from dataclasses import dataclass, field

import numpy as np

from rlx.option import option

_SLOWEST = 50e6  # bytes/s at which weights still travel: a shared network, a disk, a checksum


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of completions."""

    # ≥ 0; 0 is greedy. Behaviour logprobs are log softmax(logits / temperature) over the whole
    # vocabulary, whatever top-p and top-k; untempered if greedy.
    temperature: float = option(1.0, "above 0; losses use the same distribution")
    top_p: float = option(1.0, "share of probability drawn from, also in losses; 1: all", "(0, 1]")
    top_k: int = option(0, "likeliest tokens to draw from, also in losses; 0: all", "0")
    # Lengths of the whole completion, `prefix_len` included.
    max_new_tokens: int = option(256, "longest answer, also in a dataset", "1")
    min_new_tokens: int = option(0, "before an answer may end", "0")
    # Both end a completion as soon as it contains one, and are kept in its tokens.
    stop: tuple[str, ...] = option((), "texts that end an answer")
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own
    # Each draw depends only on (seed, sample index, position), not on the rest of the batch.
    seed: int | None = None  # None: the engine picks one
    # The completion matches it, unless its length cuts it. Behaviour logprobs are then renormalised
    # over the tokens that it allows.
    guide: str = option("", "JSON Schema that answers match, also in losses; empty: none")
    top_logprobs: int = 0  # in [0, 20]; likeliest tokens reported with each sampled one; vLLM only
    unscored: bool = False  # behaviour logprobs are not needed; an engine may return NaN
    # Report the tokens that top-p, top-k, the minimum length and the guide left to draw from.
    # Behaviour logprobs are then renormalised over them. Ignored if greedy.
    return_masks: bool = False
    # PEFT directory, at the server, that is added to the weights for this request; "": none. vLLM
    # only, with its argument enable_lora.
    adapter: str = ""

    @property
    def truncation(self) -> str:
        """Return the options that exclude some tokens from sampling, "": none."""
        options = (
            ("top_p", self.top_p, 1), ("top_k", self.top_k, 0),
            ("min_new_tokens", self.min_new_tokens, 0),
        )  # fmt: skip
        limits = [f"{name}={value:g}" for name, value, off in options if value != off]
        return ", ".join([*limits, *["guide"] * bool(self.guide)])


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for `n` samples of one prompt, which share its prefill."""

    request_id: str
    prompt_tokens: np.ndarray  # [T] int32, T ≥ 1, including earlier tokens of a completion
    sampling: Sampling
    n: int = 1
    first_index: int = 0  # of the samples
    prefix_len: int = 0  # number of trailing prompt tokens that belong to the completion
    priority: int = 0  # higher is served first
    unwatched: bool = False  # tokens are not read before the end; fewer messages will do
    images: tuple[str, ...] = ()  # names, in the order of their placeholders in the prompt

    @property
    def prefix(self) -> list[int]:
        """The earlier tokens of the completion, which end the prompt."""
        return self.prompt_tokens[self.prompt_tokens.size - self.prefix_len :].tolist()


TRY_OUT = Request("try out", np.zeros(1, np.int32), Sampling(temperature=0.0, max_new_tokens=1))


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sample, in order."""

    index: int  # of the sample
    # One number per token; lists from an engine, arrays (int32, float32, int32) from the wire.
    tokens: list[int] | np.ndarray = field(default_factory=list)
    logprobs: list[float] | np.ndarray = field(default_factory=list)  # nats
    versions: list[int] | np.ndarray = field(default_factory=list)
    stop_reason: str | None = None  # `stop` | `length` | `abort`; None: not ended
    # `Sampling.top_logprobs` numbers per token, flat.
    top_tokens: list[int] | np.ndarray = field(default_factory=list)
    top_logprobs: list[float] | np.ndarray = field(default_factory=list)
    # As of a Trajectory, with `Sampling.return_masks`.
    kept_sizes: list[int] | np.ndarray = field(default_factory=list)
    kept: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """A request for the log-probabilities log softmax(logits / temperature) of a sequence."""

    tokens: np.ndarray  # [T] int32, 2 ≤ T ≤ max_model_len
    first: int  # in [1, T − 1], the first token to score
    temperature: float = 1.0  # in [LEAST_TEMPERATURE, MOST_TEMPERATURE]
    adapter: str = ""  # as in Sampling
    images: tuple[str, ...] = ()  # as of Request


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Result of a ScoreRequest: `logprobs` [T − first] float32, nats, by weights `version`."""

    logprobs: np.ndarray
    version: int
    values: bool = False  # `logprobs` are a reward model's values after these tokens


MOST_TOP_LOGPROBS = 20
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0  # for scores; vLLM clamps lower ones


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of an engine."""

    version: int
    running: int  # sequences decoding now
    queued: int  # sequences waiting for a slot
    slots: int
    max_model_len: int
    tokens_generated: int
    paused: bool
    # (name, start_ns, end_ns) on CLOCK_MONOTONIC, since the last status
    spans: tuple[tuple[str, int, int], ...] = ()


KV_POLICIES = ("keep", "recompute", "abort")  # for running requests when weights change


@dataclass(frozen=True)
class Timeouts:
    """Deadlines and intervals, in seconds, and the way of weights through the servers."""

    relay_fanout: int = option(
        1, "servers to which each sends streamed weights; 0: the trainer sends to all", "0"
    )
    publish_timeout_seconds: float = option(
        120.0, "limit to take weights, and 20 for each GB; then a server is lost", "(0, inf)"
    )
    connect_seconds: float = option(60.0, "limit for servers to answer at the start", "(0, inf)")
    probe_seconds: float = option(1.0, "between two probes of a server", "(0, inf)")
    hang_seconds: float = option(5.0, "silence after which its requests go elsewhere", "(0, inf)")
    outage_seconds: float = option(300.0, "longest wait while no server is alive", "(0, inf)")
    request: float = 600.0  # deadline of one Generate call
    backoff: float = 2.0  # the longest pause between two attempts to join a lost server

    def publish_seconds(self, num_bytes: int) -> float:
        """Return the deadline of a publish of `num_bytes` bytes."""
        return self.publish_timeout_seconds + num_bytes / _SLOWEST
