"""Run by collectives_test in a process with 8 devices: prints what a compiled gradient sends.

    python collectives.py MESH REMAT CHUNK [experts]

One line of JSON: the shapes of the parameters, and of each collective its kind, its shapes, and
whether it is inside the loop over layers.
"""

import json
import re
import sys
from dataclasses import replace

import jax
import numpy as np

from rlx import config as config_lib
from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.model_config import ModelConfig
from rlx.train import update
from rlx.train.train_options import TrainOptions

# No size of a weight is a multiple of a row's 48 tokens or of a batch's 8 rows × 48.
MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM", vocab_size=512, num_layers=3, model_dim=64, mlp_dim=160,
    num_heads=4, num_kv_heads=2, head_dim=16, tie_embeddings=False, attention_bias=True,
)  # fmt: skip
MIXTURE = replace(
    MODEL, architecture="Qwen3MoeForCausalLM", attention_bias=False, num_experts=8,
    experts_per_token=2, expert_dim=40,
)  # fmt: skip
ROWS, TOKENS = 8, 48
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
FLOATS = ("behaviour_logprobs", "advantages", "loss_weights")
INTEGERS = ("tokens", "positions", "segment_ids", "versions")


def compiled(model, mesh, remat, chunk, compute_dtype="float32"):
    config = config_lib.default()
    config.train.mesh, config.model.remat, config.model.logprob_chunk = mesh, remat, chunk
    config.model.compute_dtype = compute_dtype
    trainer = update.JaxUpdate(model, TrainOptions.of(config))
    rows = {name: np.zeros((ROWS, TOKENS), np.float32) for name in FLOATS}
    rows |= {name: np.zeros((ROWS, TOKENS), np.int32) for name in INTEGERS}
    rows |= {name: np.zeros((ROWS, TOKENS), bool) for name in ("loss_mask", "sampled")}
    batch = trainer._device_put(rows, sharding.BATCH)
    batch |= {"target_version": np.float32(0), "kl_coefficient": np.float32(0)}
    params = trainer.abstract_state.params
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    gradient = jax.jit(trainer.learner.gradient, out_shardings=(places, trainer._everywhere()))
    return gradient.lower(params, None, batch)


def collectives(program):
    found = []
    for line in program.splitlines():
        match = re.match(rf"\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({KINDS})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [[int(size) for size in shape.split(",") if size] for shape in shapes]
            found.append({"kind": match[2], "shapes": sizes, "loop": "/while/" in line})
    return found


if __name__ == "__main__":
    mesh, remat, chunk, *experts = sys.argv[1:]
    model = MIXTURE if experts else MODEL
    cast = compiled(model, mesh, remat, int(chunk), "bfloat16").as_text()
    program = compiled(model, mesh, remat, int(chunk)).compile().as_text()
    weights = {r.path[-1]: list(r.shape[r.stacked :]) for r in parameters.table(model)}
    print(json.dumps({
        "weights": weights,
        "layers": model.num_layers,
        "collectives": collectives(program),
        "constrained": re.findall(r"sharding_constraint .*?: tensor<([\dx]+)x(\w+)>", cast),
        "gathered": re.findall(r"all_gather.*-> tensor<([\dx]+)x(\w+)>", cast),
    }))  # fmt: skip
