"""Make the parts and options of other rooms from the run's config.

Rooms take values and dataclasses of their own; only this room, the commands and `cli/` know the
names of the config's keys.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.agents import named_workflow
from rlx.agents.workflow import AgentOptions
from rlx.base import UserError
from rlx.doctor.memory import RunSizes
from rlx.engines.engine import EngineOptions
from rlx.fleet.addresses import Joining
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import client_tls
from rlx.launch import ray_workers
from rlx.model.model_config import ModelConfig
from rlx.option import read_options
from rlx.rewards import rewards
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout.attempts import Patience
from rlx.system.workdir_lock import make_directory
from rlx.train.train_options import TrainOptions
from rlx.workers.worker_process import WorkerLimits


def is_online(config: ConfigDict) -> bool:
    """Return whether applications outside ask, in place of rows."""
    return config.rollout.workflow == named_workflow.ONLINE


def has_servers(config: ConfigDict) -> bool:
    """Return whether the run has a fleet; training on a dataset needs none."""
    fleet = config.fleet
    return bool(fleet.addresses or fleet.join) or fleet.num_servers > 0


def check_reward(config: ConfigDict) -> dict[str, float]:
    """Return name → weight of the run's rewards; none where its workflow has no use for them.

    Raises:
      UserError: `reward.terms` is malformed, or for nobody; there is no such function or workflow.
    """
    weights = rewards.weights_of(config.reward.name, config.reward.terms)
    weights.pop(rewards.MODEL, None)
    if not named_workflow.uses_rewards(config.rollout.workflow, "rollout.workflow"):
        if config.reward.terms and weights:
            raise UserError(
                f"reward.terms has {', '.join(weights)}, and rollout.workflow="
                f"{config.rollout.workflow} gives rewards by itself; leave them out, but for model"
            )
        return {}
    for name in weights:
        rewards.resolve(name)
    return weights


def pool_of(config: ConfigDict, rewards: Mapping[str, float] | str, workers: int) -> RewardPool:
    """Return what grades by `rewards`, here or on a Ray cluster."""
    limits = WorkerLimits.of(config.reward, config.sandbox)
    start = ray_workers.starter("reward", config)
    return RewardPool(rewards, workers, config.reward.timeout_seconds, limits, start)


def agents_of(config: ConfigDict) -> AgentOptions:
    """Return how agents run, here or on a Ray cluster."""
    return replace(AgentOptions.of(config), start=ray_workers.starter("agents", config))


def training_sampling(config: ConfigDict) -> Sampling:
    """Return how rollouts are sampled; each prompt gets its own seed later."""
    return read_options(Sampling, config.sampling)


def patience(config: ConfigDict) -> Patience:
    """Return how many failed attempts training and evaluations bear."""
    r = config.rollout
    return Patience(r.max_attempts, r.max_failure_rate, outage=r.outage_seconds)


def evaluation_sampling(config: ConfigDict) -> Sampling:
    """Return greedy sampling with training's stops and, unless set otherwise, its budget."""
    budget = config.eval.max_new_tokens or config.sampling.max_new_tokens
    return Sampling(
        temperature=0.0, max_new_tokens=budget, stop=tuple(config.sampling.stop), seed=config.seed
    )


def context_of(config: ConfigDict) -> int:
    """Return how many tokens a run's servers take, of prompt and answer together."""
    budget = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
    return config.fleet.max_model_len or config.data.max_prompt_tokens + budget


def server_options(config: ConfigDict) -> dict[str, Any]:
    """Return the options of `LocalServers` for a run; most are flags of rlx.serve."""
    fleet = config.fleet
    return {
        **asdict(read_options(EngineOptions, fleet)),
        "engine": fleet.engine,
        "max_model_len": context_of(config),
        "dtype": config.model.publish_dtype,
        "seed": config.seed,
        "publish_dir": fleet.publish_dir,
        "answer_timeout": fleet.kill_seconds,
        "max_restarts": fleet.max_restarts,
    }


def as_json(config: ConfigDict) -> dict:
    """Return the config as plain JSON values, as config.json and checkpoints hold it."""
    return json.loads(config.to_json_best_effort())


def joining_of(config: ConfigDict) -> Joining | None:
    """Return where servers that join are found; a directory is made. None: none join."""
    if not config.fleet.join:
        return None
    make_directory(Path(config.fleet.join), "--config.fleet.join")
    return Joining(config.fleet.join, client_tls(**config.fleet.tls))


def sizes_of(config: ConfigDict, model: ModelConfig) -> RunSizes:
    """Return what decides how much memory a run of `model` needs.

    Raises:
      UserError: an unknown algorithm, or one that does not fit the config.
    """
    fleet = config.fleet
    return read_options(
        RunSizes,
        config.data,
        config.sampling,
        config.rollout,
        fleet,
        config.checkpoint,
        model=model,
        train=TrainOptions.of(config),
        has_fleet=has_servers(config),
        num_servers=0 if fleet.addresses else fleet.num_servers,
        max_model_len=context_of(config),
        publish_dtype=config.model.publish_dtype,
    )
