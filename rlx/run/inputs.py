"""Read and check everything a run needs, before anything is written or started."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx import config as configs
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
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.rewards import rewards
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.rollout.data import Source
from rlx.rollout.datasets import AnswerWorkflow, end_token
from rlx.rollout.teacher_scores import ModelRewarded
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import Prompts, Workflow, encode, render
from rlx.run import dataset_rows, model_checks
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

INITIAL = "initial"  # directory of random first weights
_ANSWER = "The answer is 42."  # completion of the rewards' dry call
# (area, name of a row in the doctor's table) → context of a check, which takes the row's text.
Row = Callable[[str, str], AbstractContextManager[Callable[..., Any]]]


class Missing(AttributeError):
    """An attribute of Inputs is unset because an earlier check failed."""


class Inputs:
    """Model, algorithm, dataset rows and workflow of a run, before reward workers start.

    Attributes:
      weights: name → weight of the rewards.
      prompts: renders rows into prompts.
      named: factory of the workflow in `rollout.workflow`.
      read: sources of all rows, including overlong ones; the last source is held out.
      sources: sources of `train_rows`, in order.
      notes: message about overlong rows and inexact answers; may be empty.
      held_out: groups of `eval_rows` for dataset training; empty for training on rollouts.
      model_rewarded: (workflow, fleet) → workflow with a reward model's values; None without one.
    """

    weights: dict[str, float]
    model_dir: Path
    model_config: ModelConfig
    algorithm: Algorithm
    prompts: Prompts
    reward_pool: RewardPool
    named: NamedWorkflow
    workflow: Workflow
    read: list[Source]
    sources: list[Source]
    train_rows: list[dict]
    eval_rows: list[dict]
    notes: str
    held_out: list[Group]
    model_rewarded: Callable[..., Workflow] | None

    def __getattr__(self, name: str) -> Any:
        raise Missing(name)


def prepare(config: ConfigDict, row: Row = lambda *_: nullcontext(lambda *_: None)) -> Inputs:
    """Read and check everything a run needs, in the order of the doctor's table.

    Args:
      row: context of each check; a run stops at the first error, the doctor records it.

    Raises:
      UserError: a file, line, row or tensor cannot work; the message names it.
    """
    inputs = Inputs()
    with row("config", "values"):
        configs.check(config)
    with row("config", "reward"):
        inputs.weights = check_reward(config)
    with row("config", "algorithm"):
        inputs.algorithm = TrainOptions.of(config).algorithm
    _read_model(config, inputs, row)
    _check_model(config, inputs, row)
    _read_rows(config, inputs, row)
    return inputs


def _read_model(config: ConfigDict, inputs: Inputs, row: Row) -> None:
    with row("model", "directory") as say:
        inputs.model_dir = directory.resolve(config.model.path)
        say(str(inputs.model_dir))
    with row("model", "config.json") as say:
        model = directory.load_config(inputs.model_dir).within(context_of(config))
        inputs.model_config, count = model, parameters.count(model)
        say(f"{model.architecture}, {count / 1e6:.1f}M parameters, {model.num_layers} layers, "
            f"context {model.max_position}")  # fmt: skip
    if not config.model.random_init:
        with row("model", "tensors") as say:
            fit = "are transformers'" if directory.check(inputs.model_dir).foreign else "fit"
            count = len(list(inputs.model_dir.glob("*.safetensors")))
            say(f"names and shapes {fit}, by the headers of {count} file{'s' * (count > 1)}")
    with row("model", "teacher") as say:
        options = ScorerOptions.of_teacher(config)
        teacher.check(options, inputs.algorithm, inputs.model_dir, directory.check)
        known = "its vocabulary is the student's"
        say(known if options.path else ", ".join(options.addresses))
    system_prompt = config.data.system_prompt
    with row("model", "tokenizer") as say:
        tokenizer = load_tokenizer(inputs.model_dir, system_prompt, config.data.chat_template)
        inputs.prompts = Prompts(
            tokenizer,
            system_prompt=system_prompt,
            question_key=config.data.question_key,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_model_len=inputs.model_config.max_position,
            vocab_size=inputs.model_config.vocab_size,
        )
        most = inputs.model_config.vocab_size
        if len(tokenizer) > most:
            say(f"{len(tokenizer)} tokens, the model has {most}: rows with others are refused",
                "use the tokenizer files of these weights")  # fmt: skip
        else:
            say(f"{len(tokenizer)} tokens")
    with row("model", "chat template") as say:
        text = render(inputs.prompts.tokenizer, "?", system_prompt)
        around = len(encode(inputs.prompts.tokenizer, text)) - 1
        system = " and the system prompt" if system_prompt else ""
        say(f"{around} tokens around a question{system}; prompts end in {text[-24:]!r}")


def _check_model(config: ConfigDict, inputs: Inputs, row: Row) -> None:
    for name, check in model_checks.CHECKS.items():
        with row("config", name):
            check(config, inputs.model_config)
    with row("config", "algorithm"):
        model_checks.check_kind(config, inputs.model_config, inputs.algorithm)
    with row("config", "loss"):
        dry_call.check(inputs.algorithm, config.trainer)


def _read_rows(config: ConfigDict, inputs: Inputs, row: Row) -> None:
    with row("config", "workflow"):
        inputs.reward_pool = pool_of(config, inputs.weights, config.reward.workers)
        kwargs = loading.parse_kwargs(config.rollout.workflow_kwargs, "rollout.workflow_kwargs")
        sampling, n = training_sampling(config), config.sampling.n_samples
        sandbox = SandboxOptions(**config.sandbox)
        name = config.rollout.workflow
        inputs.named = NamedWorkflow(name, kwargs, inputs.prompts, sampling, n, sandbox)
        answering = inputs.named.build(inputs.reward_pool, agents_of(config))
        inputs.workflow = _workflow(config, inputs, answering)
    with row("config", "reward model"):
        inputs.model_rewarded = _model_rewarded(config, inputs.prompts)
    with row("data", "rows") as say:
        *train, held_out = inputs.read = dataset_rows.rows(config, inputs.algorithm)
        counts = [f"{len(s.rows)} of {s.name}" for s in train]
        if len(counts) > 1:
            counts = [f"{c} (weight {s.weight:g})" for c, s in zip(counts, train, strict=True)]
        say(f"{', '.join(counts)} to train on, {len(held_out.rows)} held out")
    with row("data", "prompts") as say:
        workflow = inputs.workflow
        answers = workflow if isinstance(workflow, AnswerWorkflow) else None
        own = workflow if isinstance(workflow, AnswerWorkflow | ToolUse) else inputs.prompts
        kept, notes = [], []
        for name, found, weight in inputs.read:
            rows = dataset_rows.fitting(found, name, own.check, config.data.overlong)
            kept.append(Source(name, rows, weight))
            if lost := len(found) - len(rows):
                notes.append(f"{lost} of {len(found)} rows of {name} are too long and skipped "
                             "(data.overlong=skip)")  # fmt: skip
        *inputs.sources, (_, inputs.eval_rows, _) = kept
        inputs.train_rows = [row for source in inputs.sources for row in source.rows]
        notes += filter(None, [rewards.float_answers(inputs.weights, inputs.train_rows)])
        rows = inputs.eval_rows
        inputs.held_out = [answers.group(row, i) for i, row in enumerate(rows)] if answers else []
        inputs.notes = "; ".join(notes)
        say(inputs.notes or "none is too long")
    with row("data", "first row"):
        answered = inputs.algorithm.data == "rollouts" and not is_online(config)
        first = (inputs.train_rows if answered else inputs.eval_rows)[:1]
        if first and has_servers(config):
            _try_rewards(config, inputs, first[0])
            inputs.named.try_out(first[0])


def _model_rewarded(config: ConfigDict, prompts: Prompts) -> Callable[..., Workflow] | None:
    """Return (workflow, fleet) → workflow with a reward model's values; None without a model.

    Raises:
      UserError: only one of model and reward term is given, or the model does not fit.
    """
    options = ScorerOptions.of_reward_model(config)
    weight = rewards.weights_of(config.reward.name, config.reward.terms).get(rewards.MODEL)
    if (weight is None) == bool(options):
        raise UserError(
            "reward.model.path (or addresses) and the reward 'model' need each other; set the path "
            "and add ('model', 1.0) to reward.terms"
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
            f"wanted a reward model of {longest}; train one with preset reward_model"
        )
    own, given = load_tokenizer(place, config.data.system_prompt), prompts.tokenizer
    if (own.get_vocab(), own.chat_template) == (given.get_vocab(), given.chat_template):
        return make
    system, question = config.data.system_prompt, config.data.question_key
    read = Prompts(own, system_prompt=system, question_key=question)
    return partial(make, prompts=read, end=end_token(own, model.eos_token_ids))


def _try_rewards(config: ConfigDict, inputs: Inputs, row: Mapping[str, Any]) -> None:
    """Raise UserError if a user's reward fails on a short completion of `row`."""
    own, prompts = {name: 1.0 for name in inputs.weights if user_code.is_own(name)}, inputs.prompts
    ids = encode(prompts.tokenizer, _ANSWER)
    call = RewardCall(prompts.text(row), _ANSWER, prompts.ids(row), ids, row)
    with closing(pool_of(config, own, 1)) as pool:
        try:
            pool.compute([call] * min(2, config.sampling.n_samples))
        except RewardError as error:
            raise UserError(f"{error}; correct it: this was a dry call on the first row") from error


def _workflow(config: ConfigDict, inputs: Inputs, answering: Workflow) -> Workflow:
    """Return the workflow that makes groups of the algorithm's kind."""
    prompts, keys = inputs.prompts, config.data
    if inputs.algorithm.data == "rollouts":
        return _online(config, prompts, answering) if is_online(config) else answering
    limits = {
        "end": end_token(prompts.tokenizer, inputs.model_config.eos_token_ids),
        "max_new_tokens": config.sampling.max_new_tokens,
        "max_tokens": TrainOptions.of(config).row_budget,
    }
    pairs = inputs.algorithm.data == "pairs"
    names = (keys.chosen_key, keys.rejected_key) if pairs else (keys.completion_key,)
    return AnswerWorkflow(prompts, answering, names, **limits)


def _online(config: ConfigDict, prompts: Prompts, evaluator: Workflow) -> Workflow:
    """Return the workflow that waits for applications; raise UserError without an admin key."""
    options = OnlineOptions.from_flags(config.online)
    if options is None:
        raise UserError(
            "rollout.workflow=online has no admin key; name a file in online.admin_key, or set "
            f"${ADMIN_VARIABLE}"
        )
    sampling, n, tokenizer = training_sampling(config), config.sampling.n_samples, prompts.tokenizer
    agents = agents_of(config)
    return OnlineWorkflow(options, agents, config.online, tokenizer, sampling, n, evaluator)
