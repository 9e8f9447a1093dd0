"""Protocol between a rollout server and the engine that produces its tokens.

The gRPC server depends on this alone; the JAX engine and the vLLM engine implement it.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from rlx.fleet.requests import KV_POLICIES, Chunk, EngineStatus, Request, ScoreRequest, Scores
from rlx.option import option


@dataclass(frozen=True)
class EngineOptions:
    """Options of a server's engine: flags of rlx.serve, keys of `config.fleet`."""

    tensor_parallel: int = option(1, "GPUs of a vLLM server, each with a slice of every layer", "1")
    gpu_memory: float = option(
        0.0, "share of a GPU for a server; 0: the engine's choice, or 0.4 where allocation_mode "
        "puts the trainer on the same GPUs", "[0, 1)",
    )  # fmt: skip
    slots: int = option(64, "sequences decoded together on one server", "1")
    max_model_len: int = option(0, "tokens; 0: the model's context, in a run the two budgets")
    decode_steps: int = option(8, "tokens of a sequence in one jitted decode call", "1")
    kv_on_update: str = option("keep", "caches at an update; abort: send again", KV_POLICIES)


class EngineStopped(RuntimeError):
    """The engine is broken for good; `__cause__` is the error that broke it."""


class Engine(Protocol):
    """An asyncio-facing engine; every method is called from the server's event loop.

    Once the engine is broken for good, every method but `close` raises EngineStopped, and so do
    the streams under way.
    """

    async def start(self) -> None:
        """Load the model and compile; raises UserError when it cannot serve."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Stream chunks of all samples until each has a stop reason. Closing it aborts them.

        The request's fields are in the ranges that `wire.request_from` checks. Raises ValueError
        (with the remedy) before the first chunk for a request that this model cannot serve: token
        out of vocabulary, prompt longer than max_model_len.
        """
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Return the logprobs of `tokens[first:]` under the current weights, while others run.

        Of a reward model: its values after these tokens.

        Waits while the engine is paused. Cancelling it withdraws the request. Raises ValueError
        (with the remedy) for one that cannot be served: token out of vocabulary, longer than
        max_model_len.
        """
        ...

    async def pause(self) -> None:
        """Return once no decode step is running; running requests are kept."""
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    async def load(self, path: str, version: int, kv: str = "keep") -> int:
        """Replace the weights by a safetensors file with HF names, paused or decoding.

        Reading and checking (names, shapes, finite) go on while decoding; only the exchange
        happens between two decode steps. On ValueError nothing was touched: the old weights and
        version still serve. Any other error ends the engine, whose weights may be mixed. Tokens
        decoded afterwards carry `version`. A new request never reads the old weights' keys and
        values.

        Args:
          kv: what becomes of running requests: `keep` their cache, `recompute` it with the new
            weights, or `abort` them, for their clients to send again with the tokens so far.

        Returns:
          ns in which no decode step could run.
        """
        ...

    def status(self) -> EngineStatus:
        """Return the state now, and the spans since the last call."""
        ...

    async def close(self) -> None:
        """End the engine; running requests are aborted."""
        ...
