"""The device, its peak rates, the time of a function on it, and packed rows for timing."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.doctor.gpu_cards import CARDS, peak_flops


def device() -> dict[str, Any]:
    """Return the device's name, its peaks (FLOP/s, bytes/s) and their source."""
    first = jax.devices()[0]
    peak = peak_flops(first.device_kind, "bfloat16")
    alike = (card for name, card in CARDS.items() if name.upper() in first.device_kind)
    found = next((card for card in alike if card.flops == peak), None)  # no other form of it
    flops, bytes_per_second = (peak, found.bandwidth) if found else _measured()
    return {
        "kind": first.device_kind,
        "platform": first.platform,
        "jax": jax.__version__,
        "flops": flops,
        "bytes_per_second": bytes_per_second,
        "peaks_from": "table" if found else "measured",
    }


def _measured() -> tuple[float, float]:
    """Return FLOP/s of a matrix product in bfloat16 and bytes/s of a copy."""
    size = 8192 if jax.default_backend() == "gpu" else 512
    x = jnp.ones((size, size), jnp.bfloat16)
    product = seconds(jax.jit(lambda x: x @ x), x)
    return 2 * size**3 / product, 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def seconds(function: Callable[..., Any], *arguments: Any, calls: int = 5) -> float:
    """Return the seconds of one call: the median of three rounds of `calls`, after a warm-up.

    All calls of a round are dispatched before the first is waited for.
    """
    jax.block_until_ready(function(*arguments))
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*arguments)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)


def segments(rows: int, length: int, padding: bool = False) -> np.ndarray:
    """Return segment ids [rows, length] int32: of ½, ¼, ⅛ and ⅛ of a row, the first ones longer.

    Args:
      padding: the last eighth is padding (0).
    """
    ids = np.repeat([1, 2, 3, 0 if padding else 4], [length // n for n in (2, 4, 8, 8)])
    return np.tile(ids.astype(np.int32), (rows, 1))
