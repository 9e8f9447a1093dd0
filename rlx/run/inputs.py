"""Read and check everything a run needs, before anything is written or started."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.agents import loading
from rlx.agents.named_workflow import NamedWorkflow
from rlx.agents.online import ADMIN_VARIABLE, OnlineOptions
from rlx.agents.online_workflow import OnlineWorkflow
from rlx.algorithms.algorithm import Algorithm
from rlx.base import Group, UserError
from rlx.cli import user_code
from rlx.launch import teacher
from rlx.launch.teacher import ScorerOptions
from rlx.model import directory
from rlx.model.model_config import ModelConfig
from rlx.rewards import rewards
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.rollout.data import Source
from rlx.rollout.datasets import AnswerWorkflow, Demonstrations, Preferences, end_token
from rlx.rollout.teacher_scores import ModelRewarded
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import Prompts, Workflow, encode
from rlx.run import model_checks
from rlx.run.dataset_rows import fitting, rows
from rlx.run.room_options import (
    agents_of,
    check_reward,
    context_of,
    has_servers,
    is_online,
    pool_of,
    training_sampling,
)
from rlx.run.tokenizer_files import load_tokenizer
from rlx.sandbox.sandbox import SandboxOptions
from rlx.train import dry_call
from rlx.train.train_options import TrainOptions

INITIAL = "initial"  # directory of a run's first weights if they are random
_ANSWER = "The answer is 42."  # rewards are tried with it


@dataclass(frozen=True)
class Inputs:
    """Model, algorithm, dataset rows and workflow of a run; reward workers are not started yet.

    Attributes:
      sources: of `train_rows`, one after the other.
      notes: in words, how many rows were too long, and which answers are inexact; may be empty.
      prompts: of the rows, whichever workflow answers them.
      held_out: the groups of `eval_rows` where rows are trained on as they are; empty for a run on
        rollouts, whose held-out rows have to be answered.
      model_rewarded: makes a workflow one that a reward model rewards too, given the fleet that
        scores; None without such a model.
    """

    model_dir: Path
    model_config: ModelConfig
    algorithm: Algorithm
    sources: list[Source]
    train_rows: list[dict]
    eval_rows: list[dict]
    notes: str
    reward_pool: RewardPool
    prompts: Prompts
    workflow: Workflow
    held_out: list[Group]
    model_rewarded: Callable[..., Workflow] | None = None


def prepare(config: ConfigDict) -> Inputs:
    """Read and check model, tokenizer and data.

    Raises:
      UserError: naming the file, line, row or tensor that cannot work.
    """
    weights = check_reward(config)
    model_dir = directory.resolve(config.model.path)
    read = directory.load_config if config.model.random_init else directory.check
    model_config = read(model_dir).within(context_of(config))
    if config.trainer == "jax":
        model_config.require_ours("trainer=jax")
    model_checks.check_engine(config, model_config)
    model_checks.check_context(config, model_config)
    model_checks.check_mesh(config, model_config)
    model_checks.check_experts(config, model_config)
    options = TrainOptions.of(config)
    algorithm = options.algorithm
    dry_call.check(algorithm, config.trainer)
    model_checks.check_kind(config, model_config, algorithm)
    teacher.check(ScorerOptions.of_teacher(config), algorithm, model_dir, directory.check)
    given = rows(config, algorithm)
    pool = pool_of(config, weights, config.reward.workers)
    prompts = Prompts(
        load_tokenizer(model_dir, config.data.system_prompt, config.data.chat_template),
        system_prompt=config.data.system_prompt,
        question_key=config.data.question_key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_model_len=model_config.max_position,
        vocab_size=model_config.vocab_size,
    )
    kwargs = loading.parse_kwargs(config.rollout.workflow_kwargs, "rollout.workflow_kwargs")
    sampling, n = training_sampling(config), config.sampling.n_samples
    sandbox = SandboxOptions(**config.sandbox)
    named = NamedWorkflow(config.rollout.workflow, kwargs, prompts, sampling, n, sandbox)
    answering = named.build(pool, agents_of(config))
    workflow = _workflow(config, options, model_config, prompts, answering)
    answers = workflow if isinstance(workflow, AnswerWorkflow) else None
    check = workflow.check if isinstance(workflow, AnswerWorkflow | ToolUse) else prompts.check
    kept, notes = [], []
    for name, found, weight in given:
        kept.append(Source(name, fitting(found, name, check, config.data.overlong), weight))
        if lost := len(found) - len(kept[-1].rows):
            notes.append(f"{lost} of {len(found)} rows of {name} are too long and left out "
                         "(data.overlong=skip)")  # fmt: skip
    *sources, (_, eval_rows, _) = kept
    train_rows = [row for source in sources for row in source.rows]
    notes += filter(None, [rewards.float_answers(weights, train_rows)])
    held_out = [answers.group(row, i) for i, row in enumerate(eval_rows)] if answers else []
    own = algorithm.data == "rollouts" and not is_online(config)
    rewarded = train_rows if own else eval_rows
    if rewarded and has_servers(config):
        _try_rewards(config, prompts, rewarded[0])
        named.try_out(rewarded[0])
    return Inputs(
        model_dir, model_config, algorithm, sources, train_rows, eval_rows, "; ".join(notes),
        pool, prompts, workflow, held_out, _model_rewarded(config, prompts),
    )  # fmt: skip


def _model_rewarded(config: ConfigDict, prompts: Prompts) -> Callable[..., Workflow] | None:
    """Return what adds a reward model's values to a workflow, given its fleet; None without one.

    Raises:
      UserError: it is named without being given, or the reverse; is none, or too short.
    """
    options = ScorerOptions.of_reward_model(config)
    weight = rewards.weights_of(config.reward.name, config.reward.terms).get(rewards.MODEL)
    if (weight is None) == bool(options):
        raise UserError(
            "reward.model.path (or addresses) and the reward 'model' go together; set the path, and"
            " give reward.terms a pair ('model', 1.0)"
        )
    make = partial(ModelRewarded, weight=weight or 0.0)
    if not options.path:
        return make if options else None
    place = directory.resolve(options.path, "reward.model.path")
    model, longest = directory.check(place), options.longest // 2
    if not model.value_head or longest > model.max_position:
        kind = "reward" if model.value_head else "language"
        raise UserError(
            f"reward.model.path={options.path} is a {kind} model of {model.max_position} tokens, "
            f"wanted a reward model of {longest}; train one by preset reward_model"
        )
    own, given = load_tokenizer(place, config.data.system_prompt), prompts.tokenizer
    if (own.get_vocab(), own.chat_template) == (given.get_vocab(), given.chat_template):
        return make
    system, question = config.data.system_prompt, config.data.question_key
    read = Prompts(own, system_prompt=system, question_key=question)
    return partial(make, prompts=read, end=end_token(own, model.eos_token_ids))


def _try_rewards(config: ConfigDict, prompts: Prompts, row: Mapping[str, Any]) -> None:
    """Raise UserError where a reward of the user's own fails on a short completion of `row`."""
    own = {name: 1.0 for name in check_reward(config) if user_code.is_own(name)}
    ids = encode(prompts.tokenizer, _ANSWER)
    call = RewardCall(prompts.text(row), _ANSWER, prompts.ids(row), ids, row)
    with closing(pool_of(config, own, 1)) as pool:
        try:
            pool.compute([call] * min(2, config.sampling.n_samples))
        except RewardError as error:
            raise UserError(f"{error}; mend it: this was a dry call on the first row") from error


def _workflow(
    config: ConfigDict,
    options: TrainOptions,
    model_config: ModelConfig,
    prompts: Prompts,
    answering: Workflow,
) -> Workflow:
    """Return the workflow that makes the algorithm's kind of group of a row."""
    algorithm = options.algorithm
    if algorithm.data == "rollouts":
        return _online(config, prompts, answering) if is_online(config) else answering
    limits = {
        "end": end_token(prompts.tokenizer, model_config.eos_token_ids),
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_tokens": options.row_budget,
    }
    keys = config.data
    if algorithm.data == "pairs":
        return Preferences(prompts, answering, keys.chosen_key, keys.rejected_key, **limits)
    return Demonstrations(prompts, answering, keys.completion_key, **limits)


def _online(config: ConfigDict, prompts: Prompts, judge: Workflow) -> Workflow:
    """Return the workflow that waits for applications; raise UserError where none may come."""
    options = OnlineOptions.named(config.online)
    if options is None:
        raise UserError(
            "rollout.workflow=online has no admin key; give a file by online.admin_key, or set "
            f"${ADMIN_VARIABLE}"
        )
    sampling, n, tokenizer = training_sampling(config), config.sampling.n_samples, prompts.tokenizer
    return OnlineWorkflow(options, agents_of(config), config.online, tokenizer, sampling, n, judge)
