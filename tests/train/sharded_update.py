"""Run by update_test in a process with 8 devices: sharded updates equal those of one device.

    python sharded_update.py ALGORITHM [MESH …]

of all meshes of the table without one.
"""

import sys
from dataclasses import dataclass, replace

import jax
import numpy as np

from rlx import config as config_lib
from rlx.base import Group, Trajectory
from rlx.model import kept_tokens, sharding
from rlx.model import mesh as mesh_lib
from rlx.model import params as parameters
from rlx.model.model_config import TRAITS, ModelConfig
from rlx.model.rope import Rope
from rlx.train import update
from rlx.train.train_options import TrainOptions

# Else eight devices with computations dispatched ahead can wait for each other for ever.
jax.config.update("jax_cpu_enable_async_dispatch", False)

MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM", vocab_size=32, num_layers=2, model_dim=16, mlp_dim=32,
    num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=True, attention_bias=True,
)  # fmt: skip

MIXTURE = replace(
    MODEL, architecture="Qwen3MoeForCausalLM", attention_bias=False, qk_norm=True, num_experts=8,
    experts_per_token=2, expert_dim=12, initializer_range=0.2,
)  # fmt: skip


def masks(rng, tokens):
    """Sets of a third of the vocabulary with the token; one in four has nearly all."""
    found = rng.random((len(tokens), 32)) < rng.choice([0.3, 0.9], (len(tokens), 1), p=(0.75, 0.25))
    found[np.arange(len(tokens)), tokens] = True
    codes, sizes = kept_tokens.compress(np.packbits(found, axis=1, bitorder="little"), 32)
    return {"kept": np.frombuffer(codes, np.uint8), "kept_sizes": np.array(sizes, np.int32)}


def groups(seed, samples=8, masked=False, alike=False):
    rng = np.random.default_rng(seed)
    out = []
    for g in range(4):
        trajectories = []
        for i in range(samples):
            prompt, size = 3 + g, int(rng.integers(5, 25))
            sampled = np.arange(size + prompt) >= prompt
            tokens = rng.integers(1, 32, size + prompt).astype(np.int32)
            if alike and trajectories:
                tokens[:prompt] = trajectories[0].tokens[:prompt]
            trajectories.append(
                Trajectory(
                    tokens, sampled,
                    np.where(sampled, -3.4, 0).astype(np.float32), np.where(sampled, 0, -1),
                    float(rng.integers(0, 2)), "stop", f"{g}.{i}",
                    **(masks(rng, tokens) if masked else {}),
                )
            )  # fmt: skip
        out.append(Group(g, tuple(trajectories)))
    return out


# Windows and softcaps over `context`; norms over heads that `tensor` cuts.
OTHER = replace(
    MODEL, architecture="Gemma3ForCausalLM", windows=(5, 0), local_rope=Rope(theta=100.0),
    attention_softcap=2.0, logit_softcap=3.0, activation="gelu_pytorch_tanh", joint_qk_norm=True,
    **TRAITS["Gemma3ForCausalLM"],
)  # fmt: skip
# One adapter of several matrices, each of which `tensor` cuts.
JOINED = replace(MODEL, architecture="Phi3ForCausalLM", **TRAITS["Phi3ForCausalLM"])
MESHES = (  # a tensor of 4 does not divide the key heads
    "fsdp:8", "fsdp:4,tensor:2", "replica:2,fsdp:2,tensor:2", "fsdp:2,context:4",
    "context:2,tensor:4",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An algorithm and how it is trained.

    Attributes:
      cut: a parameter that every mesh cuts.
      masked: whether tokens were drawn from a part of the vocabulary.
      trees: whether samples share their prompt, which is then computed once.
    """

    preset: str
    cut: str
    samples: int = 8
    minibatches: int = 1
    budget: int = 2048
    rank: int = 0
    model: ModelConfig = MODEL
    balance: float = 0.0
    masked: bool = False
    trees: bool = False
    meshes: tuple[str, ...] = MESHES


CASES = {
    "ppo": Case("ppo", "q"),
    "accumulated": Case("ppo", "q", minibatches=2, budget=64),
    "lora": Case("grpo", "q_lora_a", rank=3),
    "joined": Case("grpo", "gate_up_lora_a", rank=3, model=JOINED, meshes=("fsdp:4,tensor:2",)),
    "dpo": Case("dpo", "q", samples=2),
    "masks": Case("grpo", "q", masked=True, meshes=("fsdp:4,tensor:2", "fsdp:2,context:4")),
    "trees": Case("grpo", "q", trees=True, meshes=("fsdp:4,tensor:2", "replica:2,fsdp:2,tensor:2")),
    "windows": Case("grpo", "q", model=OTHER),
    "experts": Case("grpo", "expert_down", model=MIXTURE, balance=0.1, meshes=(
        "replica:4,expert:2", "fsdp:2,expert:4", "fsdp:2,expert:2,tensor:2", "expert:4,context:2",
        "fsdp:4,tensor:2",
    )),
}  # fmt: skip
METRICS = (
    "actor_loss", "grad_norm", "entropy", "behaviour_weight", "task_reward", "value_loss",
    "critic_grad_norm", "pair_loss", "pair_margin", "balance_loss", "expert_max_share",
    "expert_balance", "router_entropy",
)  # fmt: skip


def run(case, mesh, budget):
    config = config_lib.default()
    config.algorithm.preset = case.preset
    config.critic.learning_rate = 0.1
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 1.0
    # One length of rows: each is compiled for itself.
    config.train.row_buckets, config.train.max_tokens_per_microbatch = (64,), budget
    config.train.minibatches, config.lora.rank = case.minibatches, case.rank
    config.train.balance_coefficient = case.balance
    config.train.share_prefixes = "on" if case.trees else "off"
    params = parameters.init(case.model, jax.random.key(0))
    options = TrainOptions.of(config)
    trainer = update.JaxUpdate(case.model, options, mesh=mesh, source=lambda _: params)
    state = trainer.init(params)
    for seed in range(2):
        state, metrics = trainer.update(state, groups(seed, case.samples, case.masked, case.trees))
    return trainer, state, metrics


def main(name, *meshes):
    case = CASES[name]
    alone = np.array(jax.devices()[:1]).reshape([1] * len(mesh_lib.AXES))
    one = jax.sharding.Mesh(alone, mesh_lib.AXES)
    _, alone, expected = run(case, one, 2048)
    for text in meshes or case.meshes:
        print(name, text, flush=True)
        trainer, state, metrics = run(case, sharding.make_mesh(text), case.budget)
        weights = state.params["layers"][case.cut]
        assert len(weights.sharding.device_set) == 8
        assert not weights.sharding.is_fully_replicated
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
        for metric in set(METRICS) & set(expected):
            np.testing.assert_allclose(metrics[metric], expected[metric], rtol=1e-3, atol=1e-6)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state, trainer.abstract_state)
        assert all(jax.tree.leaves(same)), same


if __name__ == "__main__":
    main(*sys.argv[1:])
