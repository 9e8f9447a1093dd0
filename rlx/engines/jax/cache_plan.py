"""Sizes of the JAX engine's cache, and of the parts of it that its programs read. No JAX."""

from typing import NamedTuple

# Cache lengths are multiples of this. XLA on CPUs with AMX multiplies bfloat16 by another kernel,
# which adds in another order, where few queries meet an odd multiple of 32 keys.
_LENGTH_UNIT = 64


class CachePlan(NamedTuple):
    """Sizes that follow from the engine's options.

    Attributes:
      slots: in the cache; at least 2, because XLA multiplies a single row in another order. In
        bfloat16 with AMX so are fewer than 5: such an engine agrees with itself, not with a larger.
      length: positions in the cache.
      chunk: prompt positions computed together. prompt: places for the longest prompt.
      slot_buckets, length_buckets: ascending, the last is all.
    """

    slots: int
    length: int
    chunk: int
    prompt: int
    slot_buckets: tuple[int, ...]
    length_buckets: tuple[int, ...]


def make_plan(slots: int, max_model_len: int, steps: int) -> CachePlan:
    """Return the sizes for `slots` sequences of `max_model_len` tokens."""
    slots = max(slots, 2)
    chunk = 32 if max_model_len <= 512 else 128
    prompt = -(-max_model_len // chunk) * chunk
    # No room past max_model_len: only a sequence's last decode call reaches beyond it. XLA shifts
    # that write back to fit, over positions that are not read again.
    length = max(-(-max(prompt, max_model_len) // _LENGTH_UNIT) * _LENGTH_UNIT, steps)
    slot_buckets = tuple(b for b in (8, 16, 32, 64, 128, 256) if b <= slots * 2 // 3)
    shorter = (64, 128, 192, 256, 384, 512, 768, *(1024 * k for k in (1, 2, 4, 8, 16)))
    # XLA copies the part of the cache that a call reads: worth it up to half of the cache.
    length_buckets = tuple(n for n in shorter if n <= length // 2)
    return CachePlan(
        slots, length, chunk, prompt, (*slot_buckets, slots), (*length_buckets, length)
    )
