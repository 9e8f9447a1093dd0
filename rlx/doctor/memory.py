"""Estimate the memory and disk of a run from its settings and the model's shape.

State (parameters, moments, critic, reference) is counted exactly. The rest of a step is fitted to
`compiled.memory_analysis()` of small models on a CPU. tests/doctor/memory_test.py compares both:
they agree within a sixth on one device and on meshes of every axis, up to 32B on 64 devices.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes as ml_dtypes  # numpy knows the name bfloat16 by it
import numpy as np

from rlx.base import DiskFull
from rlx.cli.text import size
from rlx.doctor.machine import Devices
from rlx.engines.kv_memory import make_plan
from rlx.model import lora_config, remat
from rlx.model import params as parameters
from rlx.model.mesh import WEIGHTS, mesh_axes, num_row_shards, share
from rlx.model.model_config import ModelConfig, kernel_fits
from rlx.system.available_memory import MemoryLimit
from rlx.train.train_options import OPTIMIZERS, TrainOptions

Bytes = dict[str, int]
ONE_CPU = Devices()

_UPDATE = 2.6  # float32 copies of the parameters at an optimizer update, in addition to the state
_GPU_SEGMENTS = 16  # segments of a row, see packing.segment_sizes
_VLLM_CPU_KV = 4 << 30  # limit in rlx.engines.vllm.vllm_start


@dataclass(frozen=True)
class RunSizes:
    """Settings that decide how much memory a run needs; most are keys of its config.

    Attributes:
      has_fleet: whether the run has servers, started or running.
      num_servers: servers that the run starts.
      keep: number of checkpoints kept.
    """

    model: ModelConfig
    train: TrainOptions
    max_prompt_tokens: int
    max_new_tokens: int
    batch_prompts: int
    n_samples: int
    has_fleet: bool
    engine: str
    num_servers: int
    slots: int
    max_model_len: int
    decode_steps: int
    publish: str
    publish_dir: str
    publish_dtype: str
    keep: int

    @property
    def follows(self) -> bool:
        """Whether the reference policy changes during training, and so is part of the state."""
        return self.train.algorithm.needs_reference and self.train.reference_mode != "frozen"

    @property
    def trained(self) -> int:
        """Number of trained parameters without a critic's."""
        if self.train.lora:
            return lora_config.count(self.model, self.train.lora)
        scores = self.train.algorithm.kind.scores
        return parameters.count(dataclasses.replace(self.model, value_head=True) if scores
                                else self.model)  # fmt: skip

    @property
    def longest(self) -> int:
        """Tokens of the longest possible trajectory."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def group(self) -> int:
        """Trajectories of a prompt."""
        data = self.train.algorithm.data
        return {"pairs": 2, "demonstrations": 1}.get(data, self.n_samples)

    @property
    def row_length(self) -> int:
        """Tokens of a row that fits the longest trajectory."""
        budget = self.train.row_budget
        fitting = [b for b in self.train.row_buckets if self.longest <= b <= budget]
        return min(fitting, default=budget)

    @property
    def minibatch(self) -> int:
        """Trajectories of the largest minibatch."""
        return math.ceil(self.batch_prompts / self.train.minibatches) * self.group


def state(sizes: RunSizes) -> Bytes:
    """Return the train state on all devices together, which checkpoints hold too: name → bytes."""
    train, numbers = sizes.train, sizes.trained
    width = 4 if train.lora else np.dtype(train.dtype).itemsize
    moments = 4 * OPTIMIZERS[train.optimizer.name]
    held = {"parameters": numbers * width, "optimizer": numbers * moments}
    if train.algorithm.critic:
        valued = parameters.count(dataclasses.replace(sizes.model, value_head=True))
        held["critic"] = valued * (np.dtype(train.dtype).itemsize + moments)
    if sizes.follows:
        held["reference"] = numbers * (4 if train.reference_mode == "ema" else width)
    return {name: part for name, part in held.items() if part}


def trainer(sizes: RunSizes, devices: Devices = ONE_CPU) -> Bytes:
    """Return the peak memory of a train step on one device: name → bytes, adding up to the peak.

    Args:
      devices: the trainer's devices on all its hosts, arranged by `sizes.train.mesh`.
    """
    train, model = sizes.train, sizes.model
    axes = mesh_axes(train.mesh, devices.count)
    shards, tensor = num_row_shards(axes), axes["tensor"]
    part = share(model, parameters.table(model), axes)
    own = share(model, lora_config.table(model, train.lora), axes) if train.lora else part
    held = state(sizes)
    width = np.dtype(train.dtype).itemsize
    if train.lora:
        held["frozen base"] = parameters.count(model) * width
    elif train.algorithm.needs_reference and not sizes.follows:
        held["reference"] = parameters.count(model) * width
    trained = ("parameters", "optimizer")
    out = {name: size * (own if name in trained else part) for name, size in held.items()}
    numbers = own * sizes.trained
    out["gradients"] = numbers * width
    # The peak occurs when all trajectories have their maximum length.
    whole = math.ceil(sizes.minibatch / shards) * math.ceil(sizes.longest / axes["context"])
    tokens = min(train.token_budget, whole)
    if whole > train.token_budget:
        out["gradients"] += 4 * numbers  # the accumulator
    if devices.platform == "cpu" and width < 4:
        out["gradients"] += 4 * numbers  # computed in float32
    kept, layer = _activations(sizes, tokens, devices.platform, axes)
    logits, head = _logits(sizes, tokens) / tensor
    cut = math.prod(axes[name] for name in WEIGHTS) > 1
    gathered = _gathered(sizes, devices.platform, axes["expert"]) / tensor if cut else 0
    out |= {"gathered weights": gathered, "activations": kept + layer}
    out["logits"] = logits + max(head - layer, 0)
    passing = kept + logits + max(layer, head) + gathered + numbers * width
    out["optimizer update"] = max(_UPDATE * 4 * numbers - passing, 0)
    return {name: int(part) for name, part in out.items() if part >= 1}


def _gathered(sizes: RunSizes, platform: str, expert: int) -> float:
    """Return bytes of the weights gathered on a device: a layer, embedding and head.

    Each counts in its compute dtype plus a float32 gradient. A device gathers only its own experts
    of a layer: one of `expert` parts.
    """
    model = sizes.model
    half = platform != "cpu" and np.dtype(sizes.train.compute_dtype).itemsize == 2
    rows = [row for row in parameters.table(model) if row.stacked]
    layer = sum(math.prod(x.shape[1:]) // (expert if "experts" in x.axes else 1) for x in rows)
    tables = 2 * model.vocab_size * model.model_dim  # a tied one is gathered twice
    return ((2 if half else 4) + 4) * (layer + tables)


def _activations(
    sizes: RunSizes, tokens: float, platform: str, axes: Mapping[str, int]
) -> tuple[float, float]:
    """Return bytes (kept for the backward pass, of the layer being computed).

    Coefficients are floats a token, fitted to XLA's memory analysis on a CPU. The inputs and
    outputs of a block are replicated over `tensor` devices; its inner activations are split.
    """
    model, tensor = sizes.model, axes["tensor"]
    wide, mlp, layers = model.model_dim, model.mlp_dim / tensor, model.num_layers
    rows = (
        model.experts_per_token * axes["expert"]
    )  # of a token, with those gathered from other devices
    if rows:
        mlp = rows * model.expert_dim / tensor
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    half = np.dtype(sizes.train.compute_dtype).itemsize == 2
    width = 2.0 if half else 4.0
    if platform == "cpu":  # computes half precision in float32, and keeps the casts
        width = 4.4 if half else 4
    length = sizes.row_length
    block = max(256, length // 16)
    scores = model.num_heads * block * (length / block + 1) * 2 / 3  # float32, see attention.py
    normalisers = 4 * model.num_heads / width
    if platform == "gpu" and half and kernel_fits(model.head_dim, model.attention_softcap):
        # cuDNN's kernel keeps no scores, only normalisers per segment
        scores, normalisers = 0.0, normalisers * _GPU_SEGMENTS
    if sizes.train.remat == "none":
        cut = (5.5 * wide + 4.5 * q + 2 * kv) / tensor
        # Norms of a block's output keep it; layers of two kinds keep the union of both.
        cut += 2 * wide * (model.norms == "both") + q / tensor * (len(set(model.windows)) > 1)
        kept = layers * (2 * wide + cut + 3 * mlp) * width
        working = (4 * wide + 5 * mlp) * width
    else:
        named = {
            "qkv": q + 2 * kv,
            "attention": q + normalisers,
            "o": wide,
            "mlp": 2 * mlp * tensor,
        }
        cut = 2 * wide + sum(named[name] for name in remat.KEPT[sizes.train.remat])
        kept = layers * cut / tensor * width
        working = (3.5 * wide + 6.5 * mlp) * width + 4 * scores / tensor
    if rows:
        kept += layers * (3 * rows * wide * width) * (sizes.train.remat == "none")
        copies = (
            2.4 if sizes.train.remat == "none" else 4
        )  # of the arrays that a CPU expands, see experts.py
        expanded = copies * model.num_experts / axes["expert"] if platform == "cpu" else 0
        working += rows * (5 + expanded) * (wide + model.expert_dim / tensor) * width
    return tokens * kept, tokens * working


def _logits(sizes: RunSizes, tokens: float) -> np.ndarray:
    """Return bytes (kept for the backward pass, of the chunk being computed), see cross_entropy.

    A single chunk keeps its logits. With several, one chunk has logits, weights and gradient.
    """
    chunk = sizes.train.chunk
    whole = 0 if sizes.model.value_head else 4 * min(chunk, tokens) * sizes.model.vocab_size
    return np.array([whole, whole] if chunk >= tokens else [0, 3 * whole])


def server(sizes: RunSizes) -> Bytes:
    """Return the memory of one rollout server: two versions of the weights, and its KV cache."""
    model, width = sizes.model, np.dtype(sizes.publish_dtype).itemsize
    tokens = sizes.max_model_len
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * width
    if sizes.engine == "vllm":
        kv = min(token * sizes.slots * tokens, _VLLM_CPU_KV)
    else:
        plan = make_plan(sizes.slots, tokens, sizes.decode_steps)
        kv = token * plan.slots * plan.length
    weights = exported(sizes)
    return {"weights": weights, "new weights": weights, "KV cache": kv}


def published(sizes: RunSizes) -> int:
    """Return the bytes of a published file."""
    if sizes.publish == "adapter" and sizes.train.lora:
        width = np.dtype(sizes.publish_dtype).itemsize
        return sizes.trained * width
    return exported(sizes)


def in_publish_dir(sizes: RunSizes) -> int:
    """Return the bytes that `fleet.publish_dir` holds at most."""
    # The old file stays until servers have read the new one; a delta needs two files.
    return published(sizes) * (4 if sizes.publish == "delta" else 2)


def exported(sizes: RunSizes) -> int:
    """Return the bytes of the exported HF directory."""
    return parameters.count(sizes.model) * np.dtype(sizes.publish_dtype).itemsize


def remedy(sizes: RunSizes, devices: Devices = ONE_CPU) -> str:
    """Return the settings that lower the memory of a train step by 2 % or more."""
    train = sizes.train
    least = math.ceil(sizes.longest * train.token_budget / train.row_budget)
    changes: dict[str, dict[str, Any]] = {
        "train.max_tokens_per_microbatch": {"token_budget": max(train.token_budget // 2, least)},
        "model.remat": {"remat": "full"},
        "model.logprob_chunk": {"chunk": min(256, train.chunk)},
        "model.compute_dtype": {"compute_dtype": "bfloat16"},
    }

    def need(**options: Any) -> int:
        changed = dataclasses.replace(sizes, train=dataclasses.replace(train, **options))
        return sum(trainer(changed, devices).values())

    most = 0.98 * need()
    found = [f"{key}={v}" for key, option in changes.items()
             for v in option.values() if need(**option) <= most]  # fmt: skip
    more = ", or give train.mesh more devices" if devices.platform != "cpu" else ""
    return (f"set {' or '.join(found)}" if found else "use a smaller model or lora.rank") + more


def listed(pieces: Mapping[str, int]) -> str:
    """Return `optimizer 4.0 GB, parameters 2.0 GB`: largest first, without those below 1 %."""
    total = sum(pieces.values())
    large = [(name, part) for name, part in pieces.items() if part >= 0.01 * total]
    return ", ".join(f"{name} {size(part)}" for name, part in sorted(large, key=lambda p: -p[1]))


def estimate(pieces: Mapping[str, int], mesh: str = "") -> str:
    """Return a sentence about the memory of a train step on one device of a mesh."""
    each = f" on each device of {mesh}" if mesh else ""
    return f"a step is estimated at {size(sum(pieces.values()))}{each} ({listed(pieces)})"


def advice(sizes: RunSizes, find: Callable[[], Devices], *, started: bool = True) -> str:
    """Return the estimate and its remedy, for a trainer that is out of memory.

    Args:
      find: returns the trainer's devices.
      started: whether a step was made; if not, other processes may hold the memory.
    """
    devices = find()
    first = ""
    if not started and devices.platform == "gpu":
        first = "end what else uses the GPU (nvidia-smi lists it); "
    return f"{first}{estimate(trainer(sizes, devices), sizes.train.mesh)}; {remedy(sizes, devices)}"


def low_memory_warning(sizes: RunSizes, there: MemoryLimit, *, always: bool = False) -> str:
    """Return a warning if a trainer on a CPU may be OOM-killed; "" if memory is enough.

    Args:
      always: return the needed and free memory even if it is enough.
    """
    pieces = trainer(sizes)
    what = f"{estimate(pieces, sizes.train.mesh)}, {there}"
    if sum(pieces.values()) <= there.free:
        return what if always else ""
    return f"may run out of memory: {what}; {remedy(sizes)}"


def full_disk_warning(sizes: RunSizes, free: int, there: int = 0) -> str:
    """Return a warning if the checkpoints may not fit on the disk; "" if they do.

    Args:
      free: free bytes.
      there: bytes of earlier checkpoints and exports, which new ones replace.

    Raises:
      DiskFull: no checkpoint fits.
    """
    saved, out = sum(state(sizes).values()), exported(sizes)
    needed, what = checkpoints(saved, out, sizes.keep)
    what = f"{what}; {size(free)} free; free some"
    if saved + out > free:
        raise DiskFull(f"no disk space for a checkpoint: {what}, or give another --workdir")
    if needed <= free + there:
        return ""
    return f"may run out of disk space: {what}, give another --workdir, or lower checkpoint.keep"


def checkpoints(state: int, exported: int, keep: int) -> tuple[int, str]:
    """Return the disk bytes needed to write one more checkpoint, and a sentence about them."""
    needed = (keep + 1) * state + 2 * exported
    return needed, (
        f"{keep} + 1 checkpoints of {size(state)} and the HF directory need {size(needed)}"
    )
