"""Size of a KV cache, and error messages for a device without room for it. No JAX."""

import re
from typing import Any

import ml_dtypes as ml_dtypes  # gives numpy the name bfloat16
import numpy as np

from rlx.base import UserError
from rlx.model.model_config import ModelConfig

# XLA's words for a failed allocation, and for a computation that did not fit.
_DEVICE_FULL = re.compile("RESOURCE_EXHAUSTED|Out of memory")


def token_bytes(config: ModelConfig, dtype: Any) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * np.dtype(dtype).itemsize


def device_is_full(error: BaseException) -> bool:
    """Return whether `error` says that JAX ran out of a device's memory."""
    return isinstance(error, RuntimeError) and bool(_DEVICE_FULL.search(str(error)))


def explained(error: Exception, config: ModelConfig, plan: Any, dtype: Any) -> UserError | None:
    """Return the UserError for an engine without memory to start; None for another failure.

    Args:
      plan: rlx.engines.jax.cache_plan.CachePlan.
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
    """Return the remedy to append to vLLM's error, "" when memory cannot be the cause.

    EngineCore is a process of its own: it logs why it ended and reports only that it did.
    """
    if not re.search(r"memory|KV cache|core initialization failed", cause, re.IGNORECASE):
        return ""
    return (
        f"; {slots} sequences of {max_model_len} tokens were asked for: where the lines before "
        "this one speak of memory or KV cache, lower fleet.slots or fleet.max_model_len, or end "
        "what else uses the device"
    )
