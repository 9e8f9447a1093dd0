"""Protocol between a rollout server and the engine that produces its tokens.

The gRPC server depends on this alone; the JAX engine and the vLLM engine implement it.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from rlx.fleet.requests import Chunk, EngineStatus, Request, ScoreRequest, Scores


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
