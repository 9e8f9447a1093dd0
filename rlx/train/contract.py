"""The interface between a run and its trainer. No JAX or torch here."""

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
    """A trainer, called by one thread at a time.

    On many hosts every process makes the same calls in the same order (rlx/train/conductor.py),
    including the iteration over `weights`.
    """

    model: ModelConfig  # of the trained model, with a value head for a reward model
    devices: str  # number and kind of devices, for the run's records
    state_bytes: int  # of the whole state, on all devices together

    def init(self) -> State:
        """Return the state before the first update, with the weights that the run begins with."""

    def restore(self, path: Path) -> State:
        """Return the state that `save` wrote to `path`; UserError if another model did."""

    def update(self, state: State, groups: Sequence[Group]) -> tuple[State, Mapping[str, Any]]:
        """Begin to train on a batch; return the new state, and metrics that wait when read.

        `state` is donated. Metrics may be read in any thread and at any time.
        """

    def evaluate(self, state: State, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of the loss on groups, without training; waits for them."""

    def logprobs(self, state: State, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return log-probabilities, one [tokens] float32 array a trajectory; waits for them.

        Their policy is tempered, their unit nats; tokens that are not trained on may have 0.
        """

    def weights(self, state: State, adapters: bool = False) -> Buckets:
        """Return the policy's tensors with HF's names, in the published dtype.

        Buckets are computed on iteration: take all before the next call of the trainer.
        `np.asarray` of a tensor waits for it, in any thread, even after `state` was donated. With
        `adapters` they are only LoRA's, with PEFT's names, float32; else these are merged.
        """

    def save(self, path: Path, state: State) -> Future[None]:
        """Begin to write the state below `path`, on shared storage; it may be donated afterwards.

        The future ends when all hosts have written their parts.
        """
