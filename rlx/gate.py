"""The gate of a run: no step on tokens of an engine that is not the trainer's policy."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rlx import consistency
from rlx.fleet.sample import Completion
from rlx.inputs import Inputs, training_sampling
from rlx.model import hf
from rlx.model.params import Params


class Gate:
    """The prompts a run asks every server for, and the limits of what it may answer.

    Args:
      model_dir: HF directory of the weights the run began with, to be recognised as stale.

    Attributes:
      prompts: [T] int32 each, of the first training rows.
      sampling: the run's, with a short budget.
    """

    def __init__(self, config: ConfigDict, inputs: Inputs, model_dir: Path):
        rows = inputs.train_rows[: config.gate.prompts]
        self.prompts = [np.array(inputs.workflow.prompt_ids(row), np.int32) for row in rows]
        training = training_sampling(config)
        budget = min(config.gate.max_new_tokens, training.max_new_tokens)
        self.sampling = dataclasses.replace(
            training,
            max_new_tokens=budget,
            min_new_tokens=min(training.min_new_tokens, budget),
            seed=config.seed,
        )
        self._tolerance = tolerance(config)
        self._model, self._model_dir = inputs.model_config, model_dir
        self._dtype = config.model.dtype
        self._compute = jnp.dtype(config.model.compute_dtype)

    def check(
        self, params: Params, version: int, answers: Mapping[str, Sequence[Completion]]
    ) -> dict[str, Any]:
        """The record of one check: {step, max_delta, mean_delta, tokens, servers: {address: …}}.

        Args:
          params: those of `version`, on the device.

        Raises:
          UserError: a server's tokens are not of these parameters; see rlx.consistency.check.
        """
        policy = consistency.Policy(params, self._model, self.sampling.temperature, self._compute)
        case = consistency.Case(
            policy, self.sampling, lambda: hf.load(self._model_dir, self._dtype)[1]
        )
        found = consistency.check(case, self.prompts, answers, self._tolerance, version)
        servers = {
            address: {"mean_delta": r.mean, "max_delta": r.max, "tokens": r.tokens}
            for address, r in found.items()
        }
        return {
            "step": version,
            "max_delta": max((r.max for r in found.values()), default=0.0),
            "mean_delta": max((r.mean for r in found.values()), default=0.0),
            "tokens": sum(r.tokens for r in found.values()),
            "servers": servers,
        }


def tolerance(config: ConfigDict) -> consistency.Tolerance:
    """The config's limits, or those of its dtypes where it has none."""
    exact = config.model.publish_dtype == config.model.compute_dtype == "float32"
    default = consistency.EXACT if exact else consistency.ROUNDED
    return consistency.Tolerance(
        config.gate.max_delta or default.max, config.gate.mean_delta or default.mean
    )


def sentence(record: Mapping[str, Any]) -> str:
    """What the user reads of a check that was passed."""
    return (
        f"engine and trainer agree: logprobs of {record['tokens']} tokens differ by at most "
        f"{record['max_delta']:.1g}"
    )
