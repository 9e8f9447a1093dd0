"""Turns of a trainer and its servers on one device, which has no room for both at work.

    servers   generate ─▶ sleep                               wake ─▶ generate
                            │                                  ▲
    trainer                 └─▶ train, publish, save ────────▶ rest

`follow` is the state machine, pure; `Turns` lets the servers sleep and wake. Unfinished requests
stay at the servers. New ones wait there, so admission and staleness are as without turns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ml_collections import ConfigDict

from rlx.base import refuse
from rlx.doctor.machine import Devices
from rlx.engines.engine import SLEEPS
from rlx.fleet.client import Fleet
from rlx.launch.allocation import SHARED_MEMORY
from rlx.system.threads import LoopThread
from rlx.train.contract import State

CACHE, WEIGHTS = 1, 2  # levels of sleep

# (phase, event) → next phase
_TABLE = {
    ("wake", "woken"): "generate",
    ("generate", "batch"): "sleep",
    ("sleep", "asleep"): "train",
    ("train", "published"): "train",
    ("train", "rested"): "wake",  # without new weights too, after a save
}


class OutOfTurn(RuntimeError):
    """The trainer or a server would compute in the other's turn; always a bug in rlx."""


@dataclass(frozen=True, slots=True)
class DeviceTurn:
    """The state of the turns; as servers start, they sleep and have weights."""

    phase: str = "wake"  # both wait in `wake` and in `sleep`
    level: int = CACHE  # of the last sleep
    blank: bool = False  # whether the servers have no weights


def follow(turn: DeviceTurn, event: str, level: int = CACHE) -> DeviceTurn:
    """Return the turn after an event; raise OutOfTurn where it must not happen.

    The trainer needs the device for a `batch`, and a sleep of `level` begins. Others are asleep,
    published (servers have the weights), rested (the trainer gives up the device) and woken.
    """
    phase = _TABLE.get((turn.phase, event))
    if phase is None or (event == "rested" and turn.blank):
        raise OutOfTurn(f"{event} in {turn}")
    if event == "batch":
        return replace(turn, phase=phase, level=level)
    blank = turn.blank or (event == "asleep" and turn.level == WEIGHTS)
    return replace(turn, phase=phase, blank=blank and event != "published")


def in_turns(config: ConfigDict, processes: int, devices: Devices) -> bool:
    """Return whether trainer and servers take turns on one device; UserError where they cannot."""
    if (sleep := config.fleet.sleep) == SLEEPS[0]:
        return False
    refuse((
        (processes > 1,
         f"fleet.sleep={sleep} with a trainer of {processes} processes: only one takes turns; "
         "set fleet.sleep=off"),
        (devices.platform == "gpu" and not config.allocation_mode,
         f"fleet.sleep={sleep} on a GPU without allocation_mode, which shares it; set "
         f"allocation_mode={config.fleet.engine}:d1|jax:f1, or fleet.sleep=off"),
    ))  # fmt: skip
    return True


def rests(state_bytes: int, devices: Devices, gpu_memory: float) -> bool:
    """Return whether a train state has to leave its GPUs, where servers have a share of memory."""
    room = (1 - (gpu_memory or SHARED_MEMORY)) * devices.memory * devices.count
    return devices.platform == "gpu" and state_bytes > room


class Turns:
    """Takes the device from the servers, and gives it back; `rest` moves a train state away."""

    def __init__(self, fleet: Fleet, loop: LoopThread, rest: Callable[[State], State] | None):
        self.turn = DeviceTurn()
        self._fleet, self._loop, self._rest = fleet, loop, rest

    def take(self, level: int = CACHE) -> None:
        """Let the servers sleep; return when the trainer may compute."""
        if self.turn.phase == "train":
            return
        self.turn = follow(self.turn, "batch", level)
        self._loop.run(self._fleet.set_sleep(level))
        self.turn = follow(self.turn, "asleep")

    def give(self, state: State, published: bool) -> State:
        """Wake the servers, with new weights if `published`; return `state` where it rests."""
        if self.turn.phase == "generate":
            return state
        if published:
            self.turn = follow(self.turn, "published")
        if self.turn.phase != "wake":
            self.turn = follow(self.turn, "rested")
        if self._rest:
            state = self._rest(state)
        self._loop.run(self._fleet.set_sleep(0))
        self.turn = follow(self.turn, "woken")
        return state
