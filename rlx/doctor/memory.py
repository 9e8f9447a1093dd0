"""Bound the memory and disk of a run by its settings and the model's shape.

State (parameters, moments, critic, reference) is counted exactly. The rest of a step is a coarse
bound by the sizes of its arrays. `run/compile_for.py` has XLA's own plan, for a GPU.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import ml_dtypes as ml_dtypes  # numpy knows the name bfloat16 by it
import numpy as np

from rlx.base import DiskFull
from rlx.cli.text import size
from rlx.doctor.machine import Devices
from rlx.model import lora_config, remat
from rlx.model import params as parameters
from rlx.model.mesh import WEIGHTS, mesh_axes, num_row_shards, share
from rlx.model.model_config import CHUNK, ModelConfig, kernel_fits
from rlx.system.available_memory import MemoryLimit
from rlx.train.train_options import OPTIMIZERS, TrainOptions

Bytes = dict[str, int]
ONE_CPU = Devices()


@dataclass(frozen=True)
class RunSizes:
    """Settings that decide how much memory a run needs; most are keys of its config."""

    model: ModelConfig
    train: TrainOptions
    max_prompt_tokens: int
    max_new_tokens: int
    batch_prompts: int
    n_samples: int
    has_fleet: bool  # whether the run has servers, started or running
    engine: str
    num_servers: int  # servers that the run starts
    slots: int
    max_model_len: int
    decode_steps: int
    publish: str
    publish_dir: str
    publish_dtype: str
    keep: int  # number of checkpoints kept

    @property
    def trained(self) -> int:
        """Number of trained parameters without a critic's."""
        if self.train.lora:
            return lora_config.count(self.model, self.train.lora)
        scores = self.train.algorithm.kind.scores
        return parameters.count(replace(self.model, value_head=True) if scores else self.model)

    @property
    def longest(self) -> int:
        """Tokens of the longest possible trajectory."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def group(self) -> int:
        """Number of trajectories that each prompt gets."""
        return {"pairs": 2, "demonstrations": 1}.get(self.train.algorithm.data, self.n_samples)

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
    pieces = {"parameters": numbers * width, "optimizer": numbers * moments}
    if train.algorithm.critic:
        valued = parameters.count(replace(sizes.model, value_head=True))
        pieces["critic"] = valued * (np.dtype(train.dtype).itemsize + moments)
    if train.reference_moves:
        pieces["reference"] = numbers * (4 if train.reference_mode == "ema" else width)
    return {name: part for name, part in pieces.items() if part}


def whole_minibatch(sizes: RunSizes, axes: Mapping[str, int]) -> int:
    """Return the tokens of a minibatch on one device of a mesh, with the longest trajectories."""
    rows = math.ceil(sizes.minibatch / num_row_shards(axes))
    return rows * math.ceil(sizes.longest / axes["context"])


def trainer(sizes: RunSizes, devices: Devices = ONE_CPU) -> Bytes:
    """Return a bound of a train step's memory on one device: name → bytes, which add up.

    `sizes.train.mesh` arranges the devices, of all hosts. State and gradients are exact. The rest
    is what a step holds at most, in arrays of XLA's size:

    - activations: those that `remat` keeps of every layer, and twice all of one, see remat.py
    - logits: of a chunk, their exponentials and gradient
    - gathered weights: a layer's, embedding and head, with a float32 gradient
    - optimizer update: three float32 copies of the parameters, where that is more than the others
    """
    train, model = sizes.train, sizes.model
    axes = mesh_axes(train.mesh, devices.count)
    part = share(model, parameters.table(model), axes)
    train_part = share(model, lora_config.table(model, train.lora), axes) if train.lora else part
    pieces = state(sizes)
    width = np.dtype(train.dtype).itemsize
    if train.lora:
        pieces["frozen base"] = parameters.count(model) * width
    elif train.algorithm.needs_reference and not train.reference_moves:
        pieces["reference"] = parameters.count(model) * width
    trained = ("parameters", "optimizer")
    out = {name: n * (train_part if name in trained else part) for name, n in pieces.items()}
    numbers = train_part * sizes.trained
    minibatch = whole_minibatch(sizes, axes)
    tokens = min(train.token_budget, minibatch)
    out["gradients"] = numbers * (width + 4 * (minibatch > train.token_budget))  # accumulated
    # A CPU computes half precision in float32.
    narrow = 4 if devices.platform == "cpu" else np.dtype(train.compute_dtype).itemsize
    chunk = train.chunk or max(CHUNK, model.model_dim * (devices.platform == "gpu"))
    passing = {
        "activations": tokens * narrow * _floats(sizes, devices, axes),
        "logits": 12 * min(chunk, tokens) * model.vocab_size * (not model.value_head),
    }
    if math.prod(axes[name] for name in WEIGHTS) > 1:
        weights = 2 * model.vocab_size * model.model_dim  # a tied one is gathered twice
        for row in (row for row in parameters.table(model) if row.stacked):
            weights += math.prod(row.shape[1:]) // (axes["expert"] if "experts" in row.axes else 1)
        passing["gathered weights"] = (narrow + 4) * weights
    out |= {name: n / axes["tensor"] for name, n in passing.items()}
    out["optimizer update"] = max(12 * numbers - sum(passing.values()) / axes["tensor"], 0)
    return {name: int(n) for name, n in out.items() if n >= 1}


def bound(sizes: RunSizes, devices: Devices) -> int:
    """Return the sum of the bytes of `trainer`."""
    return sum(trainer(sizes, devices).values())


def _floats(sizes: RunSizes, devices: Devices, axes: Mapping[str, int]) -> float:
    """Return the numbers a token that all layers keep, and those of the layer being computed."""
    model, kind = sizes.model, sizes.train.remat
    rows = model.experts_per_token * axes["expert"]  # of a token, with those of other devices
    mlp = rows * model.expert_dim or model.mlp_dim
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    widths = {"qkv": q + 2 * kv, "attention": q, "o": model.model_dim, "gate": mlp, "up": mlp}
    every = 7 * model.model_dim + 4 * q + 2 * kv + 3 * mlp + 3 * rows * model.model_dim
    kept = every
    if kind != "none":
        kept = model.model_dim + sum(widths[name] for name in remat.KEPT[kind])
    working = 2 * every
    half = sizes.train.compute_dtype != "float32"
    capability = tuple(map(int, (devices.capability or "9.0").split(".")))
    fits = kernel_fits(model.head_dim, model.attention_softcap, capability)
    if not (devices.platform == "gpu" and half and fits):
        # scores of a block of queries and one of keys, see attention.py
        block = max(min(256, sizes.row_length), sizes.row_length // 16)
        working += 3 * model.num_heads * block**2 // sizes.row_length
    return model.num_layers * kept + working


def in_publish_dir(sizes: RunSizes) -> int:
    """Return the bytes that `fleet.publish_dir` holds at most."""
    adapter = sizes.publish == "adapter" and sizes.train.lora
    file = sizes.trained * np.dtype(sizes.publish_dtype).itemsize if adapter else exported(sizes)
    # The old file stays until servers have read the new one; a delta needs two files.
    return file * (4 if sizes.publish == "delta" else 2)


def exported(sizes: RunSizes) -> int:
    """Return the bytes of the exported HF directory."""
    return parameters.count(sizes.model) * np.dtype(sizes.publish_dtype).itemsize


def remedy(sizes: RunSizes, devices: Devices = ONE_CPU) -> str:
    """Return the settings that lower the memory of a train step."""
    train, on_cpu = sizes.train, devices.platform == "cpu"
    least = math.ceil(sizes.longest * train.token_budget / train.row_budget)
    tokens = max(train.token_budget // 2, least)
    helps = {
        f"train.max_tokens_per_microbatch={tokens}": tokens < train.token_budget,
        "model.remat=full": train.remat != "full",
        "model.compute_dtype=bfloat16": train.compute_dtype == "float32" and not on_cpu,
    }
    settings = " or ".join(setting for setting, lowers in helps.items() if lowers)
    more = "" if on_cpu else ", or give train.mesh more devices"
    return (f"set {settings}" if settings else "use a smaller model or lora.rank") + more


def sizes_text(pieces: Mapping[str, int]) -> str:
    """Return `optimizer 4.0 GB, parameters 2.0 GB`: largest first, without those below 1 %."""
    total = sum(pieces.values())
    large = [(name, part) for name, part in pieces.items() if part >= 0.01 * total]
    return ", ".join(f"{name} {size(part)}" for name, part in sorted(large, key=lambda p: -p[1]))


def estimate(pieces: Mapping[str, int], mesh: str = "") -> str:
    """Return a sentence about the memory of a train step on one device of a mesh."""
    where = f" on each device of {mesh}" if mesh else ""
    return f"a step takes at most about {size(sum(pieces.values()))}{where} ({sizes_text(pieces)})"


def advice(sizes: RunSizes, find: Callable[[], Devices], *, started: bool = True) -> str:
    """Return the estimate and its remedy, for a trainer that is out of memory on these devices."""
    devices, first = find(), ""
    if not started and devices.platform == "gpu":  # before a step other processes may hold it
        first = "end what else uses the GPU (nvidia-smi lists it); "
    return f"{first}{estimate(trainer(sizes, devices), sizes.train.mesh)}; {remedy(sizes, devices)}"


def low_memory_warning(sizes: RunSizes, memory: MemoryLimit, *, always: bool = False) -> str:
    """Return needed and free memory if a CPU's trainer may be OOM-killed, or `always`; else ""."""
    pieces = trainer(sizes)
    what = f"{estimate(pieces, sizes.train.mesh)}, {memory}"
    if sum(pieces.values()) <= memory.free:
        return what if always else ""
    return f"may run out of memory: {what}; {remedy(sizes)}"


def full_disk_warning(sizes: RunSizes, free: int, held: int = 0) -> str:
    """Return a warning if checkpoints may not fit on the disk, else ""; DiskFull if none fits."""
    needed, what = checkpoints(sizes)
    what = f"{what}; {size(free)} free; free some"
    if sum(state(sizes).values()) + exported(sizes) > free:
        raise DiskFull(f"no disk space for a checkpoint: {what}, or give another --workdir")
    if needed <= free + held:  # bytes of earlier checkpoints, which new ones replace
        return ""
    return f"may run out of disk space: {what}, give another --workdir, or lower checkpoint.keep"


def checkpoints(sizes: RunSizes) -> tuple[int, str]:
    """Return the disk bytes needed to write one more checkpoint, and a sentence about them."""
    keep, one_size = sizes.keep, sum(state(sizes).values())
    needed = (keep + 1) * one_size + 2 * exported(sizes)
    what = f"{keep} + 1 checkpoints of {size(one_size)} and the HF directory need {size(needed)}"
    return needed, what
