"""Choose what a train step recomputes, and how large its microbatches are, by a GPU's memory.

A choice is made once for a run, before its trainer is built, and config.json keeps it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlx.cli.text import size
from rlx.doctor.machine import Devices
from rlx.doctor.memory import RunSizes, whole_minibatch
from rlx.model import remat
from rlx.model.mesh import mesh_axes
from rlx.train.train_options import AUTO

LARGEST = 65_536  # tokens of a device; more than that hides nothing further
SHARE = 0.93  # of the memory; the rest is for two buckets of a publish, and for fragments
# Trainer → kinds of recomputation, from the least; torch recomputes everything or nothing.
KINDS = {"jax": ("none", *remat.KEPT), "torch": ("none", "full")}
REMAT, TOKENS = "model.remat", "train.max_tokens_per_microbatch"
Planned = Callable[[RunSizes], float]  # a run → bytes that an update needs on each device


class Fit(NamedTuple):
    """Recomputation and tokens of a train step."""

    keys: dict[str, Any]  # of the config, for those that it leaves open
    message: str  # why; "": the config names both


def decide(
    config: ConfigDict, sizes: RunSizes, devices: Devices, planned: Planned,
    begun: Mapping[str, Any] | None = None,
) -> Fit:  # fmt: skip
    """Return the values that the config leaves open, for the devices of all processes.

    `sizes` have the values of a CPU for these. A run with a checkpoint keeps what it has `begun`.
    """
    given = {REMAT: config.model.remat, TOKENS: config.train.max_tokens_per_microbatch}
    left = {key: value for key, value in given.items() if value in (AUTO, 0)}
    train, why = sizes.train, "as on a CPU"
    found: tuple[str, int] = train.remat, train.token_budget
    if begun:
        found, why = (begun[REMAT], begun[TOKENS]), "as the run began"
    elif left and devices.platform == "gpu" and devices.memory:
        room = SHARE * devices.memory
        whole = whole_minibatch(sizes, mesh_axes(train.mesh, devices.count))
        larger = [train.token_budget]
        while TOKENS in left and larger[-1] < whole and 2 * larger[-1] <= LARGEST:
            larger.append(2 * larger[-1])

        @cache
        def needed(kind: str, tokens: int) -> float:
            return planned(replace(sizes, train=replace(train, remat=kind, token_budget=tokens)))

        kinds = KINDS[config.trainer] if REMAT in left else (train.remat,)
        found = choose(kinds, larger, lambda *one: needed(*one) <= room)
        need = needed(*found)
        why = f"a step needs {size(int(need))} of {size(int(room))}" + "; none fits" * (need > room)
    chosen = dict(zip(given, found, strict=True))
    named = " and ".join(f"{key}={value} is {chosen[key]}" for key, value in left.items())
    return Fit({key: chosen[key] for key in left}, f"{named}: {why}" if left else "")


def choose(
    kinds: Sequence[str], tokens: Sequence[int], fits: Callable[[str, int], bool]
) -> tuple[str, int]:
    """Return the first kind that fits with the fewest tokens, and the most tokens that fit with it.

    Both ascend; where no pair fits, these are the last kind and the fewest tokens.
    """
    kind = next((kind for kind in kinds if fits(kind, tokens[0])), kinds[-1])
    return kind, next((n for n in tokens[:0:-1] if fits(kind, n)), tokens[0])
