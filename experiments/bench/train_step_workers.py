"""The two sides of the train-step benchmark, each a process that makes a step on request.

`python -m experiments.bench.train_step_workers '{"side": "jax", ...}'` writes one JSON line when it
is ready. For each line that it reads it writes one: wall and CPU seconds of a step.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlx.base import Group, Trajectory
from rlx.config import default
from rlx.model.model_config import ModelConfig
from rlx.system.process_settings import keep_freed_memory

Step = Callable[[], float]


def qwen2(vocab, layers, width, heads, kv_heads, mlp) -> ModelConfig:
    """Return the config of a tied Qwen2 of the given shape."""
    return ModelConfig(
        "Qwen2ForCausalLM", vocab_size=vocab, num_layers=layers, model_dim=width, mlp_dim=mlp,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width // heads, tie_embeddings=True,
        attention_bias=True,
    )  # fmt: skip


# vocabulary, layers, width, heads, kv heads, MLP
MODELS = {
    "tiny": qwen2(2048, 4, 256, 8, 4, 768),
    "25m": qwen2(4096, 8, 512, 8, 4, 1408),
    "135m": qwen2(49_152, 30, 576, 9, 3, 1536),  # SmolLM2's
    "0.5b": qwen2(151_936, 24, 896, 14, 2, 4864),
    "1.5b": qwen2(151_936, 28, 1536, 12, 2, 8960),
}


def make_lengths(kind: str, sequences: int, seed: int = 0) -> np.ndarray:
    """Return [S, 2] prompt and completion tokens.

    `even`: 32 + 64 each, without padding. `uneven`: prompts of 20–40, completions log-normal around
    40 within 16–128. `gsm8k`: 130 and 190 with that data set's spread, completions ≤ 1024.
    """
    rng = np.random.default_rng(seed)
    if kind == "even":
        return np.tile([32, 64], (sequences, 1))
    if kind == "uneven":
        completions = rng.lognormal(np.log(40), 0.7, sequences).round().clip(16, 128)
        return np.stack([rng.integers(20, 41, sequences), completions.astype(int)], 1)
    prompts = rng.lognormal(np.log(130), 0.35, sequences).round().clip(32, 512)
    completions = rng.lognormal(np.log(190), 0.5, sequences).round().clip(16, 1024)
    return np.stack([prompts, completions], 1).astype(int)


def make_groups(lengths: np.ndarray, vocab: int, samples: int = 8) -> list[Group]:
    """Return groups of random tokens and rewards; behaviour logprobs suit a random model."""
    rng = np.random.default_rng(1)
    groups = []
    for start in range(0, len(lengths), samples):
        members = []
        for index, (prompt, completion) in enumerate(lengths[start : start + samples]):
            size = prompt + completion
            mask = np.arange(size) >= prompt
            members.append(
                Trajectory(
                    # from 3, because transformers gives a pad token's embedding no gradient
                    tokens=rng.integers(3, vocab, size).astype(np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=np.where(mask, -np.log(vocab), 0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    reward=float(rng.random()),
                    stop_reason="stop",
                    trajectory_id=f"{start // samples}.{index}",
                )
            )
        groups.append(Group(start // samples, tuple(members)))
    return groups


def make_config(options: dict):
    """Return a config: GRPO, AdamW, one minibatch; a microbatch holds `budget` tokens."""
    config = default()
    config.train.max_tokens_per_microbatch = options["budget"]
    config.train.row_buckets = tuple(options["row_buckets"])
    config.model.compute_dtype = options["compute_dtype"]
    config.model.remat = options["remat"]
    config.train.compile = options.get("compile", False)
    config.model.logprob_chunk = options["chunk"]
    config.optimizer.learning_rate = 1e-4
    return config


def jax_side(options: dict) -> tuple[Step, dict]:
    """Return the trainer's own update: groups in, packed, one update, on the device."""
    import jax

    from rlx.model import params
    from rlx.train import packing
    from rlx.train.train_options import TrainOptions
    from rlx.train.update import JaxUpdate

    if options["platform"] != "cpu":
        jax.config.update("jax_platforms", options["platform"])
    model = MODELS[options["model"]]
    config = make_config(options)
    update = JaxUpdate(model, TrainOptions.of(config))
    state = update.init(jax.jit(lambda key: params.init(model, key))(jax.random.key(0)))
    groups = make_groups(make_lengths(options["lengths"], options["sequences"]), model.vocab_size)
    plan = packing.plan(
        packing.flatten(groups).sizes[: options["sequences"]], options["budget"],
        options["row_buckets"], attention_cost=params.attention_cost(model),
    )  # fmt: skip

    def step() -> float:
        nonlocal state
        state, _ = update.update(state, groups)
        return float(jax.block_until_ready(state.updates))

    device = jax.devices()[0].device_kind
    rows = ", ".join(f"{rows}x{length}" for rows, length in plan.shapes)
    return step, {"device": f"{device} (JAX {jax.__version__})", "rows": rows}


def trainer_torch_side(options: dict) -> tuple[Step, dict]:
    """Return the update of trainer=torch, of a transformers model with random weights."""
    import tempfile

    import torch

    from experiments.bench.plain_torch import init
    from rlx.train.train_options import TrainOptions
    from rlx_torch.update import TorchUpdate

    shape, config = MODELS[options["model"]], make_config(options)
    with tempfile.TemporaryDirectory() as directory:
        init(shape).save_pretrained(directory)
        update = TorchUpdate(shape, TrainOptions.of(config), Path(directory))
        state = update.init()
    if update.devices.endswith("cpu"):
        torch.set_num_threads(options["threads"])
    groups = make_groups(make_lengths(options["lengths"], options["sequences"]), shape.vocab_size)

    def step() -> float:
        nonlocal state
        state, metrics = update.update(state, groups)
        return float(dict(metrics)["grad_norm"])

    return step, {"device": update.devices, "rows": "packed"}


def torch_side(options: dict) -> tuple[Step, dict]:
    """Return the rival's step: transformers' model, the same loss, one right-padded batch."""
    import torch

    from experiments.bench.plain_torch import init, make_optimizer, train_step
    from rlx.algorithms import presets

    torch.set_num_threads(options["threads"])
    config, shape = make_config(options), MODELS[options["model"]]
    algorithm = presets.resolve(config.algorithm, config.sampling.max_new_tokens)
    model = init(shape)
    optimizer = make_optimizer(model, config.optimizer)
    lengths = make_lengths(options["lengths"], options["sequences"])
    batch = padded(make_groups(lengths, shape.vocab_size))
    batch = {name: torch.from_numpy(array) for name, array in batch.items()}

    def step() -> float:
        stats = train_step(
            model, optimizer, batch, float(len(lengths)), algorithm,
            clip_norm=config.optimizer.clip_norm, half=options["compute_dtype"] == "bfloat16",
        )  # fmt: skip
        return stats["grad_norm"]

    rows = "{}x{} in 1".format(*batch["tokens"].shape)
    return step, {"device": "cpu", "rows": rows}


def trl_side(options: dict) -> tuple[Step, dict]:
    """Return TRL's GRPOTrainer step: forward, loss and backward of one batch, fused AdamW.

    Its inputs are made before the clock starts, as its generation would make them: prompts padded
    on the left, completions on the right.
    """
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from experiments.bench import workload
    from experiments.bench.plain_torch import init, make_optimizer

    torch.set_num_threads(options["threads"])
    config, shape = make_config(options), MODELS[options["model"]]
    lengths = make_lengths(options["lengths"], options["sequences"])
    with tempfile.TemporaryDirectory() as directory:
        workload.make(Path(directory))
        trainer = GRPOTrainer(
            model=init(shape),
            processing_class=AutoTokenizer.from_pretrained(f"{directory}/model"),
            reward_funcs=workload.reward,
            train_dataset=Dataset.from_list([{"prompt": "one"}] * 8),
            args=GRPOConfig(
                output_dir=directory, per_device_train_batch_size=len(lengths), num_generations=8,
                loss_type="grpo", beta=0.0, use_cpu=True, bf16=False, report_to=[],
                gradient_checkpointing=False,
            ),
        )  # fmt: skip
    batch = trl_batch(make_groups(lengths, shape.vocab_size))
    trainer._prepare_inputs = lambda given: given  # prevents generation
    trainer.current_gradient_accumulation_steps = 1
    optimizer = make_optimizer(trainer.model, config.optimizer)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        trainer.training_step(trainer.model, batch, None)
        norm = torch.nn.utils.clip_grad_norm_(
            trainer.model.parameters(), config.optimizer.clip_norm
        )
        optimizer.step()
        return float(norm)

    rows = "{}x({}+{})".format(*batch["prompt_ids"].shape, batch["completion_ids"].shape[1])
    return step, {"device": "cpu", "rows": rows}


def trl_batch(groups: list[Group]) -> dict:
    """Return the inputs of TRL's loss: prompts and completions of one batch, as tensors."""
    import torch

    whole = padded(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    batch = {"advantages": torch.tensor(whole["advantages"].max(1) + whole["advantages"].min(1))}
    for name, side in (("prompt", "left"), ("completion", "right")):
        mask = name == "completion"
        rows = [torch.from_numpy(t.tokens[t.loss_mask == mask]).long() for t in trajectories]
        pad = torch.nn.utils.rnn.pad_sequence
        batch[f"{name}_ids"] = pad(rows, batch_first=True, padding_side=side)
        ones = [torch.ones_like(row) for row in rows]
        batch[f"{name}_mask"] = pad(ones, batch_first=True, padding_side=side)
    return batch


def padded(groups: list[Group]) -> dict[str, np.ndarray]:
    """Return one sequence per row, padded on the right, with normalised rewards as advantages."""
    trajectories = [t for group in groups for t in group.trajectories]
    shape = (len(trajectories), max(len(t.tokens) for t in trajectories))
    batch = {name: np.zeros(shape, np.int64) for name in ("tokens", "positions", "segment_ids")}
    batch["loss_mask"] = np.zeros(shape, bool)
    for name in ("behaviour_logprobs", "advantages", "loss_weights"):
        batch[name] = np.zeros(shape, np.float32)
    rewards = [np.array([t.reward for t in group.trajectories]) for group in groups]
    scores = np.concatenate([(r - r.mean()) / (r.std(ddof=1) + 1e-5) for r in rewards])
    for row, (t, score) in enumerate(zip(trajectories, scores, strict=True)):
        size = len(t.tokens)
        batch["tokens"][row, :size] = t.tokens
        batch["positions"][row, :size] = np.arange(size)
        batch["segment_ids"][row, :size] = 1
        batch["loss_mask"][row, :size] = t.loss_mask
        batch["behaviour_logprobs"][row, :size] = t.behaviour_logprobs
        batch["advantages"][row, :size] = score * t.loss_mask
        batch["loss_weights"][row, :size] = t.loss_mask / t.num_trained
    return batch


SIDES = {"jax": jax_side, "trainer_torch": trainer_torch_side, "torch": torch_side,
         "trl": trl_side}  # fmt: skip


def main() -> None:
    """Serve steps over stdin and stdout."""
    options = json.loads(sys.argv[1])
    keep_freed_memory()  # for both sides, because it helps torch too
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of libraries out of the protocol
    start = time.perf_counter()
    step, facts = SIDES[options["side"]](options)
    for _ in range(2):
        step()
    print(json.dumps({**facts, "warm_seconds": time.perf_counter() - start}), file=out, flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        check = step()
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({**took, "check": check}), file=out, flush=True)


if __name__ == "__main__":
    main()
