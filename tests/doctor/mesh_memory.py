"""Run by memory_test in a process with 64 devices: what the compiler plans for a step on a mesh.

    python -m tests.doctor.mesh_memory '[["wide", "fsdp:8", "full", 2048, 512], …, ["math_7b"]]'

A case is a model, mesh, remat, tokens a device and of a row; or a file of configs/, with its own.
One line of JSON a case: bytes on one device by XLA's plan, and by the estimate's pieces. Everything
is computed in float32, as a CPU does, and nothing is allocated.
"""

import json
import math
import sys
from pathlib import Path

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
from tests.configs_test import LARGE, load

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


def config_of(mesh, remat, tokens, row, chunk=256):
    """A run whose batch is one microbatch of `tokens` on each device."""
    c = default()
    c.train.mesh, c.model.remat, c.train.max_tokens_per_microbatch = mesh, remat, tokens
    c.data.max_prompt_tokens, c.sampling.max_new_tokens = row // 4, row - row // 4
    c.train.row_buckets, c.model.logprob_chunk = (row,), chunk
    axes = mesh_axes(mesh, 1)
    shards = num_row_shards(axes) * axes["context"]
    c.rollout.batch_prompts, c.sampling.n_samples = 1, tokens // row * shards
    c.algorithm.reward_mean = "batch"
    return c


def planned(model, config):
    """Bytes on one device of one train step."""
    axes = mesh_axes(config.train.mesh, 1)
    devices = jax.devices()[: math.prod(axes.values())]
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=devices)
    trainer = JaxUpdate(model, TrainOptions.of(config), mesh=mesh)
    shape = config.sampling.n_samples, config.train.row_buckets[0]
    place = jax.sharding.NamedSharding(mesh, sharding.BATCH)

    def of(dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    batch = {name: of(np.float32) for name in FLOATS} | {name: of(np.int32) for name in INTEGERS}
    scalar = jax.ShapeDtypeStruct((), np.float32)
    batch |= {"target_version": scalar, "kl_coefficient": scalar}
    batch["loss_mask"] = of(bool)
    state = trainer.abstract_state
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(
        trainer.learner.step, donate_argnums=0,
        out_shardings=(places, trainer._everywhere()),
    )  # fmt: skip
    m = step.lower(state, None, batch, np.float32(1), np.bool_(False)).compile().memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + m.temp_size_in_bytes + results


if __name__ == "__main__":
    for name, *case in json.loads(sys.argv[1]):
        if name in LARGE:
            c = load(Path(f"configs/{name}.py"))
            tokens, row = c.train.max_tokens_per_microbatch, c.train.row_buckets[-1]
            case = [c.train.mesh, c.model.remat, tokens, row, c.model.logprob_chunk]
        model = LARGE[name][0] if name in LARGE else MODELS[name]
        config = config_of(*case)
        count = math.prod(mesh_axes(config.train.mesh, 1).values())
        pieces = memory.trainer(sizes_of(config, model), Devices(count=count))
        print(json.dumps({"planned": planned(model, config), "estimate": pieces}), flush=True)
