"""How much memory a run needs, piece by piece, from its config and the model's shape.

State (parameters, moments, critic, reference) is counted exactly. What a step needs beside it is an
estimate fitted to the compiler's own account of small models' steps (tests/doctor/memory_test.py
compares the two): within a sixth where activations count, and rather above than below.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rlx.base import DiskFull
from rlx.cli.text import size
from rlx.engines.jax.programs import make_plan
from rlx.launch.available_memory import Allowance
from rlx.model import lora, sharding
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.train.steps import Steps
from rlx.train.train_options import TrainOptions

Bytes = dict[str, int]

_UPDATE = 2.6  # float32 copies of the parameters at an optimizer update, beside the state
_VLLM_CPU_KV = 4 << 30  # the most that rlx.engines.vllm.vllm_start asks for on a CPU


def longest(config: ConfigDict) -> int:
    """Tokens of the longest possible trajectory, which may be one of a pair."""
    return int(config.data.max_prompt_tokens + config.sampling.max_new_tokens)


def minibatch_tokens(config: ConfigDict, tokens_each: float, group: int = 0) -> float:
    """Tokens of the largest minibatch when every trajectory has `tokens_each`.

    Args:
      group: trajectories of a prompt; 0: sampling.n_samples.
    """
    prompts = math.ceil(config.rollout.batch_prompts / config.train.minibatches)
    return float(prompts * (group or config.sampling.n_samples) * tokens_each)


def group_size(config: ConfigDict, data: str) -> int:
    """Trajectories of a prompt, for what an algorithm is trained on (Algorithm.data)."""
    return {"pairs": 2, "demonstrations": 1}.get(data, int(config.sampling.n_samples))


def row_length(config: ConfigDict) -> int:
    """Tokens of the rows that the longest trajectory needs."""
    budget = config.train.max_tokens_per_microbatch
    fitting = [b for b in config.train.row_buckets if longest(config) <= b <= budget]
    return min(fitting, default=budget)


def state(config: ConfigDict, model: ModelConfig) -> Bytes:
    """What the trainer holds between steps, on all devices together; checkpoints hold it too, but
    for what is frozen."""
    steps = Steps(model, TrainOptions.of(config))
    s = _abstract_state(config, model, steps)
    out = {"parameters": _bytes(s.params), "optimizer": _bytes(s.opt_state)}
    if s.critic is not None:
        out["critic"] = _bytes(s.critic)
    if s.reference is not None:
        out["reference"] = _bytes(s.reference)
    return out


def _abstract_state(config: ConfigDict, model: ModelConfig, steps: Steps) -> Any:
    dtype = jnp.dtype(config.model.dtype)
    if steps.options.lora:
        return jax.eval_shape(steps.init, lora.shapes(steps.model, steps.options.lora))
    critic = steps.critic_model and parameters.shapes(steps.critic_model, dtype)
    return jax.eval_shape(steps.init, parameters.shapes(steps.model, dtype), critic)


def trainer(
    config: ConfigDict, model: ModelConfig, platform: str = "cpu", devices: int = 1
) -> Bytes:
    """Peak memory of a train step on one device: the state, and what comes and goes beside it.

    Args:
      platform: cpu | gpu | tpu; a CPU computes half precision in float32.
      devices: that the trainer has; `config.train.mesh` says how they are used.

    Returns:
      name → bytes, adding up to the peak.
    """
    steps = Steps(model, TrainOptions.of(config))
    mesh = sharding.parse_mesh(config.train.mesh) or {"data": devices}
    tensor = mesh.get("tensor", 1)
    places = tensor * mesh.get("data", 1)
    held = state(config, model)
    width = jnp.dtype(config.model.dtype).itemsize
    if steps.options.lora:
        held["frozen base"] = parameters.count(model) * width
    elif steps.algorithm.needs_reference and not steps.follows:
        held["reference"] = parameters.count(model) * width
    s = _abstract_state(config, model, steps)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(s.params))
    gradients = numbers * width
    # At their longest, trajectories fill the budget sooner than on average.
    group = group_size(config, steps.algorithm.data)
    whole = minibatch_tokens(config, longest(config), group)
    tokens = min(config.train.max_tokens_per_microbatch, whole)
    several = whole > config.train.max_tokens_per_microbatch
    if several:
        gradients += 4 * numbers  # the accumulator
    if platform == "cpu" and width < 4:
        gradients += 4 * numbers  # computed in float32
    kept, layer = _activations(config, model, tokens, platform)
    head = 0 if model.value_head else _logits(config, model, tokens)
    update = _UPDATE * 4 * numbers
    out: dict[str, float] = {name: part / places for name, part in held.items()}
    out["gradients"] = gradients / places
    out["activations"] = (kept + layer) / tensor
    out["logits"] = max(head - layer, 0) / tensor
    passing = out["activations"] + out["logits"] + numbers * width / places
    out["optimizer update"] = max(update / places - passing, 0)
    return {name: int(part) for name, part in out.items() if part >= 1}


def _activations(
    config: ConfigDict, model: ModelConfig, tokens: float, platform: str
) -> tuple[float, float]:
    """(kept for the backward pass, of the layer that is computed), bytes.

    Coefficients are floats a token: fitted to XLA's memory analysis on a CPU, see the tests.
    """
    wide, mlp, layers = model.model_dim, model.mlp_dim, model.num_layers
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    half = jnp.dtype(config.model.compute_dtype).itemsize == 2
    width = 2.0 if half else 4.0
    if platform == "cpu":  # computes half precision in float32, with casts beside it
        width = 4.4 if half else 4
    length = row_length(config)
    block = max(256, length // 16)
    scores = model.num_heads * block * (length / block + 1) * 2 / 3  # float32, see attention.py
    if platform == "gpu" and half:
        scores = length / 2  # cuDNN's kernel reads a mask alone
    if config.model.remat == "none":
        kept = layers * (7.5 * wide + 4.5 * q + 2 * kv + 3 * mlp) * width
        working = (4 * wide + 5 * mlp) * width
    else:  # of `dots` too: a product inside a custom derivative is not seen by its policy
        kept = layers * 2 * wide * width
        working = (3.5 * wide + 6.5 * mlp) * width + 4 * scores
    return tokens * kept, tokens * working


def _logits(config: ConfigDict, model: ModelConfig, tokens: float) -> float:
    """Logits, weights and gradient of a chunk; all tokens' where they are one chunk."""
    chunk = config.model.logprob_chunk
    copies = 2 if chunk >= tokens else 3
    return copies * 4 * min(chunk, tokens) * model.vocab_size


def server(config: ConfigDict, model: ModelConfig) -> Bytes:
    """What one rollout server needs: two versions of the weights while it takes one, KV cache."""
    width = jnp.dtype(config.model.publish_dtype).itemsize
    weights = parameters.count(model) * width
    budget = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
    tokens = config.fleet.max_model_len or config.data.max_prompt_tokens + budget
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * width
    if config.fleet.engine == "vllm":
        kv = min(token * config.fleet.slots * tokens, _VLLM_CPU_KV)
    else:
        plan = make_plan(config.fleet.slots, tokens, config.fleet.decode_steps)
        kv = token * plan.slots * plan.length
    return {"weights": weights, "new weights": weights, "KV cache": kv}


def published(config: ConfigDict, model: ModelConfig) -> int:
    """Bytes of a published file."""
    steps = Steps(model, TrainOptions.of(config))
    count = parameters.count(model)
    if config.fleet.publish == "adapter" and steps.options.lora:
        count = lora.count(model, steps.options.lora)
    return count * jnp.dtype(config.model.publish_dtype).itemsize


def changes(config: ConfigDict) -> dict[str, Any]:
    """Settings that may save memory in the trainer.

    What is learned stays the same, but for minibatches (two updates a batch) and bfloat16.
    """
    most, least = config.train.max_tokens_per_microbatch, longest(config)
    out: dict[str, Any] = {"train.max_tokens_per_microbatch": max(most // 2, least)}
    if config.train.minibatches == 1 and config.rollout.batch_prompts > 1:
        out["train.minibatches"] = 2
    out["model.remat"] = "full"
    out["model.logprob_chunk"] = min(256, config.model.logprob_chunk)
    out["model.compute_dtype"] = "bfloat16"
    return out


def savings(
    config: ConfigDict,
    model: ModelConfig,
    platform: str = "cpu",
    devices: int = 1,
    there: int = 0,
) -> list[tuple[str, int]]:
    """(setting as written on the command line, bytes it saves), most first; those that save 2 %."""

    def need(changed: ConfigDict) -> int:
        return sum(trainer(changed, model, platform, devices).values())

    now, found = need(config), []
    for key, value in changes(config).items():
        other = with_value(config, key, value)
        if key == "train.max_tokens_per_microbatch":
            while there and need(other) > there and value > longest(config):
                value = max(value // 2, longest(config))
                other = with_value(config, key, value)
        if (saved := now - need(other)) >= 0.02 * now:
            found.append((f"{key}={value}", saved))
    return sorted(found, key=lambda pair: -pair[1])


def with_value(config: ConfigDict, key: str, value: Any) -> ConfigDict:
    """A copy of `config` with `key`, dotted, set to `value`."""
    other = copy.deepcopy(config)
    with other.unlocked():
        other.update_from_flattened_dict({key: value})
    return other


def remedy(
    config: ConfigDict,
    model: ModelConfig,
    platform: str = "cpu",
    devices: int = 1,
    there: int = 0,
) -> str:
    """What to change so that the trainer needs less, with what each saves.

    Args:
      there: bytes that a step may take, where they are known: the token budget is then halved until
        it fits.
    """
    found = savings(config, model, platform, devices, there)[:3]
    more = ", or give train.mesh more devices" if platform != "cpu" else ""
    if not found:
        return f"use a smaller model or lora.rank: nothing else in the config saves much{more}"
    return "set " + " or ".join(f"{setting} (−{size(saved)})" for setting, saved in found) + more


def listed(pieces: Mapping[str, int]) -> str:
    """`parameters 2.0 GB, optimizer 4.0 GB`, largest first, without what is next to nothing."""
    total = sum(pieces.values())
    large = [(name, part) for name, part in pieces.items() if part >= 0.01 * total]
    return ", ".join(f"{name} {size(part)}" for name, part in sorted(large, key=lambda p: -p[1]))


def advice(config: ConfigDict, model: ModelConfig, *, started: bool = True) -> str:
    """The trainer's estimate and what would lower it, for a trainer that has run out of memory.

    Args:
      started: a step was made; before that, it is others that may hold the device's memory.
    """
    platform, devices = jax.default_backend(), jax.device_count()
    pieces = trainer(config, model, platform, devices)
    first = ""
    if not started and platform == "gpu":
        first = "end what else uses the GPU (nvidia-smi lists it); "
    total = size(sum(pieces.values()))
    return (
        f"{first}a step is estimated at {total} ({listed(pieces)}); "
        f"{remedy(config, model, platform, devices)}"
    )


def foresight(
    config: ConfigDict, model: ModelConfig, there: Allowance, *, always: bool = False
) -> str:
    """What to say before a run that may find no memory on this machine; empty where it is enough.

    On a CPU alone: a GPU's allocator fails with a message of its own, the kernel kills.

    Args:
      always: say how much is needed and free, also where it is enough.
    """
    if jax.default_backend() != "cpu":
        return ""
    pieces = trainer(config, model)
    total = sum(pieces.values())
    estimate = f"a step is estimated at {size(total)} ({listed(pieces)}), {there}"
    if total <= there.free:
        return estimate if always else ""
    return f"memory may not do: {estimate}; {remedy(config, model, there=there.free)}"


def disk_foresight(config: ConfigDict, model: ModelConfig, free: int, there: int = 0) -> str:
    """What to say before a run whose checkpoints may not fit on the disk; empty where they do.

    Args:
      free: bytes. there: bytes of earlier checkpoints and exports, which these will replace.

    Raises:
      DiskFull: not even one fits.
    """
    saved, out = sum(state(config, model).values()), exported(config, model)
    what = checkpoints(saved, out, config.checkpoint.keep)
    if saved + out > free:
        raise DiskFull(
            f"not one checkpoint will fit: {what[1]}; {size(free)} free; free some, or give "
            "another --workdir"
        )
    if what[0] <= free + there:
        return ""
    return (
        f"the disk may not do: {what[1]}; {size(free)} free; free some, give another --workdir, or "
        "lower checkpoint.keep"
    )


def exported(config: ConfigDict, model: ModelConfig) -> int:
    """Bytes of the exported HF directory."""
    return parameters.count(model) * jnp.dtype(config.model.publish_dtype).itemsize


def checkpoints(state: int, exported: int, keep: int) -> tuple[int, str]:
    """Bytes that a run keeps on the disk while it writes the next, and what they are in words."""
    needed = (keep + 1) * state + 2 * exported
    return needed, (
        f"{keep} + 1 checkpoints of {size(state)} and the HF directory need {size(needed)}"
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
