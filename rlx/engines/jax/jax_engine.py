"""The JAX engine: continuous batching over fixed slots, on JAX's default device.

    event loop                       engine thread                    JAX
    generate ── inbox ─────────────▶ Slots: admit ──────────────────▶ prefill, copy
        ▲                                  decode call ─────────────▶ `decode_steps` tokens a slot
        └── one callback per call ◀─────── accept: chunks
    score ── inbox ────────────────▶ one chunk of the first sequence after each decode call
    pause, resume, swap ── inbox ──▶ taken between two decode calls

The engine thread owns slots, cache and weights; the event loop only puts messages in its inbox, so
no lock is needed. On a CPU completions depend on (weights, prompt, seed, sample index) only, bit
for bit; see slots.py, programs.py and decode.py. On a GPU they differ by rounding.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlx.base import UserError
from rlx.engines.engine import NO_WEIGHTS, EngineOptions
from rlx.engines.jax import guides
from rlx.engines.jax.programs import Programs
from rlx.engines.jax.serving_params import ServingParams, serving_params
from rlx.engines.jax.slots import MAX_STOPS, LiveRequest, Slots, SlotStart
from rlx.engines.kv_memory import make_plan, out_of_memory
from rlx.engines.model_engine import ModelEngine
from rlx.fleet.requests import Chunk, EngineStatus, Request, ScoreRequest, Scores
from rlx.model import compile_cache, directory, hf

_T = TypeVar("_T")
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class JaxEngine(ModelEngine):
    """An `Engine` (rlx.engines.engine) in this process."""

    def __init__(
        self,
        model_path: str,  # model_path, slots, max_model_len, clock: as ModelEngine
        *,
        seed: int = 0,  # of the seeds for requests without one
        slots: int = EngineOptions.slots,
        max_model_len: int = 0,
        # Per sequence and decode call; new samples, pauses and weights wait for the end of a call.
        decode_steps: int = EngineOptions.decode_steps,
        dtype: str = "float32",  # or bfloat16; of weights, activations, cache; logits are float32
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        super().__init__(model_path, slots, max_model_len, clock)
        if decode_steps < 1:
            raise UserError(f"decode_steps={decode_steps} is below 1; set it to 1 or more")
        if dtype not in _DTYPES:
            raise UserError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
        self._steps, self._dtype = decode_steps, _DTYPES[dtype]
        self._plan = make_plan(slots, self._max_model_len, decode_steps)
        self._seeds = np.random.default_rng(seed)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: set[LiveRequest] = set()  # the event loop's
        self._scores: set[Future[Scores]] = set()  # the event loop's
        self._unscored: deque[tuple[ScoreRequest, Future[Scores]]] = deque()
        self._scoring: Iterator[np.ndarray | None] | None = None  # of the first of these
        self._params: Any = None  # while they sleep, and before the start
        self._cache: Any = None
        self._closing = False
        self._dirty = False  # whether the cache may have non-finite numbers
        self._thread: threading.Thread | None = None
        self._compile_guide: Callable[[str], guides.Guide] | None = None

    # On the event loop.

    async def start(self) -> None:
        """See Engine.start; a second call does nothing."""
        if self._thread:
            return
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._prepare)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        live = self._checked(request)
        live.stop_text = await self._stop_strings(request)
        if request.sampling.guide:
            live.guide = await asyncio.to_thread(self._guide, request)
        live.sink = asyncio.Queue()
        self._check_alive()  # if the thread fails later, it ends everything in `_live`
        self._live.add(live)
        self._inbox.put(lambda: self._slots.add(live))
        unfinished = set(range(request.first_index, request.first_index + request.n))
        try:
            while unfinished:
                chunks = await live.sink.get()
                self._check_alive()
                for chunk in chunks or [Chunk(i, stop_reason="abort") for i in unfinished]:
                    if chunk.stop_reason:
                        unfinished.discard(chunk.index)
                    yield chunk
        finally:
            self._live.discard(live)
            if unfinished:
                self._inbox.put(lambda: self._slots.cancel(live))

    async def score(self, request: ScoreRequest) -> Scores:
        self._check_score(request)
        if request.adapter:
            raise ValueError("adapter is not supported by the JAX engine; use --engine=vllm")
        values = self._config.value_head
        if values:  # a value belongs to the token before it: score one more token
            longer = np.append(request.tokens, np.int32(0))
            request = replace(request, tokens=longer, first=request.first + 1)
        await asyncio.to_thread(self._programs.prepare_score)
        self._check_alive()
        future: Future[Scores] = Future()  # to cancel it withdraws the request
        self._scores.add(future)
        self._inbox.put(lambda: self._unscored.append((request, future)))
        try:
            return replace(await asyncio.wrap_future(future), values=values)
        finally:
            self._scores.discard(future)

    async def pause(self, level: int = 0) -> None:
        """See Engine.pause; level 1 keeps the weights where they are."""
        await self._ask(lambda: self._sleep(level))

    async def resume(self) -> None:
        if self._params is None:
            raise ValueError(NO_WEIGHTS)
        await self._ask(partial(setattr, self, "_paused", False))

    async def load(self, path: str, version: int, kv: str = "keep") -> int:
        start = self._clock()
        weights = await asyncio.to_thread(self._read, path)
        self._spans.append(("read weights", start, self._clock()))
        return await self._ask(lambda: self._swap(weights, version, kv), fatal=True)

    def status(self) -> EngineStatus:
        slots = self._slots
        return self._status(running=slots.running, queued=slots.queued, slots=slots.count)

    def wait_compiled(self) -> None:
        """Block until background compilation is finished."""
        self._programs.wait()

    async def close(self) -> None:
        """See Engine.close; waits for the current decode call."""
        if self._thread and (self._thread.is_alive() or self._failure):
            self._inbox.put(partial(setattr, self, "_closing", True))
            await asyncio.to_thread(self._thread.join)
            await asyncio.to_thread(self._programs.close)
            # Servers end without `atexit`.
            await asyncio.to_thread(compile_cache.check, only_new=True)
        self._end_all()

    async def _ask(self, action: Callable[[], _T], fatal: bool = False) -> _T:
        """Run `action` between decode calls; return its result. A `fatal` error ends the engine."""
        done: Future[_T] = Future()

        def run():
            if not done.set_running_or_notify_cancel():  # the caller was cancelled
                return
            try:
                self._check_alive()
                result = action()
            except Exception as error:
                if fatal and not self._failure:
                    self._failure = error
                    done.set_exception(self._stopped())
                    raise
                done.set_exception(error)
            else:
                done.set_result(result)

        self._inbox.put(run)
        self._check_alive()
        return await asyncio.wrap_future(done)

    def _checked(self, request: Request) -> LiveRequest:
        """Return `request` ready for the queue; raise ValueError if it is refused."""
        self._check_request(request)
        for name in ("top_logprobs", "adapter"):
            if getattr(request.sampling, name):
                raise ValueError(f"{name} is not supported by the JAX engine; use --engine=vllm")
        stops = self._stop_tokens(request.sampling)
        if len(stops) > MAX_STOPS:
            raise ValueError(
                f"{len(stops)} stop tokens including the model's own; give at most {MAX_STOPS}"
            )
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(1 << 62))
        return LiveRequest(request, seed, stops)

    def _guide(self, request: Request) -> guides.Guide:
        """Return the guide of a request's schema; raise ValueError."""
        self._compile_guide = self._compile_guide or guides.compiler(self.model_path, self._config)
        return self._compile_guide(request.sampling.guide).begin(request.prefix)

    # On the engine thread, except `_prepare` and `_read`, for which asyncio has threads.

    def _prepare(self) -> None:
        if not jax.config.values["jax_compilation_cache_dir"]:
            for name, value in compile_cache.options().items():
                jax.config.update(name, value)
        config, plan, start = self._config, self._plan, self._clock()
        try:
            self._params = self._read(str(self.model_path))
        except ValueError as error:
            raise UserError(str(error)) from error
        self._slots = Slots(plan.slots, self._steps, self._max_model_len)
        self._programs = Programs(config, plan, self._steps, self._dtype)
        try:
            self._cache = self._programs.start(self._params)
        except (RuntimeError, MemoryError) as error:
            failure = out_of_memory(error, config, plan, self._dtype)
            if failure is None:
                raise
            raise failure from error
        self._spans.append(("load and compile", start, self._clock()))

    def _read(self, path: str) -> ServingParams:
        """Return the weights of a safetensors file or HF directory; ValueError for unfit ones."""
        try:
            with hf.open_tensors(path) as tensors:
                directory.check_tensors(tensors, self._config)
                params = serving_params(tensors, self._config, self._dtype)
        except UserError as error:
            raise ValueError(str(error)) from error
        return jax.block_until_ready(params)

    def _run(self) -> None:
        try:
            while not self._closing:
                busy = self._slots.running or self._slots.queued or self._unscored
                self._take_messages(wait=self._paused or not busy)
                if not self._paused and not self._closing:
                    self._tick()
                    self._score()
        except BaseException as error:
            self._failure = error
            self._call_loop(self._end_all)
            self._take_messages(wait=False)
            raise

    def _take_messages(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            self._inbox.get()()
            wait = False

    def _tick(self) -> None:
        """Admit waiting samples, make a decode call, deliver its tokens."""
        if self._cache is None:  # it slept; not in `resume`, which has a deadline
            start = self._clock()
            self._cache = self._programs.new_cache()
            self._recompute()
            self._spans.append(("prefill", start, self._clock()))
        if self._slots.queued:
            self._admit()
        if not self._slots.running:
            return
        start = self._clock()
        self._compact()
        slots = self._slots
        shape = self._programs.choose(slots.used, slots.longest, slots.kind)
        inputs = slots.inputs()
        block, self._cache = self._programs.decode(self._params, self._cache, shape, inputs)
        results = slots.accept(
            block.tokens, block.logprobs, block.counts, self._version, block.kept,
            self._config.vocab_size,
        )  # fmt: skip
        self._dirty |= not np.isfinite(block.logprobs).all()
        self._generated += sum(len(chunk.tokens) for _, chunk in results)
        self._spans.append(("decode", start, self._clock()))
        self._call_loop(_deliver, results)

    def _score(self) -> None:
        """Score one chunk of the first waiting sequence."""
        if not self._unscored:
            return
        (request, future), start = self._unscored[0], self._clock()
        if not future.cancelled():
            self._scoring = self._scoring or self._programs.score(self._params, request)
            logprobs = next(self._scoring)
            self._spans.append(("score", start, self._clock()))
            if logprobs is None:
                return
            if future.set_running_or_notify_cancel():
                future.set_result(Scores(logprobs, self._version))
        self._unscored.popleft()
        self._scoring = None

    def _admit(self) -> None:
        start = self._clock()
        starts = self._slots.admit(self._loads)
        copies = [(s.source, s.slot) for s in starts if s.source is not None]
        if copies:
            self._cache = self._programs.copy(self._cache, copies)
        prompts: dict[LiveRequest, list[SlotStart]] = {}  # samples share their prompt's row
        for s in starts:
            if s.source is None:
                prompts.setdefault(s.sample.live, []).append(s)
        self._prefill([[s.slot for s in group] for group in prompts.values()])
        if starts:
            jax.block_until_ready(self._cache)  # for the span
            self._spans.append(("prefill", start, self._clock()))

    def _prefill(self, groups: list[list[int]]) -> None:
        """Fill each group of slots with a sequence's keys and values, without its last token."""
        todo = []
        for slots in groups:
            sample = self._slots.samples[slots[0]]
            if sample and len(sample.tokens) > 1:
                todo.append((sample.tokens[:-1], slots))
        todo.sort(key=lambda item: len(item[0]))  # every row costs as much as the longest
        wide = self._programs.prompts
        while todo:
            # Two calls of one prompt are cheaper than a wide call that is half empty.
            part = todo[: wide if len(todo) > wide // 2 else 1]
            todo = todo[len(part) :]
            rows = [tokens for tokens, _ in part]
            targets = [(row, slot) for row, (_, slots) in enumerate(part) for slot in slots]
            self._cache = self._programs.prefill(self._params, self._cache, rows, targets)

    def _compact(self) -> None:
        """Move samples to the first slots if a smaller program can then run."""
        buckets = self._programs.plan.slot_buckets
        enough = next(b for b in buckets if b >= self._slots.running)
        if self._slots.used > enough:
            self._cache = self._programs.copy(self._cache, self._slots.moves(enough))

    def _swap(self, params: ServingParams, version: int, kv: str) -> int:
        start = self._clock()
        self._params, self._version, self._loads = params, version, self._loads + 1
        self._scoring = None  # begins again
        if self._dirty:
            self._cache, self._dirty = self._programs.scrub(self._cache), False
        if kv == "abort":
            for live in self._slots.clear():
                self._call_loop(live.sink.put_nowait, [])
        elif kv == "recompute" and self._cache is not None:  # else `_tick` does
            self._recompute()
        end = self._clock()
        self._spans.append(("swap weights", start, end))
        return end - start

    def _recompute(self) -> None:
        """Compute the caches of running samples by the current weights."""
        running = [(slot, s) for slot, s in enumerate(self._slots.samples) if s]
        self._prefill([[slot] for slot, _ in running])
        for _, sample in running:
            sample.prompt_load = self._loads
        jax.block_until_ready(self._cache)

    def _sleep(self, level: int) -> None:
        self._paused = True
        if level > 1:
            self._params = None
        if level:
            jax.block_until_ready(self._cache)  # what is in use would be freed later
            self._cache, self._dirty = None, False
            self._scoring = None  # begins again

    def _call_loop(self, function: Callable, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed
            self._closing = True

    def _end_all(self) -> None:
        """End every stream and fail every score; call it on the event loop."""
        for live in self._live:
            live.sink.put_nowait([])
        for future in self._scores:
            if not future.done():
                future.set_exception(self._stopped())


def _deliver(results: list[tuple[LiveRequest, Chunk]]) -> None:
    """Give every request its chunks of one decode call; call it on the event loop."""
    chunks: dict[LiveRequest, list[Chunk]] = {}
    for live, chunk in results:
        chunks.setdefault(live, []).append(chunk)
    for live, new in chunks.items():
        live.sink.put_nowait(new)
