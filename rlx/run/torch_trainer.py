"""The PyTorch trainer: the functions of `rlx.run.trainers.TrainerLibrary`, without JAX."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes as ml_dtypes  # registers bfloat16 with numpy
import numpy as np

from rlx.base import packages_of
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.model import mesh
from rlx.model.directory import load_config
from rlx.model.tensors import Buckets, write_directory
from rlx.run.inputs import Inputs
from rlx.system.image_store import ImageStore
from rlx.train.contract import Update
from rlx.train.hosts import Hosts
from rlx.train.train_options import TrainOptions

with packages_of("torch", "trainer=torch needs PyTorch"):
    import torch

    from rlx_torch import packed_model, sharding
    from rlx_torch.update import TorchUpdate


def set_up() -> None:
    """Do nothing: importing this module has checked that PyTorch works."""


def join(hosts: Hosts) -> None:
    """Start the process group; each process has its own device."""
    sharding.join(hosts.service, hosts.index, hosts.count, hosts.cluster.join)


leave = sharding.leave


def devices() -> Devices:
    """Return the devices of all processes, one each."""
    count = sharding.processes()
    if not torch.cuda.is_available():
        return Devices(count=count)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    total = torch.cuda.get_device_properties(0).total_memory
    return Devices("gpu", torch.cuda.get_device_name(), count, total, capability)


def planned(sizes: memory.RunSizes) -> float:
    """Return a bound of the bytes that an update needs on each device."""
    return memory.bound(sizes, devices())


def product(shape: tuple[int, int, int], dtype: str) -> Callable[[], Any]:
    """Return a function that multiplies [T, D] by [D, F] in one thread on the CPU."""
    torch.set_num_threads(1)  # several would spin while others compute; the update sets its own
    x, weight = (torch.ones(each, dtype=getattr(torch, dtype)) for each in (shape[:2], shape[1:]))
    return lambda: x @ weight


def check_devices(inputs: Inputs) -> None:
    """Raise UserError if `train.mesh` does not match the processes or cannot split the model."""
    mesh.check_devices(inputs.train.mesh, sharding.processes())
    if mesh.parse_mesh(inputs.train.mesh).get("tensor", 1) > 1:
        with torch.device("meta"):
            sharding.check_plan(packed_model.empty(inputs.model_dir))


def random_weights(inputs: Inputs, directory: Path) -> None:
    """Write an HF directory with transformers' random initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(inputs.train.seed)
        model = packed_model.empty(inputs.model_dir)
    model = packed_model.Valued(model) if inputs.model_config.value_head else model
    dtype = np.dtype(inputs.train.publish_dtype)
    weights = packed_model.hf_tensors(model, {k: p.detach() for k, p in model.named_parameters()})
    tensors = {name: p.numpy().astype(dtype) for name, p in weights.items()}
    write_directory(directory, inputs.model_config, Buckets.of(tensors), inputs.model_dir)


def make(options: TrainOptions, context: int, path: str, **decided: Any) -> Update:
    """Return a trainer that starts from the weights of an HF directory."""
    options = replace(options, **decided)
    update = TorchUpdate(load_config(path), options, Path(path))
    if options.image_dir:
        update.images = ImageStore(Path(options.image_dir)).get
    return update
