"""Run by memory_test in a process with 8 devices: what the compiler plans for a step on a mesh.

    python mesh_memory.py '[["wide", "fsdp:8", "full", 2048], …]'

One line of JSON a case: bytes on one device by XLA's plan, and by the estimate's pieces.
"""

import json
import sys

import jax
import numpy as np

from rlx.config import default
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.model import sharding
from rlx.model.mesh import mesh_axes, num_row_shards
from rlx.model.model_config import ModelConfig
from rlx.run.room_options import sizes_of
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

ROW = 512
MODELS = {
    # activations count
    "wide": ModelConfig(
        "Qwen2ForCausalLM", vocab_size=2048, num_layers=4, model_dim=256, mlp_dim=1024,
        num_heads=8, num_kv_heads=2, head_dim=32, tie_embeddings=True, attention_bias=True,
    ),
    # parameters and the head count
    "deep": ModelConfig(
        "Qwen2ForCausalLM", vocab_size=8192, num_layers=12, model_dim=512, mlp_dim=1536,
        num_heads=8, num_kv_heads=4, head_dim=64, attention_bias=True,
    ),
}  # fmt: skip
FLOATS = ("advantages", "loss_weights", "behaviour_logprobs", "proximal_logprobs")
INTEGERS = ("tokens", "positions", "segment_ids", "versions")


def config_of(mesh, remat, tokens):
    """A run whose batch is one microbatch of `tokens` on each device that has rows of its own."""
    c = default()
    c.train.mesh, c.model.remat, c.train.max_tokens_per_microbatch = mesh, remat, tokens
    c.data.max_prompt_tokens, c.sampling.max_new_tokens = 128, ROW - 128
    axes = mesh_axes(mesh, 8)
    shards = num_row_shards(axes) * axes["context"]
    c.rollout.batch_prompts, c.sampling.n_samples = 1, tokens // ROW * shards
    c.algorithm.reward_mean = "batch"
    c.model.logprob_chunk = 256
    return c


def planned(model, config):
    """Bytes on one device of one train step."""
    trainer = JaxUpdate(model, TrainOptions.of(config))
    mesh, steps = trainer._mesh, trainer._steps
    rows = config.rollout.batch_prompts * config.sampling.n_samples

    def of(dtype):
        place = jax.sharding.NamedSharding(mesh, sharding.BATCH)
        return jax.ShapeDtypeStruct((rows, ROW), dtype, sharding=place)

    batch = {name: of(np.float32) for name in FLOATS} | {name: of(np.int32) for name in INTEGERS}
    scalar = jax.ShapeDtypeStruct((), np.float32)
    batch |= {"target_version": scalar, "kl_coefficient": scalar}
    batch["loss_mask"] = of(bool)
    state = trainer.abstract_state
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(
        steps.learner.step, donate_argnums=0, out_shardings=(places, trainer._everywhere())
    )
    m = step.lower(state, None, batch, np.float32(1), np.bool_(False)).compile().memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + m.temp_size_in_bytes + results


if __name__ == "__main__":
    for name, mesh, remat, tokens in json.loads(sys.argv[1]):
        model, config = MODELS[name], config_of(mesh, remat, tokens)
        pieces = memory.trainer(sizes_of(config, model), Devices(count=8))
        print(json.dumps({"planned": planned(model, config), "estimate": pieces}), flush=True)
