"""Make the parts and options of other rooms from the run's config.

Rooms take values and dataclasses of their own; only this room, the commands and `cli/` know the
names of the config's keys.
"""

import dataclasses
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from rlx.doctor.memory import RunSizes
from rlx.evaluation.held_out import HeldOutOptions
from rlx.fleet.joining import Joining
from rlx.fleet.tls import client_tls
from rlx.launch.workdir_lock import make_directory
from rlx.mismatch import measure
from rlx.mismatch.gate import Gate
from rlx.model.model_config import ModelConfig
from rlx.run.inputs import (
    Inputs,
    evaluation_sampling,
    has_servers,
    patience,
    server_options,
    training_sampling,
)
from rlx.train.train_options import TrainOptions


def gate_of(config: ConfigDict, inputs: Inputs, first: Path, saved: Path) -> Gate:
    """Return the run's gate; its prompts are training rows, evenly spread.

    Args:
      first, saved: HF directories of the run's first weights and of its last checkpoint, which need
        not exist: what a server may still have.
    """
    rows, count = inputs.train_rows, min(config.gate.prompts, len(inputs.train_rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    prompts = [np.array(inputs.prompts.ids(row), np.int32) for row in chosen]
    training, model = training_sampling(config), config.model
    budget = min(config.gate.max_new_tokens, training.max_new_tokens)
    exact = model.compute_dtype == model.publish_dtype == "float32"
    return Gate(
        prompts,
        dataclasses.replace(
            training,
            max_new_tokens=budget,
            min_new_tokens=min(training.min_new_tokens, budget),
            stop=(),
        ),
        measure.TrainerScorer(
            inputs.model_config,
            temperature=training.temperature,
            row_length=measure.row_length(max(map(len, prompts)) + budget),
            compute_dtype=model.compute_dtype,
            chunk=model.logprob_chunk,
        ),
        measure.tolerance(exact, config.gate.max_delta, config.gate.mean_delta),
        seed=config.seed,
        earlier={"the run's first weights": first, "the last checkpoint": saved},
        dtype=model.dtype,
    )


def joining_of(config: ConfigDict) -> Joining | None:
    """Return where servers that join are found; a directory is made. None: none join."""
    fleet = config.fleet
    if fleet.discover == "static":
        return None
    if fleet.discover == "dir":
        make_directory(Path(fleet.join), "--config.fleet.join")
    return Joining(fleet.discover, fleet.join, client_tls(**fleet.tls))


def held_out_options(config: ConfigDict, inputs: Inputs) -> HeldOutOptions:
    """Return what a run evaluates."""
    return HeldOutOptions(
        inputs.eval_rows,
        inputs.held_out,
        sampling=evaluation_sampling(config) if has_servers(config) else None,
        total_steps=config.total_steps,
        patience=patience(config),
        timeout=config.rollout.request_timeout_seconds,
    )


def sizes_of(config: ConfigDict, model: ModelConfig) -> RunSizes:
    """Return what decides how much memory a run of `model` needs.

    Raises:
      UserError: an unknown algorithm, or one that does not fit the config.
    """
    c, fleet = config, config.fleet
    return RunSizes(
        model=model,
        train=TrainOptions.of(config),
        max_prompt_tokens=c.data.max_prompt_tokens,
        max_new_tokens=c.sampling.max_new_tokens,
        batch_prompts=c.rollout.batch_prompts,
        n_samples=c.sampling.n_samples,
        has_fleet=has_servers(config),
        engine=fleet.engine,
        num_servers=0 if fleet.addresses else fleet.num_servers,
        slots=fleet.slots,
        max_model_len=server_options(c)["max_model_len"],
        decode_steps=fleet.decode_steps,
        publish=fleet.publish,
        publish_dir=fleet.publish_dir,
        publish_dtype=c.model.publish_dtype,
        keep=c.checkpoint.keep,
    )
