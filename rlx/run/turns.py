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
from rlx.system.loop_thread import LoopThread
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

    Args:
      event: batch (the trainer needs the device), asleep, published (the servers have the weights),
        rested (the trainer has given up the device) or woken.
      level: of the sleep that `batch` begins.
    """
    phase = _TABLE.get((turn.phase, event))
    if phase is None or (event == "rested" and turn.blank):
        raise OutOfTurn(f"{event} in {turn}")
    if event == "batch":
        return replace(turn, phase=phase, level=level)
    blank = turn.blank or (event == "asleep" and turn.level == WEIGHTS)
    return replace(turn, phase=phase, blank=blank and event != "published")


def in_turns(config: ConfigDict, processes: int, devices: Devices) -> bool:
    """Return whether a trainer of these processes and devices takes turns with its servers.

    UserError where it cannot.
    """
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
    """Return whether a trainer's state has to leave its GPUs while the servers generate.

    Of its devices' memory, 0 if unknown, the servers have the share `gpu_memory`.
    """
    room = (1 - (gpu_memory or SHARED_MEMORY)) * devices.memory * devices.count
    return devices.platform == "gpu" and state_bytes > room


class Turns:
    """Takes the device from the servers, and gives it back.

    `rest` moves a train state to the host's memory; None: it stays.
    """

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
        """Wake the servers when the trainer has computed `state`; return it where it rests.

        `published` says whether the servers have taken its weights meanwhile.
        """
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
