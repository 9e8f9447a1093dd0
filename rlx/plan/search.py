"""Find the split of GPUs between servers and trainer that trains fastest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from rlx.base import UserError
from rlx.cli.text import size
from rlx.doctor import memory
from rlx.doctor.gpu_cards import LARGEST_SHARE, Card
from rlx.doctor.machine import Devices
from rlx.doctor.memory import RunSizes
from rlx.launch.allocation import SHARED_MEMORY, Allocation, Part, settings
from rlx.launch.local import cpu_plan
from rlx.plan.simulate import Lengths, Prediction, Setup, simulate
from rlx.plan.speeds import Calibration, ServerSpeed, TrainerSpeed
from rlx.rollout.staleness import Limits

HOST = 8  # GPUs of a host
SIMULATED = 6  # allocations that look best by arithmetic are simulated
_FSDP = 64  # GPUs that one copy of the trained weights is cut over at most


class Measured(NamedTuple):
    """How a run's seconds differ from those by the data sheet."""

    servers: float = 1.0  # measured seconds for one of the data sheet
    trainer: float = 1.0
    publish: float = 0.0  # further seconds


@dataclass(frozen=True)
class Workload:
    """A run, on GPUs of one kind."""

    sizes: RunSizes  # of its trainer and servers, for memory
    card: Card
    limits: Limits
    lengths: Lengths
    prompt_tokens: float
    slots: int
    forwards: float  # passes of the proximal and the reference policy
    trainer: str = "jax"  # or torch
    tool_seconds: float = 0.0
    turns: int = 1
    observed: float = 0.0  # tokens that each turn but the first adds
    recompute: bool = False
    calibration: Calibration = Calibration()  # noqa: RUF009
    measured: Measured = Measured()  # noqa: RUF009
    shared_tokens: float = 0.0  # first tokens that the trainer computes once for a group
    cores: int = 0  # of a CPU that servers and trainer divide; 0: they have GPUs
    fanout: int = 1  # of weights, `fleet.relay_fanout`

    @cached_property
    def recomputed(self) -> float:
        """Share of the forward pass that the backward pass repeats."""
        return {"none": 0.0, "full": 1.0}.get(self.sizes.train.remat, 0.3)

    def setup(self, split: Allocation) -> Setup:
        """Return what to simulate for an allocation."""
        serves, trains = sorted(split.parts, key=lambda part: part.trains)
        share = SHARED_MEMORY if split.shared else 0.85
        model, card, fitted = self.sizes.model, self.card, self.calibration
        serve, train, latency = self.measured
        if self.cores:
            cores = cpu_plan(range(self.cores), serves.gpus)
            serve *= serves.gpus / len({*chain(*cores.servers)})
            train /= len(cores.trainer)
        return Setup(
            self.limits, self.sizes.n_samples, serves.sizes.get("d", 1), self.slots,
            ServerSpeed(model, card, serves.each, fitted, share, serve),
            TrainerSpeed(model, card, trains.gpus, fitted, self.forwards, self.recomputed,
                         self.sizes.train.minibatches, train, self.sizes.n_samples,
                         self.shared_tokens, self.fanout),
            self.lengths, self.prompt_tokens, self.tool_seconds, self.turns, self.observed,
            split.shared, self.recompute, latency=latency,
        )  # fmt: skip

    def trainer_bytes(self, split: Allocation) -> int:
        """Return a bound of the bytes on each of the trainer's GPUs."""
        mesh, gpus = str(settings(split)["train.mesh"]), self.setup(split).training.gpus
        sizes = replace(self.sizes, train=replace(self.sizes.train, mesh=mesh))
        devices = Devices("gpu", self.card.kind, gpus, self.card.memory, "9.0")
        return memory.bound(sizes, devices)


@dataclass(frozen=True)
class SplitPlan:
    """An allocation, and what is expected of it."""

    allocation: Allocation
    prediction: Prediction
    trainer_bytes: int

    @property
    def trainer_gpus(self) -> int:
        """GPUs of the trainer."""
        return sum(part.gpus for part in self.allocation.parts if part.trains)

    @property
    def longest_idle(self) -> float:
        """Share of a step that the trainer waits, or the servers do if that is more."""
        return max(self.prediction.trainer_idle, self.prediction.servers_idle)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds a step of each phase, by the names of `report_speed.measured_phases`."""
        means, step = self.prediction, self.prediction.step_seconds
        wait, generate = step * means.trainer_idle, step * (1 - means.servers_idle)
        seconds = {"step": step, "train": step - wait, "wait": wait, "generate": generate}
        return seconds | {"publish": means.publish_seconds}


def best(work: Workload, gpus: int) -> list[SplitPlan]:
    """Return the simulated plans for `gpus` GPUs, fastest first; UserError if none fits."""
    fitting = sorted(_fitting(work, gpus), key=lambda split: _arithmetic(work.setup(split)))
    if not fitting:
        raise _nothing_fits(work, gpus)
    plans = [plan(work, split) for split in fitting[:SIMULATED]]
    return sorted(plans, key=lambda p: p.prediction.step_seconds)


def plan(work: Workload, split: Allocation) -> SplitPlan:
    """Return what is expected of one allocation."""
    return SplitPlan(split, simulate(work.setup(split)), work.trainer_bytes(split))


def refit(work: Workload, split: Allocation, measured: Mapping[str, float]) -> Workload:
    """Return the workload with the speeds that a run on this allocation measured, seconds."""
    for _ in range(3):  # busy times depend on each other
        predicted, (serve, train, publish) = plan(work, split).seconds, work.measured
        serve *= measured["generate"] / max(predicted["generate"], 1e-9)
        train *= measured["train"] / max(predicted["train"], 1e-9)
        publish += measured.get("publish", predicted["publish"]) - predicted["publish"]
        work = replace(work, measured=Measured(serve, train, max(0.0, publish)))
    return work


def _fitting(work: Workload, gpus: int) -> Iterator[Allocation]:
    """Yield the allocations of all `gpus` GPUs whose weights, state and caches fit."""
    for tensor in (n for n in (1, 2, 4, 8) if n <= gpus):
        # Whole hosts for the trainer, if there are several.
        for trainer_gpus in range(HOST, gpus, HOST) if gpus > HOST else range(1, gpus):
            split = allocation(work.trainer, gpus - trainer_gpus, tensor, trainer_gpus)
            if split and fits(work, split):
                yield split
        if gpus == 1 or work.limits.max_staleness == 0:  # 0: they never work together
            split = allocation(work.trainer, gpus, tensor, gpus, shared=True)
            if split and fits(work, split):
                yield split


def allocation(
    trainer: str, serving: int, tensor: int, trainer_gpus: int, shared: bool = False
) -> Allocation | None:
    """Return servers of `tensor` GPUs and a trainer; None if the numbers do not divide."""
    servers, cut = serving // tensor, min(trainer_gpus, _FSDP)
    if not servers or serving % tensor or trainer_gpus % cut:
        return None
    serves, trains = (
        {letter: n for letter, n in sizes.items() if n > 1}
        for sizes in ({"d": servers, "t": tensor}, {"d": trainer_gpus // cut, "f": cut})
    )
    return Allocation((Part("vllm", False, serves), Part(trainer, True, trains)), shared)


def fits(work: Workload, split: Allocation) -> bool:
    """Return whether an allocation's weights and state fit, with room for one longest answer."""
    server = work.setup(split).server
    needed = work.trainer_bytes(split) + (server.weights if split.shared else 0)
    return server.kv_tokens > work.sizes.longest and needed < LARGEST_SHARE * work.card.memory


def _arithmetic(setup: Setup) -> float:
    """Return the seconds of a step without tails and waiting, to sort allocations by."""
    limits, mean = setup.limits, setup.lengths.mean
    live = min(max(1, limits.concurrency), (limits.max_staleness + 1) * limits.batch_prompts)
    context = (setup.prompt_tokens + setup.given + mean) / 2
    room = setup.server.kv_tokens / context
    running = max(min(live * setup.samples / setup.servers, setup.slots, room), 1e-3)
    speed = running / setup.server.decode_seconds(running, running * context) * setup.servers
    trajectories = limits.batch_prompts * setup.samples
    lengths = np.full(trajectories, setup.given + mean)
    generating, training = trajectories * mean / speed, setup.training.seconds(lengths)
    # Synchronous, they wait for each other.
    return generating + training if not limits.max_staleness else max(generating, training)


def _nothing_fits(work: Workload, gpus: int) -> UserError:
    """Return the error with the fewest GPUs that would do."""
    for more in (n for n in (2, 4, 8, *range(16, 1025, 8)) if n > gpus):
        if split := next(_fitting(work, more), None):
            return UserError(
                f"a model of {size(memory.exported(work.sizes))} and its training do not fit "
                f"{gpus} × {work.card.kind}; {more} do: --gpus={more}, {split}"
            )
    what = f"neither servers nor trainer of this model fit any number of {work.card.kind}"
    remedy = "give a larger --gpu, lora.rank, or a smaller train.max_tokens_per_microbatch"
    return UserError(f"{what}; {remedy}")
