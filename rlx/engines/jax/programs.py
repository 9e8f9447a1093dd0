"""The compiled programs of the JAX engine: which shapes exist, and that they agree bit for bit.

    prefill  prompts of any length → slots, one or PROMPTS at a time
    decode   `steps` tokens for the first B slots over the first N cached positions
    append   what decode made → cache, in place
    copy     slots → slots, in place
    score    one sequence → the logprobs of its tokens, `chunk` at a time

Decode over all slots and positions always exists. Smaller shapes are faster when few slots are
in use or sequences are short; they are compiled in the background once they would have helped,
and used only after they gave exactly the bits of the full program on real inputs, so neither
timing nor the batch ever shows in a completion.
"""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx.engines.jax import decode, sampling
from rlx.engines.jax.slots import (
    BUDGET,
    LENGTH,
    MAX_STOPS,
    MINIMUM,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    Inputs,
)
from rlx.model.model_config import ModelConfig

PROMPTS = 4  # prompts of the wider prefill
TRIALS = 2  # decode calls in which a smaller shape must agree before it is used alone
_LENGTH_UNIT = 32  # cache lengths are multiples of this

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """A decode program: the first `slots` slots, the first `length` positions."""

    slots: int
    length: int


class Results(NamedTuple):
    """rlx.engines.jax.decode.Block on the host, of the first slots."""

    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray


class Plan(NamedTuple):
    """Sizes that follow from the engine's options.

    Attributes:
      slots: in the cache; at least 2, for XLA multiplies a single row in another order.
      length: positions in the cache.
      chunk: prompt positions computed together. prompt: longest prompt's places.
      slot_buckets, length_buckets: ascending, the last is all.
    """

    slots: int
    length: int
    chunk: int
    prompt: int
    slot_buckets: tuple[int, ...]
    length_buckets: tuple[int, ...]


def make_plan(slots: int, max_model_len: int, steps: int) -> Plan:
    """The sizes for `slots` sequences of `max_model_len` tokens."""
    slots = max(slots, 2)
    chunk = 32 if max_model_len <= 512 else 128
    prompt = -(-max_model_len // chunk) * chunk
    # No room past max_model_len: a decode call whose tokens reach beyond it is a sequence's last,
    # and what `append` then writes over, moved back by XLA to fit, nobody reads any more.
    length = max(-(-max(prompt, max_model_len) // _LENGTH_UNIT) * _LENGTH_UNIT, steps)
    slot_buckets = tuple(b for b in (8, 16, 32, 64, 128, 256) if b <= slots * 2 // 3)
    shorter = (32, 64, 96, 128, 192, 256, 384, 512, 768, *(1024 * k for k in (1, 2, 4, 8, 16)))
    # XLA copies the part of the cache that a call looks at: worth it for half, not for more.
    length_buckets = tuple(n for n in shorter if n <= length // 2)
    return Plan(slots, length, chunk, prompt, (*slot_buckets, slots), (*length_buckets, length))


class Programs:
    """Compiles and runs. One thread calls the running methods; compiling has its own.

    Args:
      config: of the model; plan: sizes; steps: tokens of a decode call; dtype: of the cache.
    """

    def __init__(self, config: ModelConfig, plan: Plan, steps: int, dtype: Any):
        self._config, self.plan, self._steps, self._dtype = config, plan, steps, dtype
        self._compiled: dict[Any, Callable] = {}
        self._agreed: dict[Shape, int] = {}
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._asked: set[Shape] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._params: decode.ServingParams | None = None
        self.prompts = PROMPTS  # how many `prefill` takes at most
        self._thread = threading.Thread(target=self._compile_wanted, daemon=True, name="compile")

    def start(self, params: decode.ServingParams) -> decode.Cache:
        """Compiles what every run needs; returns an empty cache."""
        self._params = jax.tree.map(_struct, params)
        for key in (self.full, ("append", self.plan.slots), ("prefill", 1), ("prefill", PROMPTS)):
            self._get(key)
        self._get("copy")
        self._agreed[self.full] = TRIALS
        cache = self._check_prefill(params, self._new_cache())
        self._thread.start()
        return cache

    def _check_prefill(self, params, cache: decode.Cache) -> decode.Cache:
        """Prompts are computed together only if that gives the bits each has alone."""
        rng = np.random.default_rng(0)
        size = (PROMPTS, min(self.plan.chunk, self.plan.prompt))
        prompts = rng.integers(0, self._config.vocab_size, size).tolist()
        cache = self.prefill(params, cache, prompts, [(0, 0), (PROMPTS - 1, 1)])
        together = [np.array(x[:2]) for x in jax.tree.leaves(cache)]
        for slot, prompt in enumerate((prompts[0], prompts[-1])):
            cache = self.prefill(params, cache, [prompt], [(0, slot)])
        alone = [np.asarray(x[:2]) for x in jax.tree.leaves(cache)]
        if any(a.tobytes() != b.tobytes() for a, b in zip(together, alone, strict=True)):
            log.warning("prompts computed together differ here; each is computed alone")
            self.prompts = 1
        return cache

    def wait(self) -> None:
        """Blocks until everything asked for so far is compiled."""
        done = threading.Event()
        self._wanted.put(done)
        done.wait()

    def close(self) -> None:
        """Ends the compiling thread, after what it is compiling now."""
        self._closed = True
        self._wanted.put(None)
        self._thread.join()

    @property
    def full(self) -> Shape:
        """The shape that covers every slot and position."""
        return Shape(self.plan.slots, self.plan.length)

    def _new_cache(self) -> decode.Cache:
        return decode.init_cache(self._config, self.plan.slots, self.plan.length, self._dtype)

    def prefill(
        self,
        params: decode.ServingParams,
        cache: decode.Cache,
        prompts: list[list[int]],
        targets: list[tuple[int, int]],
    ) -> decode.Cache:
        """Fills slots with the keys and values of at most `self.prompts` prompts.

        Args:
          prompts: token ids, each at most plan.prompt.
          targets: (prompt, slot) pairs.
        """
        rows = 1 if len(prompts) == 1 else PROMPTS
        tokens = np.zeros((rows, self.plan.prompt), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        chunks = -(-max(map(len, prompts)) // self.plan.chunk)
        pairs = self._pairs(targets)
        run = self._get(("prefill", rows))
        return run(params, cache, tokens, np.int32(chunks), pairs, np.int32(len(targets)))

    def copy(self, cache: decode.Cache, moves: list[tuple[int, int]]) -> decode.Cache:
        """Copies whole slots, (source, target) each, in order."""
        return self._get("copy")(cache, self._pairs(moves), np.int32(len(moves)))

    def scrub(self, cache: decode.Cache) -> decode.Cache:
        """The cache with non-finite numbers replaced: one of them would outlive its sequence."""
        return self._get("scrub")(cache)

    def prepare_score(self) -> None:
        """Compiles what `score` runs, unless that has been done; for any thread but the engine's,
        which decodes meanwhile."""
        self._get("score")

    def score(
        self,
        params: decode.ServingParams,
        cache: decode.Cache | None,
        tokens: np.ndarray,
        start: int,
        first: int,
        temperature: float,
    ) -> tuple[np.ndarray, decode.Cache]:
        """One chunk of a sequence: the logprobs of tokens start + 1 … start + chunk.

        Args:
          cache: what this returned for the chunk before; None for the first one.
          tokens: [T] int32, the whole sequence, T ≤ plan.prompt.
          start: a multiple of plan.chunk, below T − 1.
          first: in [1, T − 1]; chunks that end before it cost less and give zeros.

        Returns:
          [chunk] float32, meaningless after the sequence's end; and the cache.
        """
        chunk = self.plan.chunk
        part = np.zeros(chunk + 1, np.int32)
        known = tokens[start : start + chunk + 1]
        part[: len(known)] = known
        if cache is None:
            cache = decode.init_cache(self._config, 1, self.plan.prompt, self._dtype)
        logprobs, cache = self._get("score")(
            params, cache, part[None, :-1], part[1:], np.int32(start),
            np.bool_(start + chunk >= first), np.float32(temperature),
        )  # fmt: skip
        return np.asarray(logprobs), cache

    def choose(self, used: int, longest: int) -> Shape:
        """The smallest program for the first `used` slots and `longest` cached tokens.

        Asks for a smaller one to be compiled if that would have been it.
        """
        slots = next(b for b in self.plan.slot_buckets if b >= used)
        length = next(n for n in self.plan.length_buckets if n >= longest)
        best = Shape(slots, length)
        if self._usable(best):
            return best
        self._ask(best)
        others = [s for s in tuple(self._compiled) if isinstance(s, Shape) and self._usable(s)]
        fitting = [s for s in others if s.slots >= used and s.length >= longest]
        return min(fitting, key=lambda s: s.slots * (s.length + 256))

    def decode(
        self, params: decode.ServingParams, cache: decode.Cache, shape: Shape, inputs: Inputs
    ) -> tuple[Results, decode.Cache]:
        """One decode call; returns its results and the cache with its tokens appended.

        Args:
          inputs: of all slots; the shape takes the first of them.
        """
        block, recent = self._decode(params, cache, shape, inputs)
        if self._agreed.get(shape, 0) < TRIALS:
            block, recent = self._try(params, cache, shape, inputs, block, recent)
        slots = recent[0].keys.shape[0]
        append = self._get(("append", slots))
        cache = append(cache, recent, inputs.numbers[:slots, LENGTH])
        return Results(*(np.asarray(array) for array in block)), cache

    def _decode(self, params, cache, shape: Shape, inputs: Inputs):
        return self._get(shape)(params, cache, Inputs(*(array[: shape.slots] for array in inputs)))

    def _try(self, params, cache, shape: Shape, inputs: Inputs, block, recent):
        """Runs the full program too and counts whether the smaller one gave the same bits."""
        full_block, full_recent = self._decode(params, cache, self.full, inputs)
        if _same((block, recent), (full_block, full_recent), shape.slots, np.asarray(block.counts)):
            self._agreed[shape] = self._agreed.get(shape, 0) + 1
        else:
            log.warning("decode shape %s differs from the full one here; it is not used", shape)
            self._agreed[shape] = -1
        return full_block, full_recent

    def _usable(self, shape: Shape) -> bool:
        return shape in self._compiled and self._agreed.get(shape, 0) >= 0

    def _pairs(self, pairs: list[tuple[int, int]]) -> np.ndarray:
        array = np.zeros((self.plan.slots, 2), np.int32)
        array[: len(pairs)] = pairs
        return array

    def _ask(self, key: Shape) -> None:
        if key not in self._asked:
            self._asked.add(key)
            self._wanted.put(key)

    def _compile_wanted(self) -> None:
        while (key := self._wanted.get()) is not None:
            if self._closed:
                return
            if isinstance(key, threading.Event):
                key.set()
                continue
            try:
                self._get(("append", key.slots))
                self._get(key)
            except Exception:  # only speed is lost; what runs now keeps running
                log.exception("cannot compile %s; it is not used", key)

    def _get(self, key: Any) -> Callable:
        """The compiled program, compiling it now if need be."""
        found = self._compiled.get(key)
        if found is None:
            with self._lock:
                found = self._compiled.get(key) or self._compile(key)
                self._compiled[key] = found
        return found

    def _compile(self, key: Any) -> Callable:
        slots, steps = self.plan.slots, self._steps
        cache = jax.eval_shape(self._new_cache)
        pairs = jax.ShapeDtypeStruct((slots, 2), jnp.int32)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        if isinstance(key, Shape):
            program = jax.jit(partial(_decode, self._config, steps, key))
            return program.lower(self._params, cache, _idle(key.slots, steps)).compile()
        match key:
            case ("append", rows):
                recent = jax.eval_shape(
                    partial(decode.init_recent, self._config, rows, steps, self._dtype)
                )
                lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
                append = jax.jit(decode.append, donate_argnums=0)
                return append.lower(cache, recent, lengths).compile()
            case ("prefill", rows):
                tokens = jax.ShapeDtypeStruct((rows, self.plan.prompt), jnp.int32)
                prefill = jax.jit(partial(_prefill, self._config, self.plan), donate_argnums=1)
                args = (self._params, cache, tokens, count, pairs, count)
                return prefill.lower(*args).compile()
            case "copy":
                return jax.jit(_copy, donate_argnums=0).lower(cache, pairs, count).compile()
            case "score":
                row = jax.eval_shape(
                    partial(decode.init_cache, self._config, 1, self.plan.prompt, self._dtype)
                )
                tokens = jax.ShapeDtypeStruct((1, self.plan.chunk), jnp.int32)
                targets = jax.ShapeDtypeStruct((self.plan.chunk,), jnp.int32)
                wanted = jax.ShapeDtypeStruct((), jnp.bool_)
                temperature = jax.ShapeDtypeStruct((), jnp.float32)
                score = jax.jit(partial(_score, self._config), donate_argnums=1)
                return score.lower(
                    self._params, row, tokens, targets, count, wanted, temperature
                ).compile()
            case "scrub":
                scrub = jax.jit(partial(jax.tree.map, jnp.nan_to_num), donate_argnums=0)
                return scrub.lower(cache).compile()
        raise KeyError(key)


def _decode(config: ModelConfig, steps: int, shape: Shape, params, cache, inputs: Any):
    numbers, chances = inputs.numbers, inputs.chances
    cache = decode.view(cache, shape.slots, shape.length)

    def choose(logits, index):
        draws = jax.lax.dynamic_index_in_dim(inputs.uniforms, index, 1, keepdims=False)
        early = (index < numbers[:, MINIMUM])[:, None]
        banned = jnp.where(early, inputs.stops, -1)
        restriction = sampling.Restriction(chances[:, TOP_P], numbers[:, TOP_K], banned)
        return sampling.draw(logits, draws, chances[:, TEMPERATURE], restriction)

    return decode.decode(
        params, config, cache, numbers[:, TOKEN], numbers[:, LENGTH], numbers[:, BUDGET],
        inputs.stops, choose, steps,
    )  # fmt: skip


def _prefill(config: ModelConfig, plan: Plan, params, cache, tokens, chunks, pairs, count):
    prompts = decode.prefill(params, config, tokens, chunks, plan.chunk)
    return decode.insert(cache, prompts, pairs[:, 0], pairs[:, 1], count)


def _score(config: ModelConfig, params, cache, tokens, targets, start, wanted, temperature):
    return decode.score(params, config, cache, tokens, targets, start, wanted, temperature)


def _copy(cache, pairs, count):
    return decode.copy(cache, pairs[:, 0], pairs[:, 1], count)


def _idle(slots: int, steps: int) -> Inputs:
    """The inputs of slots that want nothing: for their shapes."""
    return Inputs(
        np.zeros((slots, 5), np.int32),
        np.ones((slots, 2), np.float32),
        np.full((slots, MAX_STOPS), -1, np.int32),
        np.zeros((slots, steps), np.float32),
    )


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _same(one, other, slots: int, counts: np.ndarray) -> bool:
    """Whether two results agree bit for bit where the first `slots` slots hold real tokens."""
    (block, recent), (other_block, other_recent) = one, other
    if not np.array_equal(counts, np.asarray(other_block.counts)[:slots]):
        return False
    real = np.arange(block.tokens.shape[1]) < counts[:, None]

    def agree(a, b, where):
        a, b = np.asarray(a), np.asarray(b)[:slots]
        return bool(
            ((a.view(np.uint8) == b.view(np.uint8)).reshape(*a.shape, -1).all(-1) | ~where).all()
        )

    pairs = zip(jax.tree.leaves(recent), jax.tree.leaves(other_recent), strict=True)
    return (
        agree(block.tokens, other_block.tokens, real)
        and agree(block.logprobs, other_block.logprobs, real)
        and all(agree(a, b, real[:, None, :, None]) for a, b in pairs)
    )
