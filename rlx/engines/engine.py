"""Protocol between a rollout server and the engine that generates its tokens."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from rlx.fleet.requests import KV_POLICIES, Chunk, EngineStatus, Request, ScoreRequest, Scores
from rlx.option import option

SLEEPS = ("off", "cache", "weights")  # the last two are levels 1 and 2 of a pause
NO_WEIGHTS = "the server sleeps without weights; publish some before it resumes"


@dataclass(frozen=True)
class EngineOptions:
    """Options of a server's engine: flags of rlx.serve, keys of `config.fleet`."""

    tensor_parallel: int = option(1, "GPUs of a vLLM server, each with a slice of every layer", "1")
    gpu_memory: float = option(
        0.0, "share of a GPU for a server; 0: the engine's choice, or 0.4 where allocation_mode "
        "puts the trainer on the same GPUs", "[0, 1)",
    )  # fmt: skip
    slots: int = option(64, "sequences decoded together on one server", "1")
    max_model_len: int = option(0, "tokens; 0: the model's context, in a run both budgets", "0")
    decode_steps: int = option(8, "tokens of a sequence in one jitted decode call", "1")
    engine_args: str = option(
        "", "vLLM's own arguments, NAME=VALUE;NAME=VALUE with values in JSON or plain text, "
        "such as max_num_batched_tokens=16384;quantization=fp8",
    )  # fmt: skip
    kv_on_update: str = option("keep", "caches after an update; abort: send again", KV_POLICIES)
    sleep: str = option(
        "off", "what servers free while the trainer computes, in turns with them on one device: "
        "their cache, or the weights too", SLEEPS,
    )  # fmt: skip


class EngineStopped(RuntimeError):
    """The engine has failed for good; `__cause__` is the error."""


class MissingImage(Exception):
    """A request names an image that the engine does not have, or no longer."""


class Engine(Protocol):
    """An engine whose methods are called on the server's event loop.

    After a failure, open streams and all methods except `close` raise EngineStopped.
    """

    async def start(self) -> None:
        """Load the model and compile; raise UserError if it cannot be served."""

    async def add_image(self, name: str, data: bytes) -> None:
        """Keep an image file for requests that name it, at least until many others came.

        ValueError if the model takes no images or cannot read this one.
        """

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Stream chunks of all samples until each has a stop reason; closing it aborts them.

        `request` has passed `wire.request_from`. ValueError, before the first chunk and with the
        remedy: a token is not in the vocabulary, or the prompt exceeds max_model_len.
        MissingImage, likewise before it: the image can be added again.
        """

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the logprobs of `tokens[first:]` by the current weights; a reward model's values.

        Waits while the engine is paused. Cancelling it withdraws the request.
        ValueError and MissingImage as `generate`.
        """

    async def pause(self, level: int = 0) -> None:
        """Return once no decode step is running; keep running requests.

        `level` is the device memory to free, if it is held. 1: the cache, 2: the weights as well,
        which `load` has to bring before `resume`.
        """

    async def resume(self) -> None:
        """Continue decoding; caches that were freed are computed again by the current weights.

        ValueError without weights. Any other error ends the engine.
        """

    async def load(self, path: str | bytes, version: int, kv: str = "keep") -> int:
        """Replace the weights by a safetensors file with HF names, paused or decoding.

        An engine whose attribute `casts` names a backend also takes a PublishCast's bytes in place
        of a path, and receives the weights by it.
        Decoding continues while the file is read and checked (names, shapes, finite). The exchange
        happens between two decode steps; later tokens carry `version`. New requests never use keys
        and values of the old weights. By `kv`, running ones `keep` their cache, `recompute` it with
        the new weights, or `abort`; clients then send them again with the tokens so far.

        Returns the time without decoding, ns. ValueError if the file is refused; the engine keeps
        its weights. Any other error ends the engine, whose weights may be mixed.
        """

    def status(self) -> EngineStatus:
        """Return the state now, and the spans since the last call."""

    async def close(self) -> None:
        """End the engine; abort running requests."""
