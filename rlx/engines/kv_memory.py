"""How much memory a KV cache takes, and what to say when there is not so much. No JAX."""

import re
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.model.model_config import ModelConfig

# XLA's two ways to say it: of an allocation, and of a computation that it could not begin.
_DEVICE_FULL = re.compile("RESOURCE_EXHAUSTED|Out of memory")


def token_bytes(config: ModelConfig, dtype: Any) -> int:
    """Bytes of one token's keys and values in all layers."""
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * np.dtype(dtype).itemsize


def device_is_full(error: BaseException) -> bool:
    """Whether JAX (whose error is a RuntimeError) ran out of a device's memory."""
    return isinstance(error, RuntimeError) and bool(_DEVICE_FULL.search(str(error)))


def explained(error: Exception, config: ModelConfig, plan: Any, dtype: Any) -> UserError | None:
    """The UserError for an engine that found no room to start; None for another failure.

    Args:
      plan: with `slots` and `length`, as rlx.engines.jax.programs has it.
    """
    if not device_is_full(error) and not isinstance(error, MemoryError):
        return None
    whole = token_bytes(config, dtype) * plan.slots * plan.length
    half = max(plan.slots // 2, 1)
    return UserError(
        f"no memory for the KV cache: {plan.slots} slots of {plan.length} tokens need "
        f"{whole / 1e9:.2f} GB beside the weights; lower fleet.slots (with {half}: "
        f"{whole / 1e9 * half / plan.slots:.2f} GB) or fleet.max_model_len, or use "
        "model.publish_dtype=bfloat16"
    )


def vllm_advice(cause: str, slots: int, max_model_len: int) -> str:
    """What to add to vLLM's own words for a start that failed, where memory may be why.

    EngineCore is a process of its own, which writes why it ended and tells us only that it did.
    """
    if not re.search(r"memory|KV cache|core initialization failed", cause, re.IGNORECASE):
        return ""
    return (
        f"; {slots} sequences of {max_model_len} tokens were asked for: where the lines before "
        "this one speak of memory or KV cache, lower fleet.slots or fleet.max_model_len, or end "
        "what else uses the device"
    )
