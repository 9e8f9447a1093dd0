"""Run by update_test in a process with 8 devices: sharded updates equal those of one device."""

import sys

import jax
import numpy as np

from rlx import config as config_lib
from rlx.base import Group, Trajectory
from rlx.model import mesh as mesh_lib
from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.model_config import ModelConfig
from rlx.train import update
from rlx.train.train_options import TrainOptions

MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM", vocab_size=32, num_layers=2, model_dim=16, mlp_dim=32,
    num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=True, attention_bias=True,
)  # fmt: skip


def groups(seed, samples=8):
    rng = np.random.default_rng(seed)
    out = []
    for g in range(4):
        trajectories = []
        for i in range(samples):
            prompt, size = 3 + g, int(rng.integers(5, 25))
            sampled = np.arange(size + prompt) >= prompt
            trajectories.append(
                Trajectory(
                    rng.integers(1, 32, size + prompt).astype(np.int32), sampled,
                    np.where(sampled, -3.4, 0).astype(np.float32), np.where(sampled, 0, -1),
                    float(rng.integers(0, 2)), "stop", f"{g}.{i}",
                )
            )  # fmt: skip
        out.append(Group(g, tuple(trajectories)))
    return out


def run(mesh_text, minibatches, budget, rank, preset):
    config = config_lib.default()
    config.algorithm.preset = preset
    config.critic.learning_rate = 0.1
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 1.0
    config.train.row_buckets, config.train.max_tokens_per_microbatch = (32, 64), budget
    config.train.minibatches, config.lora.rank = minibatches, rank
    if mesh_text:
        mesh = sharding.make_mesh(mesh_text)
    else:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), mesh_lib.AXES)
    params = parameters.init(MODEL, jax.random.key(0))
    trainer = update.JaxUpdate(
        MODEL,
        TrainOptions.of(config),
        mesh=mesh,
        source=lambda _: params,
    )
    state = trainer.init(params)
    for seed in range(2):
        state, metrics = trainer.update(state, groups(seed, 2 if preset == "dpo" else 8))
    return trainer, state, metrics


CASES = (
    # mesh, minibatches, token budget a device, rank of LoRA's adapters, algorithm, a parameter that
    # is cut
    ("fsdp:4,tensor:2", 2, 64, 0, "ppo", "q"),
    ("fsdp:4,tensor:2", 2, 2048, 3, "grpo", "q_lora_b"),
    ("replica:2,fsdp:2,tensor:2", 2, 64, 0, "ppo", "q"),
    ("data:2,tensor:4", 1, 64, 0, "dpo", "q"),
    ("fsdp:2,context:4", 2, 64, 0, "ppo", "q"),
    ("context:4,tensor:2", 1, 64, 0, "dpo", "q"),
    ("fsdp:2,context:2,tensor:2", 2, 2048, 3, "grpo", "q_lora_b"),
)
METRICS = (
    "actor_loss", "grad_norm", "entropy", "behaviour_weight", "task_reward", "value_loss",
    "critic_grad_norm", "pair_loss", "pair_margin",
)  # fmt: skip


def main(*cases):
    for mesh, minibatches, budget, rank, preset, name in (CASES[int(case)] for case in cases):
        _, alone, expected = run("", minibatches, 2048, rank, preset)
        trainer, state, metrics = run(mesh, minibatches, budget, rank, preset)
        q = state.params["layers"][name]
        assert len(q.sharding.device_set) == 8
        assert not q.sharding.is_fully_replicated
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
        for name in set(METRICS) & set(expected):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-3, atol=1e-6)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state, trainer.abstract_state)
        assert all(jax.tree.leaves(same)), same


if __name__ == "__main__":
    main(*sys.argv[1:])
