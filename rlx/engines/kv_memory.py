"""Sizes of a KV cache, and errors for a device that is too small for it."""

import re
from typing import Any, NamedTuple

import ml_dtypes as ml_dtypes  # registers bfloat16 with numpy
import numpy as np

from rlx.base import UserError
from rlx.model.model_config import ModelConfig

# XLA's words for a failed allocation, and for a computation that did not fit.
_DEVICE_FULL = re.compile("RESOURCE_EXHAUSTED|Out of memory")
# Cache lengths are multiples of this. XLA on CPUs with AMX multiplies bfloat16 by another kernel,
# which adds in another order, where few queries meet an odd multiple of 32 keys.
_LENGTH_UNIT = 64


class CachePlan(NamedTuple):
    """Sizes of the JAX engine's cache."""

    # At least 2, because XLA multiplies a single row in another order. In bfloat16 with AMX it does
    # so for fewer than 5 rows: such an engine agrees with itself, not with a larger one.
    slots: int
    length: int  # positions in the cache
    chunk: int  # prompt positions computed together
    prompt: int  # longest prompt, a multiple of `chunk`
    slot_buckets: tuple[int, ...]  # sizes of decode programs, ascending; the last is all
    length_buckets: tuple[int, ...]


def make_plan(slots: int, max_model_len: int, steps: int) -> CachePlan:
    """Return the sizes for `slots` sequences of `max_model_len` tokens."""
    slots = max(slots, 2)
    chunk = 32 if max_model_len <= 512 else 128
    prompt = -(-max_model_len // chunk) * chunk
    # No room past max_model_len: only a sequence's last decode call, or one with a guide, reaches
    # beyond it. XLA shifts a last write back to fit, over positions that are not read again.
    length = max(-(-max(prompt, max_model_len) // _LENGTH_UNIT) * _LENGTH_UNIT, steps)
    slot_buckets = tuple(b for b in (8, 16, 32, 64, 128, 256) if b <= slots * 2 // 3)
    shorter = (64, 128, 192, 256, 384, 512, 768, *(1024 * k for k in (1, 2, 4, 8, 16)))
    # XLA copies the part of the cache that a call reads: worth it up to half of the cache.
    length_buckets = tuple(n for n in shorter if n <= length // 2)
    return CachePlan(
        slots, length, chunk, prompt, (*slot_buckets, slots), (*length_buckets, length)
    )


def token_bytes(config: ModelConfig, dtype: Any) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * np.dtype(dtype).itemsize


def device_is_full(error: BaseException) -> bool:
    """Return whether JAX ran out of device memory."""
    return isinstance(error, RuntimeError) and bool(_DEVICE_FULL.search(str(error)))


def out_of_memory(
    error: Exception, config: ModelConfig, plan: CachePlan, dtype: Any
) -> UserError | None:
    """Return the UserError for an engine that ran out of memory at its start, else None."""
    if not device_is_full(error) and not isinstance(error, MemoryError):
        return None
    need = token_bytes(config, dtype) * plan.slots * plan.length / 1e9
    half = max(plan.slots // 2, 1)
    return UserError(
        f"out of memory for the KV cache: {plan.slots} slots of {plan.length} tokens need "
        f"{need:.2f} GB in addition to the weights; lower fleet.slots (with {half}: "
        f"{need * half / plan.slots:.2f} GB) or fleet.max_model_len, or use "
        "model.publish_dtype=bfloat16"
    )


def vllm_advice(cause: str, slots: int, max_model_len: int) -> str:
    """Return the remedy to append to an error of vLLM, "" if it has another cause than memory."""
    # EngineCore, a separate process, logs why it ended and reports only that it did.
    if not re.search(r"memory|KV cache|core initialization failed", cause, re.IGNORECASE):
        return ""
    return (
        f"; for {slots} sequences of {max_model_len} tokens: if the lines above mention memory or "
        "KV cache, lower fleet.slots or fleet.max_model_len, or end other programs on the device"
    )
