"""What a run asks of its trainer: one interface, whoever computes. Neither JAX nor torch here."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlx.base import Group
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets

State = Any  # a trainer's own: parameters, optimizer, counters, on its devices


class Update(Protocol):
    """A trainer. Calls are made in one order, by one thread at a time.

    On many hosts every process makes the same calls in the same order (rlx/train/conductor.py), the
    iteration over `weights` included.

    Attributes:
      model: of what is trained; a reward model's has a value head.
      devices: how many there are and of which kind, for the run's records.
      state_bytes: of the whole state, on all devices together.
    """

    model: ModelConfig
    devices: str
    state_bytes: int

    def init(self) -> State:
        """Return the state before the first update, with the weights that the run begins with."""

    def restore(self, path: Path) -> State:
        """Return the state that `save` wrote to `path`; UserError where it is of another model."""

    def update(self, state: State, groups: Sequence[Group]) -> tuple[State, Mapping[str, Any]]:
        """Begin to train on a batch; return the new state, and metrics that wait when read.

        `state` is donated. Metrics may be read in any thread, also after the new state was donated.
        """

    def evaluate(self, state: State, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of the loss on groups that are not trained on; waits for them."""

    def logprobs(self, state: State, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return one [tokens] float32 array a trajectory, in the groups' order; waits for them.

        Those of the tempered policy, nats; tokens that are not trained on may have 0.
        """

    def weights(self, state: State, adapters: bool = False) -> Buckets:
        """Return the policy with HF's names, in the dtype that is published.

        Each bucket is computed when it is asked for: take all before the next call of the trainer.
        `np.asarray` of a tensor waits for it, in any thread, also after `state` was donated.

        Args:
          adapters: of LoRA alone, with PEFT's names, float32; else they are merged.
        """

    def save(self, path: Path, state: State) -> Future[None]:
        """Begin to write the state below `path`, on shared storage; it may be donated then.

        The future ends when all hosts have written theirs.
        """
