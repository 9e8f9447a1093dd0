"""A tiny model, configs and rollouts for the train room."""

import jax
import numpy as np
import pytest

from rlx import config as config_lib
from rlx.base import Group, Trajectory
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.train import update
from rlx.train.train_options import TrainOptions


@pytest.fixture(scope="session")
def model_config():
    return ModelConfig(
        architecture="Qwen2ForCausalLM", vocab_size=32, num_layers=2, model_dim=16, mlp_dim=32,
        num_heads=2, num_kv_heads=1, head_dim=8, tie_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_config():
    """config(**{"train.minibatches": 2, …}) → a whole config for the tiny model."""

    def make(**overrides):
        config = config_lib.default()
        config.total_steps = 10
        config.sampling.max_new_tokens = 16
        config.optimizer.learning_rate = 1e-2
        config.train.max_tokens_per_microbatch = 2048
        config.train.row_buckets = (32, 64)
        config.train.share_prefixes = "off"  # most tests here are of plain rows
        config.update_from_flattened_dict(overrides)
        return config

    return make


@pytest.fixture(scope="session")
def trainer(model_config, make_config):
    """trainer(**overrides) → a JaxUpdate; equal overrides share one, and so its compiled steps."""
    made = {}

    def make(**overrides):
        key = tuple(sorted(overrides.items()))
        if key not in made:
            made[key] = update.JaxUpdate(model_config, TrainOptions.of(make_config(**overrides)))
        return made[key]

    return make


@pytest.fixture(scope="session")
def params(model_config):
    return parameters.init(model_config, jax.random.key(0))


@pytest.fixture(scope="session")
def make_groups():
    """Random groups: ragged prompts and completions, mixed versions, some truncated."""

    def make(seed=0, num_groups=4, n=4, longest=16, version=0, vocab=32):
        rng = np.random.default_rng(seed)
        groups = []
        for g in range(num_groups):
            prompt = rng.integers(1, vocab, rng.integers(2, 8))
            trajectories = []
            for i in range(n):
                size = int(rng.integers(1, longest + 1))
                tokens = np.concatenate([prompt, rng.integers(1, vocab, size)]).astype(np.int32)
                sampled = np.arange(len(tokens)) >= len(prompt)
                logprobs = np.where(sampled, -3.5 + 0.3 * rng.normal(size=len(tokens)), 0)
                fields = {
                    "tokens": tokens,
                    "loss_mask": sampled,
                    "behaviour_logprobs": logprobs.astype(np.float32),
                    "versions": np.where(sampled, version, -1).astype(np.int32),
                    "reward": float(rng.integers(0, 2)),
                    "stop_reason": "length" if size == longest else "stop",
                    "trajectory_id": f"{g}.{i}",
                    "info": {"length": float(size)},
                }
                trajectories.append(Trajectory(**fields))
            groups.append(Group(g, tuple(trajectories)))
        return groups

    return make
