"""The processes of the PyTorch trainer: their group, their mesh, and models sharded over it.

Each process has one device and the full batch. `fsdp` cuts parameters, gradients and moments
(FSDP2), `replica` copies them; both divide a microbatch's rows. `tensor` cuts heads and MLP by
transformers' plan of the model. Gradients are summed, because losses are divided by counts of the
full batch. A single process has no mesh.
"""

import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from rlx.base import UserError
from rlx.model.lora_config import LoraConfig
from rlx.model.mesh import check_devices, mesh_axes, num_row_shards
from rlx.model.tensors import LazyTensors, open_tensors
from rlx.system.host_port import split_address
from rlx.train.packing import Arrays
from rlx_torch import attention, packed_model, vision
from rlx_torch.packed_model import Valued

AXES = ("replica", "fsdp", "tensor")
ROOM = 0.25  # fraction of a GPU's memory for whole gradients, which wait for the minibatch's end.
_PARTIAL = "replicated_with_grad_allreduce"  # each process has the gradient of its own heads.
# Style in transformers' plans → torch's class that cuts a module.
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    _PARTIAL: None,
}


def join(service: str, index: int, count: int, seconds: float) -> None:
    """Start the group of all processes, with gloo on hosts and NCCL between GPUs.

    UserError for more processes on this host than it has GPUs.

    Args:
      service: host:port on which process 0 listens; on other processes it may be a relay to it.
      index, count: of this process, from 0; number of processes. seconds: limit of waiting.
    """
    (host, port), listening = split_address(service), None
    near = host in ("localhost", "127.0.0.1", "::1")
    if not index:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, int(port)), family=family).detach()
    waits = timedelta(seconds=seconds)
    store = dist.TCPStore(
        host, int(port), count, not index, waits, master_listen_fd=listening, wait_for_workers=False
    )
    if not index:
        names = [name for _, name in socket.if_nameindex()]
        store.set("network", "lo" if near and "lo" in names else "")
    if network := store.get("network").decode():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    sees = [socket.gethostname(), *(str(torch.cuda.get_device_properties(n).uuid) for n in gpus)]
    store.set(f"sees {index}", " ".join(sees))
    others = [store.get(f"sees {other}").decode() for other in range(count)]
    store.set(f"read {index}", "")
    store.wait([f"read {other}" for other in range(count)], waits)  # before process 0 may end
    here, place = others.count(others[index]), others[:index].count(others[index])
    if gpus and here > len(gpus):
        raise UserError(
            f"{here} processes of the trainer share {len(gpus)} GPU{'s' * (len(gpus) > 1)} of "
            f"{sees[0]}; start one process a GPU"
        )
    if gpus:
        torch.cuda.set_device(place)
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // here, 1))
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=count)


def leave() -> None:
    """End the group that `join` started."""
    dist.destroy_process_group()


def processes() -> int:
    """Return the number of processes, 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def check_plan(model: Any) -> dict[str, str]:
    """Return transformers' tensor plan, name of a module → style; UserError if it is unusable."""
    if vision.sees(model.config):
        raise UserError(
            f"train.mesh has tensor above 1 and {type(model).__name__} sees images, whose tower is "
            "not cut by heads; use only fsdp"
        )
    plan = dict(model.tp_plan)
    if model.config.tie_word_embeddings:  # only fsdp can cut a tensor that two modules share
        shared = ("lm_head", "embedding_rowwise")
        plan = {k: style for k, style in plan.items() if k not in shared and style not in shared}
    strange = sorted(set(plan.values()) - set(_STYLES))
    if strange or not plan:
        why = f"its plan has the unknown style {strange[0]!r}" if strange else "it has no plan"
        raise UserError(
            f"train.mesh has tensor above 1 and transformers cannot cut "
            f"{model.config.architectures or type(model)} ({why}); use only fsdp, or trainer=jax"
        )
    return plan


class Ranks:
    """The mesh of processes: rows of this process, sharded models, collectives.

    `text` is train.mesh; "" puts all processes on fsdp.
    """

    def __init__(self, text: str):
        self.count = processes()  # number of processes
        check_devices(text, self.count)
        axes = mesh_axes(text, self.count)
        self.row_shards, self._row = num_row_shards(axes), 0  # parts of a microbatch's rows
        self._mesh: Any = None
        self.checkpoint_group: Any = None  # of gloo, for another thread; None for one process
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.count > 1:
            sizes = tuple(axes[name] for name in AXES)
            self._mesh = init_device_mesh(self.device, sizes, mesh_dim_names=AXES)
            place = {name: self._mesh.get_local_rank(name) for name in AXES}
            self._row = place["replica"] * axes["fsdp"] + place["fsdp"]
            self.checkpoint_group = dist.new_group(backend="gloo")

    # Rows.

    def own_rows(self, part: Arrays) -> Arrays:
        """Return this process's rows of a microbatch; the last ones may be empty."""
        return {name: rows[self._row :: self.row_shards] for name, rows in part.items()}

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes of all rows, in place; return it."""
        for axis in AXES[:2]:  # the axes that cut rows
            self._reduce(tensor, axis)
        return tensor

    def _reduce(self, tensor: Tensor, axis: str) -> None:
        if self._mesh is not None and self._mesh[axis].size() > 1:
            dist.all_reduce(tensor, group=self._mesh.get_group(axis))

    def sums(self, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of each statistic over the processes of all rows."""
        if self._mesh is None or not stats:
            return dict(stats)
        device = next(iter(stats.values())).device
        stack = torch.stack([x.detach().to(device, torch.float64) for x in stats.values()])
        return dict(zip(stats, self.sum(stack).float(), strict=True))

    # Models.

    def cut(self, model: Any, compute_dtype: str) -> None:
        """Shard a model's parameters over the mesh, also on the device `meta`.

        Afterwards the model's `forward` calls its argument inside FSDP's hooks; see `within`.
        UserError if `tensor` asks for a plan that transformers or torch does not have.
        """
        if self._mesh["tensor"].size() > 1:
            self._cut_heads(model)
        one_replica = self._mesh["replica"].size() == 1
        mesh = self._mesh["fsdp"] if one_replica else self._mesh["replica", "fsdp"]
        half = None if compute_dtype == "float32" else getattr(torch, compute_dtype)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        # A frozen tower stays whole, because processes compute different images with it.
        whole_parts = {p for p in vision.tower(model).values() if not p.requires_grad}
        # Reshard after any pass, because the optimizer may follow.
        for module in (*packed_model.layers(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True,
                        ignored_params=whole_parts)  # fmt: skip
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        model.forward = lambda function: function()

    def _cut_heads(self, model: Any) -> None:
        styles = {name: _STYLES[style] for name, style in check_plan(model).items()}
        adapted = {
            name.split(".lora_")[0].rpartition(".")[2] for name in packed_model.adapters(model)
        }
        chosen = {}
        for name, style in ((name, style) for name, style in styles.items() if style):
            if name.rpartition(".")[2] not in adapted:
                chosen[name] = style()
                continue
            # Cut the one of the adapter's matrices that has the same axis.
            chosen[f"{name}.base_layer"] = style()
            half = "lora_B" if style is ColwiseParallel else "lora_A"
            chosen[f"{name}.{half}.default"] = style()
        # It warns that gathering tensors cut by both axes takes two steps.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        parallelize_module(model, self._mesh["tensor"], chosen)

    def within(self, model: Any, function: Callable[[], Any]) -> Any:
        """Return function(), called inside FSDP's hooks, which gather parameters."""
        return function() if self._mesh is None else model(function)

    def load(
        self, path: Path, compute_dtype: str, remat: bool, valued: bool,
        lora: LoraConfig | None = None, frozen: bool = False,
    ) -> Any:  # fmt: skip
        """Return the sharded model of an HF directory; each process reads its own slices.

        The first arguments are as of `packed_model.load`. A `valued` one has a value head, of zeros
        if the directory has none; with `lora` come uninitialised adapters; see `begin_adapters`.
        `frozen` is the tower of a model that sees images.
        """
        with torch.device("meta"):
            kind = packed_model.packable_config(path).model_type
            model: Any = packed_model.empty(
                path, attention.kernel(self.device, compute_dtype, kind)
            )
            packed_model.ready(model, remat)
            model = Valued(model) if valued else model
            packed_model.narrow(model, lora, frozen)
        self.cut(model, compute_dtype)
        model.to_empty(device=self.device)
        owners = (m for m in model.base_model.modules() if isinstance(m, PreTrainedModel))
        for owner in owners:  # from the outermost
            for module in owner.modules():
                if module._non_persistent_buffers_set:  # rotary embeddings, which no file has
                    owner._init_weights(module)
        if not valued:
            model.tie_weights()
        with torch.no_grad(), open_tensors(path) as tensors:
            self._fill(model, tensors, path)
        return model

    def _fill(self, model: Any, tensors: LazyTensors, path: Path) -> None:
        params = {**dict(model.named_parameters()), **packed_model.saved_buffers(model)}
        targets = {k.replace(".base_layer", ""): x for k, x in params.items() if ".lora_" not in k}
        source: Any = tensors
        if targets.keys() - {"score.weight"} - tensors.keys():  # transformers has other names
            donor = packed_model.auto(model.config).from_pretrained(
                path, dtype=torch.float32, trust_remote_code=False
            )
            source = _TensorsInMemory(donor.state_dict())
            model._weight_conversions = donor._weight_conversions  # for names of published tensors
        for name, tensor in targets.items():
            local, index = _own_part(tensor)
            if name == "score.weight" and name not in source:
                local.zero_()
            elif local.numel():
                part = np.asarray(source.part(name, index), np.float32)
                local.copy_(torch.from_numpy(part))

    # Gradients.

    def expect(self, model: Any, last: bool) -> None:
        """Reduce gradients in the next backward pass only if it is the last, or memory is short."""
        if self._mesh is None:
            return
        model.set_requires_gradient_sync(last or not self._has_room(model))
        model.set_is_last_backward(last)

    def _has_room(self, model: Any) -> bool:
        if self.device == "cpu":
            return True
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return 4 * sum(p.numel() for p in model.parameters()) < ROOM * memory

    @torch.no_grad()
    def clip(self, model: Any, limit: float) -> Tensor:
        """Scale gradients to a global norm ≤ limit; return the norm before."""
        if self._mesh is None:
            return nn.utils.clip_grad_norm_(model.parameters(), limit)
        squares: dict[tuple[str, ...], Tensor] = {}  # by the axes that cut the parameter
        gradients = []
        partly = _partly(model) if self._mesh["tensor"].size() > 1 else ""
        for name, parameter in model.named_parameters():
            if (gradient := parameter.grad) is None:
                continue
            local = gradient.to_local()
            if partly and re.fullmatch(partly, name):
                self._reduce(local, "tensor")
            places = zip(gradient.device_mesh.mesh_dim_names, gradient.placements, strict=True)
            axes = tuple(axis for axis, how in places if not how.is_replicate())
            squares[axes] = squares.get(axes, 0.0) + local.float().square().sum()
            gradients.append(local)
        total = torch.zeros((), device=self.device)
        for axes in sorted(squares):  # in the same order on all processes
            for axis in axes:
                self._reduce(squares[axes], axis)
            total += squares[axes]
        norm = total.sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm


class _TensorsInMemory(dict):
    """Tensors by name, read by slices as of LazyTensors."""

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self[name][index].numpy()


@torch.no_grad()
def begin_adapters(model: Any, seed: int) -> None:
    """Initialise a model's adapters as PEFT does: A uniform in ±1/√in, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in packed_model.adapters(model).items():
        bound = parameter.shape[1] ** -0.5 if ".lora_A." in name else 0.0
        numbers = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        local, index = _own_part(parameter)
        local.copy_(numbers[index])


def _own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this process's part of a tensor, and its slices in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, first = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tensor.to_local(), tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))


def _partly(model: Any) -> str:
    """Return a regex for names of parameters with a gradient of only this process's heads."""
    plan = (name for name, style in model.tp_plan.items() if style == _PARTIAL)
    return "|".join(re.escape(name).replace(r"\*", r"\d+") + r"\..*" for name in plan)
