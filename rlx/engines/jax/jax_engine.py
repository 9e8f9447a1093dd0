"""The JAX engine: continuous batching over fixed slots, on whatever device JAX finds.

    event loop                       engine thread                    JAX
    generate ── inbox ─────────────▶ Slots: admit ──────────────────▶ prefill, copy
        ▲                                  decode call ─────────────▶ `decode_steps` tokens a slot
        └── one callback per call ◀─────── accept: chunks
    score ── inbox ────────────────▶ Scoring: one chunk after each decode call
    pause, resume, swap ── inbox ──▶ taken between two decode calls

The engine thread owns slots, cache and weights; everybody else only puts messages in its inbox,
so nothing here needs a lock. Completions depend on (weights, prompt, seed, sample index) alone,
bit for bit: see slots.py, programs.py and rlx.engines.jax.decode for how.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlx.base import UserError
from rlx.engines import kv_memory
from rlx.engines.engine import EngineStopped
from rlx.engines.jax import decode
from rlx.engines.jax.programs import Programs, make_plan
from rlx.engines.jax.scoring import Job, Scoring
from rlx.engines.jax.slots import MAX_STOPS, Live, Slots, Start
from rlx.engines.request_checks import check_request, check_score, model_len
from rlx.engines.stop_strings import Decode, StopStrings, load_decode
from rlx.fleet.requests import Chunk, EngineStatus, Request, ScoreRequest, Scores
from rlx.model import compile_cache, hf

_T = TypeVar("_T")
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class JaxEngine:
    """An `Engine` (rlx.engines.engine) in this process.

    Args:
      model_path: HF directory.
      seed: of the seeds it picks for requests that have none.
      slots: sequences decoded together.
      max_model_len: tokens of prompt and completion together; 0: the model's context, at most
        checks.DEFAULT_MODEL_LEN.
      decode_steps: tokens a sequence gets in one decode call; new samples, pauses and new weights
        wait for the end of a call.
      dtype: float32 | bfloat16, of weights, activations and cache; logits are float32.
      clock: ns, of the spans in `status`.

    Attributes:
      model_path: the local HF directory.
    """

    def __init__(
        self,
        model_path: str,
        *,
        seed: int = 0,
        slots: int = 64,
        max_model_len: int = 0,
        decode_steps: int = 8,
        dtype: str = "float32",
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        for name, value in (("slots", slots), ("decode_steps", decode_steps)):
            if value < 1:
                raise UserError(f"{name}={value} is below 1; set it to 1 or more")
        if dtype not in _DTYPES:
            raise UserError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
        self.model_path = hf.resolve(model_path)
        self._asked_slots, self._asked_len, self._steps = slots, max_model_len, decode_steps
        self._dtype = _DTYPES[dtype]
        self._clock = clock
        self._seeds = np.random.default_rng(seed)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._spans: deque[tuple[str, int, int]] = deque(maxlen=100_000)
        self._live: set[Live] = set()  # event loop's
        self._scores: set[Job] = set()  # likewise
        self._failure: BaseException | None = None
        self._paused = self._closing = self._dirty = False
        self._version = self._generated = 0
        self._decode_text: Decode | None = None
        self._thread: threading.Thread | None = None

    # The event loop's side.

    async def start(self) -> None:
        """Loads the model and compiles; raises UserError when it cannot serve."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._prepare)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """See Engine.generate."""
        live = self._checked(request)
        sampling = request.sampling
        if sampling.max_new_tokens <= request.prefix_len:
            for index in range(request.first_index, request.first_index + request.n):
                yield Chunk(index, stop_reason="length")
            return
        if sampling.stop:
            minimum = sampling.min_new_tokens
            text = await asyncio.to_thread(self._text_decoder)
            live.stop_text = lambda: StopStrings(text, sampling.stop, minimum)
        live.sink = asyncio.Queue()
        self._check_alive()  # a thread that fails after this ends everything in `_live`
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
        """See Engine.score."""
        check_score(request, self._config.vocab_size, self._slots.max_model_len)
        await asyncio.to_thread(self._programs.prepare_score)
        self._check_alive()
        job = Job(request)
        self._scores.add(job)
        self._inbox.put(lambda: self._scoring.add(job))
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            self._scores.discard(job)

    async def pause(self) -> None:
        """See Engine.pause."""
        await self._ask(lambda: setattr(self, "_paused", True))

    async def resume(self) -> None:
        """Goes on decoding."""
        await self._ask(lambda: setattr(self, "_paused", False))

    async def load(self, path: str, version: int, kv: str = "keep") -> int:
        """See Engine.load."""
        start = self._clock()
        weights = await asyncio.to_thread(self._read, path)
        self._spans.append(("read weights", start, self._clock()))
        return await self._ask(lambda: self._swap(weights, version, kv))

    def status(self) -> EngineStatus:
        """See EngineStatus."""
        self._check_alive()
        spans = []
        while self._spans:
            spans.append(self._spans.popleft())
        return EngineStatus(
            version=self._version,
            running=self._slots.running,
            queued=self._slots.queued,
            slots=self._slots.count,
            max_model_len=self._slots.max_model_len,
            tokens_generated=self._generated,
            paused=self._paused,
            spans=tuple(spans),
        )

    def wait_compiled(self) -> None:
        """Blocks until nothing is being compiled in the background, for measurements."""
        self._programs.wait()

    async def close(self) -> None:
        """Ends the engine thread after its current decode call; running requests are aborted."""
        if self._thread and (self._thread.is_alive() or self._failure):
            self._inbox.put(lambda: setattr(self, "_closing", True))
            await asyncio.to_thread(self._thread.join)
            await asyncio.to_thread(self._programs.close)
        self._end_all()

    async def _ask(self, action: Callable[[], _T]) -> _T:
        """Runs `action` on the engine thread, between decode calls; gives its result."""
        done: Future[_T] = Future()

        def run():
            if not done.set_running_or_notify_cancel():  # whoever asked has left
                return
            try:
                self._check_alive()
                result = action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._inbox.put(run)
        self._check_alive()
        return await asyncio.wrap_future(done)

    def _check_alive(self) -> None:
        if self._failure:
            raise self._stopped() from self._failure

    def _stopped(self) -> EngineStopped:
        failure = self._failure
        what = f"{type(failure).__name__}: {failure}" if failure else "it was closed"
        return EngineStopped(f"the engine has stopped: {what}")

    def _checked(self, request: Request) -> Live:
        """The request ready for the queue; ValueError with the remedy if it cannot be served."""
        check_request(request, self._config.vocab_size, self._slots.max_model_len)
        sampling = request.sampling
        stops = tuple(dict.fromkeys((*self._config.eos_token_ids, *sampling.stop_token_ids)))
        if len(stops) > MAX_STOPS:
            raise ValueError(
                f"{len(stops)} stop tokens with the model's own; at most {MAX_STOPS} are possible"
            )
        seed = sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(1 << 62))
        return Live(request, seed, stops)

    def _text_decoder(self) -> Decode:
        if self._decode_text is None:
            try:
                self._decode_text = load_decode(self.model_path)
            except UserError as error:
                raise ValueError(str(error)) from error
        return self._decode_text

    # The engine thread's side.

    def _prepare(self) -> None:
        if not jax.config.values["jax_compilation_cache_dir"]:
            for name, value in compile_cache.options().items():
                jax.config.update(name, value)
        config = self._config = hf.load_config(self.model_path)
        longest = model_len(self._asked_len, config.max_position)
        plan = make_plan(self._asked_slots, longest, self._steps)
        try:
            self._params = self._read(str(self.model_path))
        except ValueError as error:
            raise UserError(str(error)) from error
        self._slots = Slots(plan.slots, self._steps, longest)
        self._programs = Programs(config, plan, self._steps, self._dtype)
        self._scoring = Scoring(self._programs)
        try:
            self._cache = self._programs.start(self._params)
        except (RuntimeError, MemoryError) as error:
            known = kv_memory.explained(error, config, plan, self._dtype)
            if known is None:
                raise
            raise known from error

    def _read(self, path: str) -> decode.ServingParams:
        """The weights of a safetensors file or HF directory, checked whole and in our layout."""
        try:
            with hf.open_tensors(path) as tensors:
                hf.check_tensors(tensors, self._config)
                params = decode.serving_params(_Finite(tensors), self._config, self._dtype)
        except UserError as error:
            raise ValueError(str(error)) from error
        return jax.block_until_ready(params)

    def _run(self) -> None:
        try:
            while not self._closing:
                busy = self._slots.running or self._slots.queued or self._scoring.pending
                self._take_messages(wait=self._paused or not busy)
                if not self._paused and not self._closing:
                    self._tick()
                    self._score()
        except BaseException as error:
            self._failure = error
            self._call_loop(self._end_all)
            while not self._inbox.empty():
                self._inbox.get()()
            raise

    def _take_messages(self, wait: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            message()
            wait = False

    def _tick(self) -> None:
        """Admits what fits, decodes once, hands out the tokens."""
        if self._slots.queued:
            self._admit()
        if not self._slots.running:
            return
        start = self._clock()
        self._compact()
        slots = self._slots
        shape = self._programs.choose(slots.used, slots.longest)
        inputs = slots.inputs()
        block, self._cache = self._programs.decode(self._params, self._cache, shape, inputs)
        results = slots.accept(block.tokens, block.logprobs, block.counts, self._version)
        self._dirty |= not np.isfinite(block.logprobs).all()
        self._generated += sum(len(chunk.tokens) for _, chunk in results)
        self._spans.append(("decode", start, self._clock()))
        self._call_loop(_deliver, results)

    def _score(self) -> None:
        """One chunk of what is to be scored."""
        if self._scoring.pending:
            start = self._clock()
            done = self._scoring.step(self._params, self._version)
            self._spans.append(("score", start, self._clock()))
            if done and done[0].future.set_running_or_notify_cancel():
                done[0].future.set_result(done[1])

    def _admit(self) -> None:
        start = self._clock()
        starts = self._slots.admit(self._version)
        copies = [(s.source, s.slot) for s in starts if s.source is not None]
        if copies:
            self._cache = self._programs.copy(self._cache, copies)
        prompts: dict[int, list[Start]] = {}  # a group's samples share their prompt's row
        for s in starts:
            if s.source is None:
                prompts.setdefault(id(s.sample.live), []).append(s)
        self._prefill([[s.slot for s in group] for group in prompts.values()])
        if starts:
            jax.block_until_ready(self._cache)  # so that the span is the work, not its dispatch
            self._spans.append(("prefill", start, self._clock()))

    def _prefill(self, groups: list[list[int]]) -> None:
        """Makes the cache of slots, those of a group from one sequence: all but its last token."""
        todo = []
        for slots in groups:
            sample = self._slots.samples[slots[0]]
            if sample and len(sample.tokens) > 1:
                todo.append((sample.tokens[:-1], slots))
        todo.sort(key=lambda item: len(item[0]))  # rows of a call cost as much as its longest
        wide = self._programs.prompts
        while todo:
            # Two calls of one prompt are cheaper than a wide one that is half empty.
            part = todo[: wide if len(todo) > wide // 2 else 1]
            todo = todo[len(part) :]
            rows = [tokens for tokens, _ in part]
            targets = [(row, slot) for row, (_, slots) in enumerate(part) for slot in slots]
            self._cache = self._programs.prefill(self._params, self._cache, rows, targets)

    def _compact(self) -> None:
        """Moves samples to the first slots when that lets a smaller program run."""
        buckets = self._programs.plan.slot_buckets
        enough = next(b for b in buckets if b >= self._slots.running)
        if self._slots.used > enough:
            moves = self._slots.moves(enough)
            if moves:
                self._cache = self._programs.copy(self._cache, moves)

    def _swap(self, params: decode.ServingParams, version: int, kv: str) -> int:
        start = self._clock()
        self._params, self._version = params, version
        self._scoring.restart()
        if self._dirty:
            self._cache, self._dirty = self._programs.scrub(self._cache), False
        if kv == "abort":
            for live in self._slots.clear():
                self._call_loop(live.sink.put_nowait, [])
        elif kv == "recompute":
            running = [(slot, s) for slot, s in enumerate(self._slots.samples) if s]
            self._prefill([[slot] for slot, _ in running])
            for _, sample in running:
                sample.prompt_version = version
            jax.block_until_ready(self._cache)
        end = self._clock()
        self._spans.append(("swap weights", start, end))
        return end - start

    def _call_loop(self, function: Callable, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed under us: nobody is listening
            self._closing = True

    def _end_all(self) -> None:
        """On the event loop: no chunk and no score will come any more."""
        for live in self._live:
            live.sink.put_nowait([])
        for job in self._scores:
            if not job.future.done():
                job.future.set_exception(self._stopped())


def _deliver(results: list[tuple[Live, Chunk]]) -> None:
    """On the event loop: gives every request its chunks of one decode call together."""
    for _, chunks in itertools.groupby(sorted(results, key=_identity), key=_identity):
        group = list(chunks)
        group[0][0].sink.put_nowait([chunk for _, chunk in group])


def _identity(result: tuple[Live, Chunk]) -> int:
    return id(result[0])


class _Finite(Mapping):
    """Tensors that are checked for NaN and infinity as they are read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        if not np.isfinite(tensor).all():
            raise UserError(f"tensor {name!r} has non-finite numbers; publish finite weights")
        return tensor

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
