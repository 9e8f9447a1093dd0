"""Seconds of each part of a run on a GPU, by its data sheet and a few calibrated constants.

Sources: appendix B of PaLM (arXiv 2204.02311) for FLOPs; "How to scale your model" (inference) for
the bytes that a decode step moves.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlx.doctor.gpu_cards import CARDS, Card
from rlx.model import params
from rlx.model.model_config import ModelConfig
from rlx.train.prefix_trees import GAIN

_HOP_BYTES = 6.4e6  # that a relay holds back, measured by experiments.bench.relay
WIDTH = 2  # bytes of a weight and of a number of the KV cache, bfloat16


@dataclass(frozen=True)
class Calibration:
    """Constants fitted on 2026-11-28 to published runs, see experiments/2026-12-planner."""

    bandwidth: float = 0.46  # share of the memory's bandwidth that decoding reaches
    # Share of the peak FLOP/s that prefill, and decoding with many sequences, reaches.
    flops: float = 0.5
    step: float = 2.1e-3  # seconds of a decode step whatever its size
    sequence: float = 6.1e-6  # seconds more for each sequence
    reduce: float = 2e-5  # seconds of one all-reduce between the GPUs of a server
    products: float = 0.75  # share of the peak FLOP/s that training's products reach, assumed
    mfu: float = 0.44  # the same of all of training, on an H100
    # Seconds of an update for each billion weights: to gather them, to reduce gradients, optimizer.
    # All experts count, and more GPUs make it no shorter.
    weights: float = 0.49
    update: float = 0.12  # further seconds of an update of any size
    # Typical relative error of a step's seconds, leaving the predicted run out of the fit.
    error: float = 0.16


@dataclass(frozen=True)
class ServerSpeed:
    """An engine on `tensor` GPUs of one kind."""

    model: ModelConfig
    card: Card
    tensor: int
    calibration: Calibration
    memory: float = 0.85  # share of a GPU's memory for weights and KV cache
    factor: float = 1.0  # seconds that were measured for one that is computed here

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights, on all GPUs of the server."""
        return params.count(self.model) * WIDTH

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache for one token, on all GPUs of the server."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * WIDTH

    @cached_property
    def kv_tokens(self) -> float:
        """Tokens that the KV cache holds; 0 or less: the weights do not fit."""
        return (self.memory * self.card.memory * self.tensor - self.weights) / self.kv_bytes

    @cached_property
    def _token_flops(self) -> float:
        return params.forward_flops(self.model, np.array([1]))

    @cached_property
    def _read(self) -> float:
        """Share of the weights that a token's products read: idle experts are not."""
        return min(1.0, self._token_flops / (2 * params.count(self.model)))

    def decode_seconds(self, running: float, context: float) -> float:
        """Return seconds of a step of `running` sequences, of `context` tokens together."""
        c = self.calibration
        compute = self._token_flops * running / (self.card.flops * c.flops)
        # Sequences choose their experts independently; together they read more of them.
        num_bytes = self.weights * (1 - (1 - self._read) ** running) + context * self.kv_bytes
        moved = num_bytes / (self.card.bandwidth * c.bandwidth)
        reduced = 2 * self.model.num_layers * c.reduce * (self.tensor > 1)
        seconds = max(compute, moved) / self.tensor + c.step + c.sequence * running + reduced
        return self.factor * seconds

    def prefill_seconds(self, tokens: float) -> float:
        """Return seconds to compute the KV cache of `tokens` tokens."""
        reached = self.card.flops * self.calibration.flops * self.tensor
        return self.factor * tokens * self._token_flops / reached

    def load_seconds(self) -> float:
        """Return seconds for which a server stops to take new weights that lie in host memory."""
        return self.weights / self.tensor / (self.card.network / 2)


@dataclass(frozen=True)
class TrainerSpeed:
    """The trainer: `gpus` of one kind."""

    model: ModelConfig
    card: Card
    gpus: int
    calibration: Calibration
    # Forward passes for each update, without its own: 1 for the proximal policy, 1 for a reference.
    forwards: float = 1.0
    recomputed: float = 1.0  # share of the forward pass that the backward pass computes again
    updates: int = 1  # optimizer steps of a batch
    factor: float = 1.0  # seconds that were measured for one that is computed here
    samples: int = 1  # trajectories of a group
    shared_tokens: float = 0.0  # first tokens of each that its group has in common
    fanout: int = 1  # servers to which each passes weights on; 0: process 0 sends to all

    def seconds(self, lengths: np.ndarray) -> float:
        """Return seconds of a batch; lengths: [N], prompt and answer, tokens, group by group."""
        c, passes = self.calibration, 3 + self.forwards + self.recomputed
        flops = passes * self._work(lengths) * params.forward_flops(self.model, lengths)
        once = c.update + c.weights * params.count(self.model) / 1e9 * passes / 4
        seconds = flops / (self.gpus * self.card.flops * self._mfu) + self.updates * once
        return self.factor * seconds

    @cached_property
    def _mfu(self) -> float:
        """Share of the peak with many tokens: products, and passes over memory between them."""
        c, h100 = self.calibration, CARDS["h100"]
        memory = (self.card.flops / self.card.bandwidth) / (h100.flops / h100.bandwidth)
        return 1 / (1 / c.products + (1 / c.mfu - 1 / c.products) * memory)

    def _work(self, lengths: np.ndarray) -> float:
        """Return the share of the work that is left where samples share tokens, see `GAIN`."""
        prefixes = np.minimum(lengths.reshape(-1, self.samples).min(1), self.shared_tokens)
        prefixes = np.repeat(prefixes, self.samples - 1)
        cost = params.attention_cost(self.model, self.card.kind.lower())
        saved, total = ((n * (1 + cost * n)).sum() for n in (prefixes, lengths))
        work = 1 - saved / total
        return work if work < GAIN else 1.0

    def publish_seconds(self, servers: int) -> float:
        """Return seconds from a finished update to the last server's confirmation."""
        size, fanout = params.count(self.model) * WIDTH, self.fanout
        levels, reached = 0, 0
        while fanout and reached < servers:
            levels, reached = levels + 1, reached + fanout ** (levels + 1)
        copies = max(min(fanout or servers, servers), 1)
        return (copies * size + max(levels - 1, 0) * _HOP_BYTES) / self.card.network
