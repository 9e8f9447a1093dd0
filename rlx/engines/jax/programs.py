"""Compiled programs of the JAX engine, and the check that they agree.

    prefill  prompts of any length → slots, one or PROMPTS at a time
    decode   `steps` tokens for the first B slots over the first N cached positions
    append   result of decode → cache, in place
    take     slot → prompt, and insert, prompt → slots, in place: together a copy of a slot
    score    one sequence → the logprobs of its tokens, `chunk` at a time

Decode over all slots and positions always exists. Smaller shapes are faster if few slots are in use
or sequences are short. They are compiled in the background when they would help. They are used
after they agreed with the full program on real inputs. On a CPU that means the same bits, so a
completion depends neither on timing nor on the batch. On a GPU, whose libraries add in an order
that depends on the shape, log-probabilities must agree within NATS, and prompts are not compared.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlx.engines.jax import decode, kv_cache, sampling, slots
from rlx.engines.jax.serving_params import ServingParams, shapes
from rlx.engines.kv_memory import CachePlan
from rlx.fleet.requests import ScoreRequest
from rlx.model.model_config import ModelConfig
from rlx.model.ops import on_cpu

PROMPTS = 4  # rows of the wider prefill
TRIALS = 2  # decode calls in which a smaller shape must agree before it replaces the full one
# Log-probabilities of a token by two programs differ by up to 0.3 nats in bfloat16 (mismatch.md).
NATS = 0.5

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Key of a decode program over the first `slots` slots and `length` positions."""

    slots: int
    length: int
    kind: int = 0  # PLAIN; MASKS: it returns the tokens drawn from; GUIDED: and takes `allowed`


class Programs:
    """Compiles and runs the programs; one thread runs them, another compiles."""

    def __init__(self, config: ModelConfig, plan: CachePlan, steps: int, dtype: Any):
        self._config, self.plan, self._steps, self._dtype = config, plan, steps, dtype
        self._compiled: dict[Any, Callable] = {}
        self._agreed: dict[Shape, int] = {}  # calls equal to the full program's; −1: one was not
        self._asked: dict[Shape, Future[None]] = {}  # smaller shapes, compiled or to be compiled
        self._background = ThreadPoolExecutor(1, "compile")
        self._lock = threading.Lock()
        self._param_shapes = shapes(config, dtype)
        self.prompts = PROMPTS  # most that `prefill` takes

    def start(self, params: ServingParams) -> kv_cache.Cache:
        """Compile the programs that are always needed; return a cache."""
        if self._config.value_head:  # only scores
            self._get("score")
            return self.new_cache()
        for key in (self.full, ("append", self.plan.slots), ("prefill", 1), ("prefill", PROMPTS)):
            self._get(key)
        self._get("take"), self._get("insert")
        kinds = slots.PLAIN, slots.MASKS, slots.GUIDED
        self._agreed |= {self.full._replace(kind=kind): TRIALS for kind in kinds}
        cache = self.new_cache()
        return self._check_prefill(params, cache) if on_cpu() else cache

    def _check_prefill(self, params, cache: kv_cache.Cache) -> kv_cache.Cache:
        """Set `self.prompts` to 1 if prompts computed together have other bits than one by one."""
        rng = np.random.default_rng(0)
        size = (PROMPTS, min(self.plan.chunk, self.plan.prompt))
        prompts = rng.integers(0, self._config.vocab_size, size).tolist()
        cache = self.prefill(params, cache, prompts, [(0, 0), (PROMPTS - 1, 1)])
        together = [np.array(x[:2]) for x in jax.tree.leaves(cache)]
        for slot, prompt in enumerate((prompts[0], prompts[-1])):
            cache = self.prefill(params, cache, [prompt], [(0, slot)])
        alone = [np.asarray(x[:2]) for x in jax.tree.leaves(cache)]
        if any(a.tobytes() != b.tobytes() for a, b in zip(together, alone, strict=True)):
            log.warning("prompts computed together differ here; each is computed by itself")
            self.prompts = 1
        return cache

    def wait(self) -> None:
        """Block until all requested programs are compiled."""
        wait(tuple(self._asked.values()))

    def close(self) -> None:
        """End the compiling thread after its current program."""
        self._background.shutdown(cancel_futures=True)

    @property
    def full(self) -> Shape:
        """Shape of all slots and positions."""
        return Shape(self.plan.slots, self.plan.length)

    def new_cache(self) -> kv_cache.Cache:
        """Return an empty cache, for a model that generates."""
        if self._config.value_head:
            return ()
        return kv_cache.init_cache(self._config, self.plan.slots, self.plan.length, self._dtype)

    def prefill(
        self,
        params: ServingParams,
        cache: kv_cache.Cache,
        prompts: list[list[int]],  # token ids, each at most plan.prompt
        targets: list[tuple[int, int]],  # (prompt, slot) pairs
    ) -> kv_cache.Cache:
        """Fill slots with the keys and values of at most `self.prompts` prompts."""
        rows = 1 if len(prompts) == 1 else PROMPTS
        tokens = np.zeros((rows, self.plan.prompt), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        chunks = -(-max(map(len, prompts)) // self.plan.chunk)
        pairs = self._pairs(targets)
        run = self._get(("prefill", rows))
        return run(params, cache, tokens, np.int32(chunks), pairs, np.int32(len(targets)))

    def copy(self, cache: kv_cache.Cache, moves: list[tuple[int, int]]) -> kv_cache.Cache:
        """Copy slots, (source, target) pairs in order."""
        for source, target in moves:
            row = self._get("take")(cache, np.int32(source))
            cache = self._get("insert")(cache, row, self._pairs([(0, target)]), np.int32(1))
        return cache

    def scrub(self, cache: kv_cache.Cache) -> kv_cache.Cache:
        """Replace non-finite numbers in the cache, which would outlive their sequence."""
        return self._get("scrub")(cache)

    def prepare_score(self) -> None:
        """Compile `score`; call it on another thread than the engine's."""
        self._get("score")

    def score(
        self, params: ServingParams, request: ScoreRequest
    ) -> Iterator[NDArray[np.float32] | None]:
        """Score a sequence of at most plan.prompt tokens, `chunk` of them at a time.

        Yields None after each chunk but the last, then the logprobs of tokens[first:], nats.
        """
        tokens, chunk = request.tokens, self.plan.chunk
        cache, chunks = kv_cache.init_cache(self._config, 1, self.plan.prompt, self._dtype), []
        for start in range(0, len(tokens) - 1, chunk):
            part = np.zeros(chunk + 1, np.int32)
            stretch = tokens[start : start + chunk + 1]
            part[: len(stretch)] = stretch
            logprobs, cache = self._get("score")(
                params, cache, part[None, :-1], part[1:], np.int32(start),
                np.bool_(start + chunk >= request.first), np.float32(request.temperature),
            )  # fmt: skip
            chunks.append(np.asarray(logprobs))
            if start + chunk < len(tokens) - 1:
                yield None
        yield np.concatenate(chunks)[request.first - 1 : len(tokens) - 1]

    def choose(self, used: int, longest: int, kind: int = slots.PLAIN) -> Shape:
        """Return the smallest usable program for the first `used` slots, `longest` cached tokens.

        If a smaller one is possible, start to compile it.
        """
        slots = next(b for b in self.plan.slot_buckets if b >= used)
        length = next(n for n in self.plan.length_buckets if n >= longest)
        best, full = Shape(slots, length, kind), self.full._replace(kind=kind)
        if best == full or self._usable(best):
            return best
        if best not in self._asked:
            self._asked[best] = self._background.submit(self._compile_smaller, best)
        others = [s for s in tuple(self._compiled) if isinstance(s, Shape) and self._usable(s)]
        fitting = [s for s in others if s.slots >= used and s.length >= longest and s.kind == kind]
        return min(fitting, key=lambda s: s.slots * (s.length + 256), default=full)

    def decode(
        self, params: ServingParams, cache: kv_cache.Cache, shape: Shape, inputs: slots.DecodeInputs
    ) -> tuple[decode.Block, kv_cache.Cache]:
        """Make a decode call; return its block, on the host, and the cache with its tokens."""
        block, recent = self._decode(params, cache, shape, inputs)
        if self._agreed.get(shape, 0) < TRIALS:
            block, recent = self._try(params, cache, shape, inputs, block, recent)
        rows = recent[0].keys.shape[0]
        lengths = inputs.numbers[:rows, slots.LENGTH]
        # A sequence with a guide goes on after such a call, of which it takes one token.
        late = inputs.allowed is not None and lengths.max() + self._steps > self.plan.length
        append = self._get(("append", rows, True) if late else ("append", rows))
        cache = append(cache, recent, lengths)
        return jax.tree.map(np.asarray, block), cache

    def _decode(self, params, cache, shape: Shape, inputs: slots.DecodeInputs):
        return self._get(shape)(params, cache, jax.tree.map(lambda x: x[: shape.slots], inputs))

    def _try(self, params, cache, shape: Shape, inputs: slots.DecodeInputs, block, recent):
        """Run the full program too; record whether the smaller one agrees with it."""
        full = self.full._replace(kind=shape.kind)
        full_block, full_recent = self._decode(params, cache, full, inputs)
        if on_cpu():
            results = (block, recent), (full_block, full_recent)
            agrees = _same(*results, shape.slots, np.asarray(block.counts))
        else:  # at temperature 0, because rounding changes which token a random number draws
            greedy = inputs._replace(chances=inputs.chances * np.array([0, 1], np.float32))
            agrees = _near(*(self._decode(params, cache, s, greedy)[0] for s in (shape, full)))
        if agrees:
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

    def _compile_smaller(self, shape: Shape) -> None:
        try:
            self._get(("append", shape.slots))
            self._get(shape)
        except Exception:  # the full program remains
            log.exception("cannot compile %s; it is not used", shape)

    def _get(self, key: Any) -> Callable:
        """Return a program; compile it if it is missing."""
        program = self._compiled.get(key)
        if program is None:
            with self._lock:
                if (program := self._compiled.get(key)) is None:
                    function, donated, args = self.program(key)
                    program = jax.jit(function, donate_argnums=donated).lower(*args).compile()
                    self._compiled[key] = program
        return program

    def program(self, key: Any) -> tuple[Callable, tuple[int, ...], tuple]:
        """Return the function of a Shape or a case below, donated arguments, argument shapes."""
        config, plan, steps, params = self._config, self.plan, self._steps, self._param_shapes
        cache = jax.eval_shape(self.new_cache)
        pairs, count = _ints(plan.slots, 2), _ints()
        if isinstance(key, Shape):
            inputs = slots.idle_inputs(key.slots, steps)
            if key.kind == slots.GUIDED:
                bits = np.zeros((key.slots, -(-config.vocab_size // 8)), np.uint8)
                inputs = inputs._replace(allowed=bits)
            return partial(_decode, config, steps, key), (), (params, cache, inputs)
        match key:
            case ("append", rows, *past_end):
                recent = partial(kv_cache.init_recent, config, rows, steps, self._dtype)
                append = partial(kv_cache.append, past_end=bool(past_end))
                return append, (0,), (cache, jax.eval_shape(recent), _ints(rows))
            case ("prefill", rows):
                tokens = _ints(rows, plan.prompt)
                prefill = partial(_prefill, config, plan)
                return prefill, (1,), (params, cache, tokens, count, pairs, count)
            case "take":
                return kv_cache.take, (), (cache, count)
            case "insert":
                row = jax.eval_shape(kv_cache.take, cache, 0)
                return kv_cache.insert, (0,), (cache, row, pairs, count)
            case "score":
                row = partial(kv_cache.init_cache, config, 1, plan.prompt, self._dtype)
                wanted = jax.ShapeDtypeStruct((), jnp.bool_)
                temperature = jax.ShapeDtypeStruct((), jnp.float32)
                args = (_ints(1, plan.chunk), _ints(plan.chunk), count, wanted, temperature)
                function = partial(decode.score, config=config)
                return function, (1,), (params, jax.eval_shape(row), *args)
            case "scrub":
                return partial(jax.tree.map, jnp.nan_to_num), (0,), (cache,)
        raise KeyError(key)


def _decode(config: ModelConfig, steps: int, shape: Shape, params, cache, inputs: Any):
    numbers, chances = inputs.numbers, inputs.chances
    cache = kv_cache.view(cache, shape.slots, shape.length)

    def choose(logits, index):
        draws = jax.lax.dynamic_index_in_dim(inputs.uniforms, index, 1, keepdims=False)
        early = (index < numbers[:, slots.MINIMUM])[:, None]
        banned = jnp.where(early, inputs.stops, -1)
        masked = numbers[:, slots.MASKED] > 0 if shape.kind else None
        restriction = sampling.Restriction(
            chances[:, slots.TOP_P], numbers[:, slots.TOP_K], banned, masked, inputs.allowed
        )
        return sampling.draw(logits, draws, chances[:, slots.TEMPERATURE], restriction)

    return decode.decode(
        params, config, cache, numbers[:, slots.TOKEN], numbers[:, slots.LENGTH],
        numbers[:, slots.BUDGET], inputs.stops, choose, steps, bool(shape.kind),
    )  # fmt: skip


def _prefill(config: ModelConfig, plan: CachePlan, params, cache, tokens, chunks, pairs, count):
    prompts = decode.prefill(params, config, tokens, chunks, plan.chunk)
    return kv_cache.insert(cache, prompts, pairs, count)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _near(one: decode.Block, other: decode.Block) -> bool:
    """Return whether two greedy calls agree within NATS, up to the first other token of a slot."""
    slots, steps = one.tokens.shape
    one, other = (jax.tree.map(lambda x: np.asarray(x)[:slots], block) for block in (one, other))
    mask = np.arange(steps) < np.minimum(one.counts, other.counts)[:, None]
    same = np.logical_and.accumulate(one.tokens == other.tokens, axis=1)
    mask[:, 1:] &= same[:, :-1]  # the largest log-probability is compared whichever token has it
    a, b = one.logprobs[mask], other.logprobs[mask]
    return np.allclose(a, b, rtol=0, atol=NATS, equal_nan=True)


def _same(one, other, slots: int, counts: np.ndarray) -> bool:
    """Return whether two results agree bit for bit in the tokens of the first `slots` slots."""
    (block, recent), (other_block, other_recent) = one, other
    if not np.array_equal(counts, np.asarray(other_block.counts)[:slots]):
        return False
    real = np.arange(block.tokens.shape[1]) < counts[:, None]

    def agree(a, b, where):
        a, b = np.asarray(a), np.asarray(b)[:slots]
        where = np.broadcast_to(where, a.shape)
        return a[where].tobytes() == b[where].tobytes()

    pairs = zip(jax.tree.leaves(recent), jax.tree.leaves(other_recent), strict=True)
    return (
        agree(block.tokens, other_block.tokens, real)
        and agree(block.logprobs, other_block.logprobs, real)
        and (block.kept is None or agree(block.kept, other_block.kept, real[..., None]))
        and all(agree(a, b, real[:, None, :, None]) for a, b in pairs)
    )
