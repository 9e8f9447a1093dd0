"""A real asyncio Engine without a model: each token is arithmetic, each logprob tells the weights.

    token_k   = hash(seed, index, k) mod vocab           (k: position in the completion)
    logprob_k = −scale / (1 + token_k)                   (scale: the one weight)
    score_k   = −scale / (1 + token_k) / temperature

so a completion continued elsewhere must equal the uninterrupted one, and the weights behind a
version are visible in the logprobs. Run as a program it is rlx.serve with this engine.
"""

import asyncio
import os
import sys
import time
import zlib

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from rlx.base import UserError
from rlx.fleet.engine import Chunk, EngineStatus, Request, ScoreRequest, Scores

VOCAB = 1000
STOP_TOKEN = 7


def token(seed: int, index: int, k: int) -> int:
    return zlib.crc32(f"{seed}/{index}/{k}".encode()) % VOCAB


def completion(seed: int, index: int, max_new_tokens: int) -> list[int]:
    tokens = []
    for k in range(max_new_tokens):
        tokens.append(token(seed, index, k))
        if tokens[-1] == STOP_TOKEN:
            break
    return tokens


class ArithmeticEngine:
    def __init__(
        self, *, slots=64, max_model_len=4096, decode_steps=4, step_seconds=0.0, clock=None
    ):
        self.clock = clock or time.monotonic_ns
        self.slots, self.max_model_len = slots, max_model_len or 4096
        self.decode_steps, self.step_seconds = decode_steps, step_seconds
        self.version, self.scale = 0, 1.0
        self.requests: list[Request] = []
        self.scored: list[ScoreRequest] = []
        self.loads: list[tuple[str, int, bool]] = []
        self.aborted = 0
        self.running = self.generated = 0
        self.abort_after: int | None = None  # tokens of one call, after which it says `abort`
        self.spans: list[tuple[str, int, int]] = []
        self._go = asyncio.Event()

    async def start(self):
        self._go.set()

    async def close(self):
        self._go.set()

    async def pause(self):
        self._go.clear()

    async def resume(self):
        self._go.set()

    async def load(self, path, version, kv="keep"):
        try:
            tensors = await asyncio.to_thread(load_file, path)
        except SafetensorError as error:
            raise ValueError(f"not a safetensors file: {error}") from error
        if set(tensors) - {"ballast"} != {"scale"}:
            raise ValueError(f"unexpected tensors {sorted(tensors)}; wanted scale")
        if not np.isfinite(tensors["scale"]).all():
            raise ValueError("scale is not finite")
        start = self.clock()
        self.scale, self.version = float(tensors["scale"].item()), version
        self.loads.append((str(path), version, kv))
        return self.clock() - start

    def status(self):
        spans, self.spans = tuple(self.spans), []
        return EngineStatus(
            version=self.version,
            running=self.running,
            queued=0,
            slots=self.slots,
            max_model_len=self.max_model_len,
            tokens_generated=self.generated,
            paused=not self._go.is_set(),
            spans=spans,
        )

    async def score(self, request: ScoreRequest):
        if request.tokens.max() >= VOCAB or request.tokens.min() < 0:
            raise ValueError(f"a token is outside the vocabulary of {VOCAB}")
        if len(request.tokens) > self.max_model_len:
            raise ValueError(f"{len(request.tokens)} tokens are too long")
        self.scored.append(request)
        await self._go.wait()
        await asyncio.sleep(self.step_seconds)
        logprobs = -self.scale / (1 + request.tokens[request.first :]) / request.temperature
        return Scores(logprobs.astype(np.float32), self.version)

    async def generate(self, request: Request):
        if request.prompt_tokens.max() >= VOCAB or request.prompt_tokens.min() < 0:
            raise ValueError(f"a prompt token is outside the vocabulary of {VOCAB}")
        if len(request.prompt_tokens) >= self.max_model_len:
            raise ValueError(f"prompt of {len(request.prompt_tokens)} tokens is too long")
        self.requests.append(request)
        seed = request.sampling.seed or 0
        live = {request.first_index + i: request.prefix_len for i in range(request.n)}
        made = 0
        self.running += request.n
        try:
            while live:
                await self._go.wait()
                start_ns = self.clock()
                await asyncio.sleep(self.step_seconds)
                self.spans.append(("decode", start_ns, self.clock()))
                for index in list(live):
                    chunk, live[index] = self._step(request, seed, index, live[index])
                    made += len(chunk.tokens)
                    if chunk.stop_reason:
                        del live[index]
                    yield chunk
                if self.abort_after is not None and made >= self.abort_after:
                    for index in live:
                        yield Chunk(index, stop_reason="abort")
                    return
        finally:
            self.aborted += len(live)
            self.running -= request.n

    def _step(self, request, seed, index, k):
        tokens, reason = [], None
        while len(tokens) < self.decode_steps and not reason:
            tokens.append(token(seed, index, k + len(tokens)))
            full = k + len(tokens) >= request.sampling.max_new_tokens
            reason = "stop" if tokens[-1] == STOP_TOKEN else "length" if full else None
        self.generated += len(tokens)
        logprobs = [-self.scale / (1 + t) for t in tokens]
        return Chunk(index, tokens, logprobs, [self.version] * len(tokens), reason), k + len(tokens)


def from_arguments(args):
    if args.model == "broken":
        raise UserError("no model in broken; give an HF directory")
    return ArithmeticEngine(
        slots=args.slots,
        max_model_len=args.max_model_len,
        decode_steps=args.decode_steps,
        step_seconds=float(os.environ.get("STEP_SECONDS", "0.005")),
    )


if __name__ == "__main__":
    from rlx import command, serve

    command.run(lambda: serve.main(sys.argv[1:], {"arithmetic": from_arguments}))
