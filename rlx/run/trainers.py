"""Build the trainer that `config.trainer` names: the one file here that knows JAX."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
from ml_collections import ConfigDict

from rlx.launch import xla_flags
from rlx.model import compile_cache, hf, mesh
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.run.inputs import INITIAL, Inputs
from rlx.train.contract import Update
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


def make(config: ConfigDict, model: ModelConfig, model_dir: Path) -> Update:
    """Return the run's trainer.

    Args:
      model_dir: HF directory of the run's first weights.
    """
    return TRAINERS[config.trainer](config, model, model_dir)


def check_devices(config: ConfigDict) -> None:
    """Raise UserError where `train.mesh` does not have as many places as JAX sees devices."""
    mesh.check_devices(config.train.mesh, jax.device_count())


def first_weights(config: ConfigDict, workdir: Path, inputs: Inputs) -> Path:
    """Return the HF directory of the run's first weights; write it where they are random."""
    if not config.model.random_init:
        return inputs.model_dir
    directory, model = workdir / INITIAL, inputs.model_config
    weights = parameters.init(model, jax.random.key(config.seed), config.model.dtype)
    hf.save(directory, model, weights, config.model.publish_dtype, source=inputs.model_dir)
    return directory


def use_compile_cache() -> None:
    """Let JAX keep what it compiles; the checks before a run compile too.

    XLA's flags are part of what a program is kept by, and so come first.
    """
    xla_flags.add(os.environ)
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)


def _jax(config: ConfigDict, model: ModelConfig, model_dir: Path) -> Update:
    options = TrainOptions.of(config)

    def first(places: parameters.Params) -> parameters.Params:
        return hf.load(model_dir, options.dtype, places)[1]

    return JaxUpdate(model, options, source=first)


TRAINERS: dict[str, Callable[[ConfigDict, ModelConfig, Path], Update]] = {"jax": _jax}
