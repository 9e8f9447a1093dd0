"""Decide what `auto` means for a run: the dtype of products, recomputation, sizes of microbatches.

A choice is made once for a run, before its trainer is built, and config.json keeps it. Parameters,
sums, norms, logits and the optimizer are float32 with either dtype.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlx.cli.text import size
from rlx.doctor.gpu_cards import peak_flops
from rlx.doctor.machine import Devices
from rlx.doctor.memory import RunSizes, whole_minibatch
from rlx.model import remat
from rlx.model.mesh import mesh_axes
from rlx.model.model_config import ModelConfig
from rlx.run import trainers
from rlx.train.train_options import AUTO

GAIN = 1.5  # how much faster bfloat16 must be to be worth its rounding
_REPEATS, _SECONDS, _FLOPS = 10, 0.3, 5e8  # at most, of a probe and of its products
_BLOCK = 8  # products that are timed together
LARGEST = 65_536  # tokens of a device; more than that hides nothing further
SHARE = 0.93  # of the memory; the rest is for two buckets of a publish, and for fragments
# Trainer → kinds of recomputation, from the least; torch recomputes everything or nothing.
KINDS = {"jax": ("none", *remat.KEPT), "torch": ("none", "full")}
REMAT, TOKENS = "model.remat", "train.max_tokens_per_microbatch"
Planned = Callable[[RunSizes], float]  # a run → bytes that an update needs on each device


class Precision(NamedTuple):
    """The dtypes of a run, and its devices."""

    dtypes: dict[str, Any]  # key of `config.model` → float32 | bfloat16
    message: str  # why `auto` is this dtype; "": the config names it
    devices: int  # number, in all processes
    peak: float  # FLOP/s of all together; 0: unknown

    def speed(self, metrics: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """Return the metrics of an update that took `seconds`, by its tokens and FLOPs."""
        rate = metrics["n_tokens"] / seconds / self.devices
        mfu = {"mfu": metrics["model_flops"] / seconds / self.peak} if self.peak else {}
        return {"update_seconds": seconds, "tokens_per_second_per_device": rate, **mfu}


def decide_dtypes(
    config: ConfigDict, model: ModelConfig, devices: Devices, before: str = "", processes: int = 1
) -> Precision:
    """Return the dtypes that `auto` means; on a CPU measure products for up to half a second."""
    setting = config.model.compute_dtype  # `before` is the dtype with which the run began, or ""
    fixed, native = setting.replace(AUTO, before.replace(AUTO, "")), devices.has_bfloat16
    width, inner = model.model_dim, model.expert_dim or model.mlp_dim
    fewer = max(16, int(_FLOPS / (2 * width * inner)))
    shape = min(config.train.max_tokens_per_microbatch or fewer, fewer), width, inner
    work = {"float32": 0.0, "bfloat16": 0.0}  # seconds of a product; 0: not measured
    if devices.platform == "cpu":
        tried = [fixed] if fixed else [*work][: 1 + native]
        product = trainers.library(config).product
        work |= _product_seconds({dtype: product(shape, dtype) for dtype in tried})
    dtype = fixed or choose_dtype(native, **work)
    peak = devices.count * peak_flops(devices.kind, dtype)  # devices of all `processes`
    if work[dtype]:  # not by the clock: servers start meanwhile
        peak = processes * len(os.sched_getaffinity(0)) * 2 * math.prod(shape) / work[dtype]
    why = "as the run began" if fixed else f"bfloat16 is {'' if native else 'not '}native here"
    if all(work.values()):
        gain = work["float32"] / work["bfloat16"]
        why = f"products in bfloat16 are {gain:.1f} times as fast as in float32"
    message = f"model.compute_dtype=auto is {dtype}: {why}" * (setting == AUTO)
    keys = "compute_dtype", "publish_dtype"
    dtypes = {key: config.model[key].replace(AUTO, dtype) for key in keys}
    return Precision(dtypes, message, devices.count, peak)


def _product_seconds(products: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return dtype → median seconds of processor time, in all threads, of its product."""
    times: dict[str, list[float]] = {dtype: [] for dtype in products}
    end = time.monotonic() + _SECONDS
    for n, (dtype, product) in enumerate([*products.items()] * _REPEATS):  # the first ones compile
        if n < 3 * len(products) or time.monotonic() < end:
            times[dtype].append(_timed(product))
    return {dtype: statistics.median(samples) for dtype, samples in times.items()}


def _timed(run: Callable[[], Any]) -> float:
    """Return a call's seconds of processor time, which other processes lengthen less."""
    start = time.process_time()
    for _ in range(_BLOCK):  # the kernel counts other threads' time in ticks of some milliseconds
        run()
    return (time.process_time() - start) / _BLOCK


def choose_dtype(native: bool, float32: float, bfloat16: float) -> str:
    """Return the dtype by native bfloat16 and a product's processor seconds in each; 0: unknown."""
    return "bfloat16" if native and float32 >= GAIN * bfloat16 else "float32"


class Fit(NamedTuple):
    """Recomputation and tokens of a train step."""

    keys: dict[str, Any]  # of the config, for those that it leaves open
    message: str  # why; "": the config names both


def decide_microbatches(
    config: ConfigDict, sizes: RunSizes, devices: Devices, planned: Planned,
    before: Mapping[str, Any] | None = None,
) -> Fit:  # fmt: skip
    """Return the values that the config leaves open, for the devices of all processes.

    `sizes` have the values of a CPU for these. A run with a checkpoint keeps those of `before`.
    """
    values = {REMAT: config.model.remat, TOKENS: config.train.max_tokens_per_microbatch}
    left = {key: value for key, value in values.items() if value in (AUTO, 0)}
    train, why = sizes.train, "as on a CPU"
    choice: tuple[str, int] = train.remat, train.token_budget
    if before:
        choice, why = (before[REMAT], before[TOKENS]), "as the run began"
    elif left and devices.platform == "gpu" and devices.memory:
        room = SHARE * devices.memory
        minibatch = whole_minibatch(sizes, mesh_axes(train.mesh, devices.count))
        larger = [train.token_budget]
        while TOKENS in left and larger[-1] < minibatch and 2 * larger[-1] <= LARGEST:
            larger.append(2 * larger[-1])

        @cache
        def needed(kind: str, tokens: int) -> float:
            return planned(replace(sizes, train=replace(train, remat=kind, token_budget=tokens)))

        kinds = KINDS[config.trainer] if REMAT in left else (train.remat,)
        choice = choose(kinds, larger, lambda *one: needed(*one) <= room)
        need = needed(*choice)
        why = f"a step needs {size(int(need))} of {size(int(room))}" + "; none fits" * (need > room)
    chosen = dict(zip(values, choice, strict=True))
    text = " and ".join(f"{key}={value} is {chosen[key]}" for key, value in left.items())
    return Fit({key: chosen[key] for key in left}, f"{text}: {why}" if left else "")


def choose(
    kinds: Sequence[str], tokens: Sequence[int], fits: Callable[[str, int], bool]
) -> tuple[str, int]:
    """Return the first kind that fits with the fewest tokens, and the most tokens that fit with it.

    Both ascend; where no pair fits, these are the last kind and the fewest tokens.
    """
    kind = next((kind for kind in kinds if fits(kind, tokens[0])), kinds[-1])
    return kind, next((n for n in tokens[:0:-1] if fits(kind, n)), tokens[0])
