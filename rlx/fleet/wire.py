"""Conversion between protobuf messages and the dataclasses of `requests.py`, for both ends.

Fields of received messages are checked here. Engines check only vocabulary and context length.
"""

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import grpc
import numpy as np

from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.requests import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    MOST_TOP_LOGPROBS,
    Chunk,
    Request,
    Sampling,
    ScoreRequest,
    Scores,
)  # fmt: skip

MAX_MESSAGE_BYTES = 32 << 20
PUBLISH_CHUNK_BYTES = 2 << 20
MAX_SAMPLES = 4096  # of one request
MAX_STOPS = 256  # stop strings of one request, and as many stop tokens
QUEUE_FULL = "the queue is full"  # begins a refusal that a client may retry
TOKEN_VARIABLE = "RLX_FLEET_TOKEN"  # bearer token; not a flag, because `ps` shows flags

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
)
CHANNEL_OPTIONS = (
    *OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# Fields that a message has as its dataclass does.
_REQUEST = ("request_id", "n", "first_index", "prefix_len", "priority", "unwatched")
_SAMPLING = tuple(Sampling.__dataclass_fields__)
_CHUNK = ("tokens", "logprobs", "versions", "top_tokens", "top_logprobs", "kept_sizes")
_STOP_REASONS = {None: pb.RUNNING, "stop": pb.STOP, "length": pb.LENGTH, "abort": pb.ABORT}
KV_NUMBERS = {
    None: pb.SERVER_DEFAULT, "keep": pb.KEEP, "recompute": pb.RECOMPUTE,
    "abort": pb.ABORT_AND_RESEND,
}  # fmt: skip
KV_NAMES = {number: name for name, number in KV_NUMBERS.items()}
_STOP_NAMES = {number: name for name, number in _STOP_REASONS.items()}


class RequestError(Exception):
    """Refusal of a request: gRPC status and a message."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


def take_token(environment: MutableMapping[str, str]) -> str | None:
    """Remove the bearer token from `environment`, to keep it from children; return it."""
    return environment.pop(TOKEN_VARIABLE, None)


def request_message(request: Request) -> pb.GenerateRequest:
    sampling = pb.Sampling(**_values(request.sampling, _SAMPLING))
    tokens = request.prompt_tokens.tolist()
    return pb.GenerateRequest(
        prompt_tokens=tokens, sampling=sampling, images=request.images, **_values(request, _REQUEST)
    )


def request_from(message: pb.GenerateRequest) -> Request:
    """Return the request in `message`; ValueError names the first field that is out of range."""
    s, n, length = message.sampling, message.n, len(message.prompt_tokens)
    stop_ids, prefix = len(s.stop_token_ids), message.prefix_len
    seed = s.seed if s.HasField("seed") else None
    room = min(length, s.max_new_tokens) - 1
    fewest, most = s.min_new_tokens, s.max_new_tokens
    for good, name, got, wanted in (
        (0 <= s.temperature < math.inf, "temperature", s.temperature, "≥ 0"),
        (0 < s.top_p <= 1, "top_p", s.top_p, "in (0, 1]"),
        (s.top_k >= 0, "top_k", s.top_k, "≥ 0"),
        (most >= 1, "max_new_tokens", most, "≥ 1"),
        (0 <= fewest <= most, "min_new_tokens", fewest, f"in [0, max_new_tokens = {most}]"),
        (len(s.stop) <= MAX_STOPS, "stop", f"{len(s.stop)} strings", f"at most {MAX_STOPS}"),
        (all(s.stop), "stop", "an empty string", "strings of one character or more"),
        (stop_ids <= MAX_STOPS, "stop_token_ids", f"{stop_ids} tokens", f"at most {MAX_STOPS}"),
        (seed is None or seed >= 0, "seed", seed, "≥ 0, or absent"),
        (0 <= s.top_logprobs <= MOST_TOP_LOGPROBS, "top_logprobs", s.top_logprobs,
         f"in [0, {MOST_TOP_LOGPROBS}]"),
        (1 <= n <= MAX_SAMPLES, "n", n, f"in [1, {MAX_SAMPLES}]"),
        (message.first_index >= 0, "first_index", message.first_index, "≥ 0"),
        (length >= 1, "prompt_tokens", "no token", "at least one"),
        (0 <= prefix <= room, "prefix_len", prefix,
         f"in [0, {room}]: below both the prompt's length and max_new_tokens"),
    ):  # fmt: skip
        _require(good, name, got, wanted)
    lists = {"stop": tuple(s.stop), "stop_token_ids": tuple(s.stop_token_ids)}
    return Request(
        prompt_tokens=np.fromiter(message.prompt_tokens, np.int32, length),
        sampling=Sampling(**{**_values(s, _SAMPLING), **lists, "seed": seed}),
        images=tuple(message.images),
        **_values(message, _REQUEST),
    )


def score_message(request: ScoreRequest) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        tokens=request.tokens.tolist(), first=request.first, temperature=request.temperature,
        adapter=request.adapter, images=request.images,
    )  # fmt: skip


def score_from(message: pb.ScoreRequest) -> ScoreRequest:
    """Return the request in `message`; raise ValueError as `request_from`."""
    length = len(message.tokens)
    _require(length >= 2, "tokens", f"{length} tokens", "two or more: the first is never scored")
    _require(1 <= message.first < length, "first", message.first, f"in [1, {length - 1}]")
    temperature = message.temperature if message.HasField("temperature") else 1.0
    good = LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE
    wanted = f"in [{LEAST_TEMPERATURE:g}, {MOST_TEMPERATURE:g}]"
    _require(good, "temperature", temperature, wanted)
    tokens = np.fromiter(message.tokens, np.int32, length)
    return ScoreRequest(tokens, message.first, temperature, message.adapter, tuple(message.images))


def score_reply(scores: Scores) -> pb.ScoreReply:
    return pb.ScoreReply(
        logprobs=scores.logprobs.tolist(), version=scores.version, values=scores.values
    )


def scores_from(reply: pb.ScoreReply, request: ScoreRequest) -> Scores:
    """Return the scores in the reply to `request`; raise ValueError if their number is wrong."""
    got, wanted = len(reply.logprobs), len(request.tokens) - request.first
    if got != wanted:
        raise ValueError(f"a ScoreReply has {got} logprobs instead of {wanted}")
    return Scores(np.fromiter(reply.logprobs, np.float32, got), reply.version, reply.values)


def _values(source: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _require(good: bool, name: str, got, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name}={got} is out of range; it must be {wanted}")


def reply_message(chunks: Sequence[Chunk]) -> pb.GenerateReply:
    """Return one message that holds all `chunks`, in order."""
    reply = pb.GenerateReply()
    for chunk in chunks:
        reply.index.append(chunk.index)
        reply.count.append(len(chunk.tokens))
        reply.stop_reason.append(_STOP_REASONS[chunk.stop_reason])
        for name in _CHUNK:
            getattr(reply, name).extend(getattr(chunk, name))
    reply.kept = b"".join(chunk.kept for chunk in chunks)
    return reply


def chunks_from(reply: pb.GenerateReply) -> list[Chunk]:
    """Return the chunks in `reply`, in order, with arrays; raise ValueError if lengths differ."""
    total = len(reply.tokens)
    aligned = len(reply.index) == len(reply.count) == len(reply.stop_reason)
    tops, over = divmod(len(reply.top_tokens), max(total, 1))
    aligned = aligned and not over and len(reply.top_tokens) == len(reply.top_logprobs)
    sizes = np.array(reply.kept_sizes, np.int32)
    aligned = aligned and len(sizes) in (0, total) and int(sizes.min(initial=0)) == 0
    aligned = aligned and int(sizes.sum()) == len(reply.kept)
    if not (aligned and total == len(reply.logprobs) == len(reply.versions) == sum(reply.count)):
        raise ValueError("the lengths in a GenerateReply do not agree")
    tokens = np.fromiter(reply.tokens, np.int32, total)
    logprobs = np.fromiter(reply.logprobs, np.float32, total)
    versions = np.fromiter(reply.versions, np.int32, total)
    top_tokens = np.array(reply.top_tokens, np.int32)
    top_logprobs = np.array(reply.top_logprobs, np.float32)
    ends = np.cumsum(np.append(0, sizes)).tolist()
    chunks, start = [], 0
    for index, count, reason in zip(reply.index, reply.count, reply.stop_reason, strict=True):
        part = slice(start, start + count)
        numbers = tokens[part], logprobs[part], versions[part]
        likely = slice(start * tops, (start + count) * tops)
        tops_of = top_tokens[likely], top_logprobs[likely]
        kept = reply.kept[ends[start] : ends[start + count]] if len(sizes) else b""
        chunks.append(Chunk(index, *numbers, _STOP_NAMES[reason], *tops_of, sizes[part], kept))
        start += count
    return chunks


def describe(error: grpc.aio.AioRpcError) -> str:
    """Return the error of a failed call as `CODE: details`."""
    details = " ".join((error.details() or "").split())
    if "last error:" in details:  # the end of gRPC's long message is the cause
        details = details.rpartition(": ")[2]
    return f"{error.code().name}: {details}" if details else error.code().name
