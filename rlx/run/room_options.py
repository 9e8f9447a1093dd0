"""Make the parts and options of other rooms from the run's config.

Rooms take values and dataclasses of their own; only this room, the commands and `cli/` know the
names of the config's keys.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.agents import named_workflow
from rlx.agents.agent_options import AgentOptions
from rlx.base import UserError
from rlx.doctor.memory import RunSizes
from rlx.engines.engine import EngineOptions
from rlx.fleet.addresses import Joining
from rlx.fleet.requests import Sampling, Timeouts
from rlx.fleet.tls import client_tls
from rlx.launch import ray_workers
from rlx.launch.teacher import ScorerOptions
from rlx.model.model_config import ModelConfig
from rlx.option import read_options
from rlx.rewards import rewards
from rlx.rewards.judge import Judge, JudgeOptions
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import concurrency
from rlx.rollout.attempts import Patience
from rlx.rollout.staleness import Limits
from rlx.system.workdir_lock import make_directory
from rlx.train.train_options import AUTO, TrainOptions
from rlx.workers.worker_process import WorkerLimits


@dataclass(frozen=True, eq=False)
class RunOptions:
    """Options of the rooms that need no file and no algorithm, read once from a run's config."""

    served: bool  # whether the run has a fleet; training on a dataset needs none
    online: bool  # whether applications outside ask, in place of rows
    context: int  # tokens that a server takes, of prompt and answer together
    longest: int  # tokens of the longest trajectory
    sampling: Sampling  # of rollouts; each prompt gets its own seed later
    evaluation: Sampling  # greedy, with training's stops and, unless set otherwise, its budget
    patience: Patience
    limits: Timeouts
    servers: Mapping[str, Any]  # options of `LocalServers`; most are flags of rlx.serve
    teacher: ScorerOptions
    reward_model: ScorerOptions

    @property
    def scorers(self) -> list[ScorerOptions]:
        """Return the models that score rollouts: those of teacher and reward model that exist."""
        return [each for each in (self.teacher, self.reward_model) if each]

    @classmethod
    def of(cls, config: ConfigDict) -> "RunOptions":
        fleet, rollout = config.fleet, config.rollout
        sampling, prompt = read_options(Sampling, config.sampling), config.data.max_prompt_tokens
        budget, own_budget = sampling.max_new_tokens, config.eval.max_new_tokens
        context = fleet.max_model_len or prompt + max(budget, own_budget)
        return cls(
            served=bool(fleet.addresses or fleet.join) or fleet.num_servers > 0,
            online=rollout.workflow == named_workflow.ONLINE,
            context=context,
            longest=prompt + budget,
            sampling=replace(sampling, return_masks=bool(sampling.truncation)),
            evaluation=Sampling(0.0, max_new_tokens=own_budget or budget, stop=sampling.stop,
                                guide=sampling.guide, seed=config.seed),
            patience=Patience(rollout.max_attempts, rollout.max_failure_rate,
                              outage=rollout.outage_seconds),
            # gRPC takes no infinite deadline.
            limits=read_options(Timeouts, fleet, request=min(rollout.request_timeout_seconds, 1e9)),
            servers=asdict(read_options(EngineOptions, fleet, max_model_len=context, sleep="off"))
            | {
                "engine": fleet.engine, "seed": config.seed, "publish_dir": fleet.publish_dir,
                "dtype": served_dtype(config, "float32"),
                "ready_timeout": fleet.ready_seconds, "answer_timeout": fleet.kill_seconds,
                "max_restarts": fleet.max_restarts, "traces": config.observe.traces,
            },
            teacher=ScorerOptions.of_teacher(config),
            reward_model=ScorerOptions.of_reward_model(config),
        )  # fmt: skip


def served_dtype(config: ConfigDict, likely: str) -> str:
    """Return the dtype of servers: what the config publishes, else computes in, else `likely`."""
    model = config.model
    return model.publish_dtype.replace(AUTO, model.compute_dtype).replace(AUTO, likely)


def check_reward(config: ConfigDict) -> dict[str, float]:
    """Return name → weight of the run's rewards; none where its workflow has no use for them."""
    terms = rewards.weights_of(config.reward.name, config.reward.terms)
    weights = {k: v for k, v in terms.items() if k not in (rewards.MODEL, rewards.JUDGE)}
    if not named_workflow.uses_rewards(workflow := config.rollout.workflow, "rollout.workflow"):
        if config.reward.terms and weights:
            why = f"rollout.workflow={workflow} gives rewards by itself"
            what = f"reward.terms has {', '.join(weights)}, and {why}"
            raise UserError(f"{what}; leave out all but model and judge")
        return {}
    for name in weights:
        rewards.resolve(name)
    return weights


def pool_of(config: ConfigDict, rewards: Mapping[str, float] | str, workers: int) -> RewardPool:
    """Return what grades by `rewards`, here or on a Ray cluster."""
    limits = WorkerLimits.of(config.reward, config.sandbox)
    start = ray_workers.starter("reward", config)
    return RewardPool(rewards, workers, config.reward.timeout_seconds, limits, start)


def judge_of(config: ConfigDict) -> tuple[Judge, float] | None:
    """Return the language models that grade, and the weight of their score; None without any."""
    options = read_options(JudgeOptions, config.reward.judge)
    weight = rewards.weights_of(config.reward.name, config.reward.terms).get(rewards.JUDGE)
    if (weight is None) == bool(options.models):
        what = "reward.judge.models and the reward 'judge' need each other"
        remedy = "name a model, and set reward.name=judge or add ('judge', 1.0) to reward.terms"
        raise UserError(f"{what}; {remedy}")
    return None if weight is None else (Judge(options), weight)


def agents_of(config: ConfigDict) -> AgentOptions:
    """Return how agents run, here or on a Ray cluster."""
    return replace(AgentOptions.of(config), start=ray_workers.starter("agents", config))


def as_json(config: ConfigDict) -> dict:
    """Return the config as plain JSON values, as config.json and checkpoints hold it."""
    return json.loads(config.to_json_best_effort())


def joining_of(config: ConfigDict) -> Joining | None:
    """Return where servers that join are found; a directory is made. None: none join."""
    if not config.fleet.join:
        return None
    make_directory(Path(config.fleet.join), "--config.fleet.join")
    return Joining(config.fleet.join, client_tls(**config.fleet.tls))


def limits_of(config: ConfigDict, total_steps: int | None = None) -> Limits:
    """Return what governs admission; `concurrency.follow` changes it where the config has auto."""
    r = config.rollout
    limits = Limits(r.batch_prompts, r.max_staleness, r.max_concurrent_rollouts, total_steps)
    auto = limits.concurrency == 0
    return concurrency.tunable_limits(limits, config.sampling.n_samples) if auto else limits


def sizes_of(config: ConfigDict, model: ModelConfig) -> RunSizes:
    """Return what decides how much memory a run of `model` needs; raises as `TrainOptions.of`."""
    fleet, options, train = config.fleet, RunOptions.of(config), TrainOptions.of(config)
    return read_options(
        RunSizes, config.data, config.sampling, config.rollout, fleet, config.checkpoint,
        model=model, train=train, has_fleet=options.served, max_model_len=options.context,
        num_servers=0 if fleet.addresses else fleet.num_servers,
        publish_dtype=train.publish_dtype,
    )  # fmt: skip
