"""The PyTorch trainer: the functions of `rlx.run.trainers.TrainerLibrary`, without JAX."""

from pathlib import Path

import ml_dtypes as ml_dtypes  # registers bfloat16 with numpy
import numpy as np
from ml_collections import ConfigDict

from rlx.base import UserError, install
from rlx.doctor.machine import Devices
from rlx.model import mesh
from rlx.model.directory import load_config, resolve, write
from rlx.model.tensors import Buckets
from rlx.run.inputs import Inputs
from rlx.train.contract import Update
from rlx.train.hosts import Hosts
from rlx.train.train_options import TrainOptions

try:
    import torch

    from rlx_torch import packed_model, sharding
    from rlx_torch.update import TorchUpdate
except ImportError as error:
    raise UserError(f"trainer=torch needs PyTorch ({error}); {install('torch')}") from None


def set_up() -> None:
    """Do nothing: importing this module has checked that PyTorch works."""


def join(config: ConfigDict, hosts: Hosts) -> None:
    """Start the process group; each process has its own device."""
    sharding.join(hosts.service, hosts.index, hosts.count, config.cluster.join_seconds)


def leave() -> None:
    """Undo `join`."""
    sharding.leave()


def devices() -> Devices:
    """Return the devices of all processes, one each."""
    return Devices("gpu" if torch.cuda.is_available() else "cpu", count=sharding.processes())


def check_devices(config: ConfigDict) -> None:
    """Raise UserError if `train.mesh` does not match the processes or cannot split the model."""
    mesh.check_devices(config.train.mesh, sharding.processes())
    if mesh.parse_mesh(config.train.mesh).get("tensor", 1) > 1:
        with torch.device("meta"):
            sharding.check_plan(packed_model.empty(resolve(config.model.path)))


def random_weights(config: ConfigDict, directory: Path, inputs: Inputs) -> None:
    """Write an HF directory with transformers' random initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = packed_model.empty(inputs.model_dir)
    model = packed_model.Valued(model) if inputs.model_config.value_head else model
    dtype = np.dtype(config.model.publish_dtype)
    tensors = {name: p.detach().numpy().astype(dtype) for name, p in model.named_parameters()}
    write(directory, inputs.model_config, Buckets.of(tensors), inputs.model_dir)


def make(config: ConfigDict, path: str) -> Update:
    """Return a trainer that starts from the weights of an HF directory."""
    return TorchUpdate(load_config(path), TrainOptions.of(config), Path(path))
