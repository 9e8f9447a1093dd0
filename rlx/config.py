"""Assemble every key of a run's config, and check the values. No I/O.

`SECTIONS` declares each key with its default, its help and its values, or takes the options that
a room's dataclass declares. A file in `configs/` starts from `default()` and changes what differs.
`check` explains what cannot work before anything starts. Keys of `config.algorithm` are the
fields of `Algorithm`. `rlx keys` and the reference in the docs are made of these declarations.
"""

from dataclasses import Field
from typing import Any

from ml_collections import ConfigDict, config_dict

from rlx.agents.agent_options import AgentOptions
from rlx.algorithms.algorithm import FIELDS, Algorithm
from rlx.base import UserError, leaves, refuse
from rlx.engines.engine import EngineOptions
from rlx.fleet.requests import Sampling, Timeouts
from rlx.model.lora_config import LoraConfig, lora_targets
from rlx.option import check_value, option, options_of
from rlx.rewards.judge import JudgeOptions
from rlx.rollout.data import PLAYERS
from rlx.sandbox.sandbox import SandboxOptions
from rlx.train.train_options import AUTO, OptimizerOptions, TrainOptions
from rlx.workers.worker_process import WorkerLimits

ENGINES = ("jax", "vllm")
_DTYPES = ("float32", "bfloat16")
_PAIRS = ("data.mix", "reward.terms")


def _section(doc: str, *rooms: type, **fields: Field) -> tuple[str, dict[str, Field]]:
    """Return a section's help and its options: its own, then those of dataclasses of rooms."""
    return doc, fields | {n: field for room in rooms for n, field in options_of(room).items()}


_RESOURCES = option("", 'Ray resources of each process, e.g. "CPU:1"; "": run here')
_EVERY = {
    "every_epochs": option(0, "passes over the data between two; 0: not by epochs", "0"),
    "every_steps": option(0, "train batches between two; 0: not by steps", "0"),
    "every_seconds": option(0.0, "seconds between two; 0: not by the clock", "0"),
}

# fmt: off
SECTIONS = {
    "": _section(
        "",
        seed=option(0, "random seed for data order, sampling and initial weights",
                    "[0, 4294967295]"),
        total_steps=option(100, "train batches; each ends with one publish", "1"),
        trainer=option("jax", "library that computes the updates", ("jax", "torch")),
        allocation_mode=option("", 'e.g. "vllm:d4+jax:f4": sets servers, trainer, mesh and GPUs; '
                               "auto: the best of rlx.plan for the GPUs here"),
    ),
    "model": _section(
        "The language model: where it is and how it computes.",
        path=option("", "HF directory or hub name; a run needs one"),
        random_init=option(False, "take config and tokenizer from `path`, and random weights"),
        dtype=option("float32", "type of parameters; bfloat16 only for the base of LoRA", _DTYPES),
        compute_dtype=option(AUTO, "type of activations; auto: bfloat16 where products are 1.5 "
                             "times as fast, decided once for a run", (AUTO, *_DTYPES)),
        publish_dtype=option(AUTO, "type of weights for servers and exports; auto: compute_dtype",
                             (AUTO, *_DTYPES)),
        remat=option("none", "recomputed in the backward pass. dots: all except products; "
                     "attention: all except qkv and attention; up: and except the MLP's up; full: "
                     "everything; auto: that which recomputes least of those that fit the GPU, "
                     "decided once for a run; none on a CPU",
                     (AUTO, "none", "dots", "up", "attention", "full")),
        logprob_chunk=option(0, "tokens whose logits exist at one time; 0: 1024, or the model's "
                             "width if it is more, with trainer=jax on a GPU", "0"),
    ),
    "data": _section(
        "The rows: questions with answers, demonstrations or pairs.",
        kind=option("jsonl", "jsonl: rows of files in any format; generated: arithmetic, shapes "
                    "(pictures)", ("jsonl", "arithmetic", "shapes")),
        train=option("", ".jsonl, .json, .csv or .parquet file, or hub name with optional :split"),
        mix=option((), "((source, weight), …) in place of train; weights are shares of prompts"),
        dataset=option("", "FILE.py:name, a function that returns rows, or reasoning_gym:TASK, "
                       "verifiers:ENV; replaces train and mix"),
        eval=option("", 'held-out rows, given like train; "": none, or generated rows'),
        system_prompt=option("", 'before each question; "": none'),
        question_key=option("question", "column with text, or with a list of chat messages"),
        image_key=option("images", "column of images, bytes or paths, which the question's <image> "
                         'stand for; "": none'),
        image_hosts=option((), "hosts from which rows' images are fetched; (): none"),
        answer_key=option("answer", "column that rewards receive as `answer`"),
        completion_key=option("completion", "column with demonstrations (SFT)"),
        chosen_key=option("chosen", "column with the better answer (reward model, DPO, IPO)"),
        rejected_key=option("rejected", "column with the worse answer"),
        chat_template=option("", '"": of the model; a Jinja file; none: raw prompts'),
        max_prompt_tokens=option(1024, "longest prompt, chat template included", "1"),
        overlong=option("error", "rows over max_prompt_tokens or the context", ("error", "skip")),
        shuffle=option(True, "draw each epoch's order from seed"),
        easy_share=option(1.0, "share of its turns at which a row is drawn, after a group that was "
                          "all at the best reward", "(0, 1]"),
        hard_share=option(1.0, "the same after a group of equal, lower rewards", "(0, 1]"),
        allow_change=option(False, "resume from a checkpoint although the rows have changed"),
    ),
    "reward": _section(
        "The functions that grade answers, in worker processes.",
        WorkerLimits,
        name=option("gsm8k", "name in rlx.rewards.rewards, FILE.py:function or module:function"),
        terms=option((), "(name, weight) pairs, added up, each logged; empty: only reward.name"),
        timeout_seconds=option(5.0, "limit for one completion", "(0, inf]"),
        workers=option(1, "processes of rewards, and of agents", "[1, 65536]"),
        resources=_RESOURCES,
    ),
    "reward.model": _section(
        'A reward model that rlx trained: the reward named "model".',
        path=option("", 'HF directory, for JAX servers that the run starts; "": none'),
        addresses=option((), "host:port of running servers, which use the TLS files of fleet"),
        num_servers=option(1, "servers to start where there are no addresses", "1"),
    ),
    "reward.judge": _section(
        'Language models that grade answers: the reward named "judge".', JudgeOptions
    ),
    "agents": _section(
        "Their processes; reward.workers is the number.",
        AgentOptions,
        WorkerLimits,
        resources=_RESOURCES,
    ),
    "online": _section(
        "The gateway where applications have sessions, for rollout.workflow=online.",
        host=option("127.0.0.1", "listen address; any except loopback requires TLS. With "
                    "scheduler.type=slurm or ray: trainer 0's host, with TLS of the run"),
        port=option(8000, "listen port; 0: any", "[0, 65535]"),
        admin_key=option("", 'a file with the key that makes sessions; "": $RLX_ADMIN_KEY'),
        idle_seconds=option(3600.0, "without a request, after which a session ends"),
        tls_cert=option("", "PEM file with the gateway's certificate"),
        tls_key=option("", "PEM file with its key"),
    ),
    "sampling": _section(
        "How answers are drawn.",
        Sampling,
        n_samples=option(8, "trajectories in a group", "[1, 65536]"),
    ),
    "rollout": _section(
        "How far and how wide generation runs ahead of training.",
        batch_prompts=option(8, "B: prompts in a train batch", "1"),
        max_staleness=option(2, "η: versions; 0: synchronous training", "0"),
        force_staleness=option(False, "let each batch lag by exactly max_staleness; experiments"),
        max_concurrent_rollouts=option(64, "prompts being answered at one time; auto, or 0 in a "
                                       "file: follows the trainer's waiting and the servers' "
                                       "queue", "0"),
        max_attempts=option(3, "attempts at a prompt; then it is listed in skipped.jsonl", "1"),
        max_failure_rate=option(0.5, "share of failures that begins an outage; 1: off", "[0, 1]"),
        outage_seconds=option(120.0, "length of an outage that ends the run", "[0, inf)"),
        request_timeout_seconds=option(600.0, "limit for one attempt at a prompt", "(0, inf]"),
        workflow=option("rlvr", "one graded turn; or tools, multi_turn, online (applications ask); "
                        "or FILE.py:Class, module:Class: your own workflow or agent; or "
                        "reasoning_gym:TASK, openenv:URL, textarena:GAME, verifiers:ENV, which "
                        "bring rows and rewards"),
        workflow_kwargs=option(None, "dict of arguments for its constructor"),
    ),
    "algorithm": _section(
        "Advantage, loss and the steps around them; unset keys have the preset's values.",
        Algorithm,
        preset=option("grpo", "a row of docs/algorithms.md"),
    ),
    "optimizer": _section("Of the policy.", OptimizerOptions),
    "lora": _section("Adapters to train in place of the model.", LoraConfig),
    "critic": _section(
        "The network of algorithm.critic, which starts as a copy of the model.",
        learning_rate=option(1e-5, "its own; everything else is set in optimizer", "[0, inf)"),
        warmup_steps=option(0, "train batches in which only the critic learns", "0"),
    ),
    "reference": _section(
        "The policy that anchors KL terms and DPO.",
        mode=option("frozen", "copy: every `every_steps`; ema: `decay`", ("frozen", "copy", "ema")),
        every_steps=option(0, "train batches between two copies of the policy"),
        decay=option(0.99, "share that an EMA keeps at each train batch", "[0, 1)"),
    ),
    "train": _section(
        "How a batch becomes updates, and on which devices.",
        TrainOptions,
        max_tokens_per_microbatch=option(4096, "on each device; with context:4 in the mesh a row "
                                         "of 16384 fits, cut in four; 0: as many as fit the GPU, "
                                         "decided once for a run", "0"),
    ),
    "cluster": _section(
        "A trainer of several processes, one on each host, all with the same command. Empty: as "
        "Slurm, Ray or torchrun started this one, or one process.",
        coordinator=option("", "host:port of process 0, which has servers, rollouts and records"),
        processes=option(0, "number of processes; 1 ignores variables of Slurm, Ray and torchrun"),
        process=option(-1, "number of this one, from 0"),
        timeout_seconds=option(60.0, "without sign of life or progress; then all end", "(0, inf)"),
        join_seconds=option(300.0, "limit for all processes to connect at the start", "(0, inf)"),
        call_seconds=option(1800.0, "limit for a call that process 0 takes part in", "(0, inf)"),
    ),
    "scheduler": _section(
        "Which hosts the run's processes are on, and who starts them there.",
        type=option("local", "local: this machine", ("local", "slurm", "ray")),
        nodes=option(1, "hosts, taken whole", "1"),
        gpus_per_node=option(0, "GPUs of each host; 0: everything computes on CPUs", "0"),
        retries=option(-1, "restarts of a run that lost a process or host, or has made steps; "
                       "-1: 3 with slurm and ray, none with local", "-1"),
        partition=option("", 'Slurm partition, like account … exclude; "": its default'),
        account=option("", "Slurm's account"),
        qos=option("", "Slurm's quality of service"),
        time=option("", 'e.g. "12:00:00"'),
        nodelist=option("", "hosts to take, in Slurm's spelling"),
        exclude=option("", "hosts not to take"),
        options=option((), 'further ones of sbatch, e.g. ("--mem=0", "--reservation=rl")'),
        container=option("none", "around each process", ("none", "apptainer", "pyxis")),
        image=option("", "image of the container"),
        mounts=option((), "FROM:TO, in addition to the workdir"),
        pre_commands=option((), "lines of bash before each process, in its container"),
        template=option("", "a file in place of rlx/launch/slurm_job.sh"),
        wait_seconds=option(60.0, "with Ray, wait for resources in use or new nodes", "(0, inf)"),
        grace_seconds=option(120, "from SIGTERM or SIGUSR1 to save until the kill, which Slurm and "
                             "Kubernetes get too; a run whose step takes longer ends before it "
                             "with its last checkpoint", "1"),
    ),
    "fleet": _section(
        "The servers that generate.",
        EngineOptions,
        Timeouts,
        engine=option("jax", "engine of each server", ENGINES),
        num_servers=option(1, "servers to start; 0: none, for training on a dataset", "0"),
        addresses=option((), "host:port of running servers, or @FILE with one on each line, which "
                         "may join and leave during the run; empty: start local ones"),
        join=option("", "directory of rlx.serve --join=DIR: servers that join and leave, in "
                    "addition to addresses or local ones"),
        publish=option("path", "how weights travel; delta: changes; adapter: only LoRA's; nccl: to "
                       "all servers of vLLM at once",
                       ("path", "stream", "delta", "adapter", "nccl")),
        publish_dir=option("/dev/shm", "place of weights in transit; the workdir if it is full"),
        threads=option(0, "CPU threads of a server; 0: cores divided by processes, or shared by "
                       "all where each of JAX would have one", "0"),
        ready_seconds=option(0.0, "limit to the start of local servers; 0: 180, and 20 for each GB "
                             "of weights", "0"),
        kill_seconds=option(60.0, "silence after which a local server is restarted", "(0, inf)"),
        max_restarts=option(5, "restarts of a local server in a row", "0"),
    ),
    "fleet.tls": _section(
        "PEM files, for fleet.addresses beyond this machine.",
        ca=option("", "signer of the servers' certificates; empty: no TLS"),
        cert=option("", "certificate for servers that ask for one"),
        key=option("", "key of that certificate"),
    ),
    "teacher": _section(
        "A fleet that only scores, for distillation (algorithm.kl_anchor).",
        path=option("", 'HF directory or hub name, for servers that the run starts; "": none'),
        addresses=option((), "host:port of running servers, which use the TLS files of fleet"),
        num_servers=option(1, "servers to start where there are no addresses", "1"),
        engine=option("", '"": the same as fleet.engine', ("", *ENGINES)),
    ),
    "gate": _section(
        "The trainer scores tokens of every server and compares logprobs.",
        enabled=option(True, "compare them"),
        every_steps=option(50, "publishes between two checks; 0: only before the first step", "0"),
        prompts=option(4, "asked of each server at a check", "1"),
        max_new_tokens=option(32, "length of each answer to compare", "1"),
        max_delta=option(0.0, "nats, of one token; 0: by model.publish_dtype and compute_dtype",
                         "0"),
        mean_delta=option(0.0, "nats, on average; 0: likewise", "0"),
    ),
    "checkpoint": _section(
        "The states that a run resumes from.",
        first_step=option(2, "step of the first one; 0: off", "0"),
        **_EVERY | {"every_seconds": option(600.0, "0: not by the clock", "0")},
        keep=option(2, "number to keep; older ones are deleted", "1"),
        copy_to=option("", "s3:// or gs:// place for copies, of exports too, in a directory named "
                       "as WORKDIR; an empty WORKDIR begins with the newest"),
        recover_mode=option("auto", "auto: resume from WORKDIR's checkpoint", ("auto", "off")),
    ),
    "journal": _section(
        "WORKDIR/journal: the record of the run, to resume and to replay it.",
        keep=option(1_000_000_000, "bytes to keep, 3 to 22 a token, more with top_p; 0: none", "0"),
    ),
    "eval": _section(
        "Held-out questions for the policy, always before the first and after the last step.",
        **_EVERY,
        num_questions=option(200, "number of held-out rows, of each set; 0: no evaluations", "0"),
        sets=option((), "further held-out rows, (name, source) pairs, graded like the others"),
        samples=option(0, "answers drawn to each question as in training, besides the greedy "
                         "one", "0"),
        max_new_tokens=option(0, "longest answer; 0: sampling.max_new_tokens", "0"),
    ),
    "sandbox": _section("The confinement of programs that a model wrote.", SandboxOptions),
    "export": _section(
        "HF directories to keep: exports/epoch1epochstep0globalstep40.",
        **_EVERY,
        keep=option(0, "number to keep; older ones are deleted; 0: all", "0"),
    ),
    "observe": _section(
        "Records and displays of a run.",
        transcripts_per_step=option(4, "samples in rollouts/, by step", "0"),
        writers=option(("tensorboard",), "or wandb, trackio, mlflow, FILE.py:hook, module:hook"),
        metrics_port=option(0, "of the trainer's numbers for Prometheus; servers of the run have "
                            "the ports above it; 0: none", "[0, 65000]"),
        metrics_host=option("127.0.0.1", "its listen address; beyond loopback it takes all of "
                            "fleet.tls. With scheduler.type=slurm or ray: trainer 0's host"),
        traces=option("", "spans of each rollout for OpenTelemetry: http://HOST:4318 of a "
                      'collector, or a directory for lines of JSON; "": none'),
    ),
}
# fmt: on
OPTIONS: dict[str, Field] = {
    f"{section}.{name}".lstrip("."): field
    for section, (_, fields) in SECTIONS.items()
    for name, field in fields.items()
}


def default() -> ConfigDict:
    """Return every key of a run, with the value a newcomer wants."""
    c = ConfigDict()
    for section, (_, fields) in SECTIONS.items():
        part = c
        for name in section.split(".") if section else ():
            part[name] = part.get(name, ConfigDict())
            part = part[name]
        for name, field in fields.items():
            unset = name in FIELDS if section == "algorithm" else field.default is None
            part[name] = config_dict.placeholder(field.type or object) if unset else field.default
    return c.lock()


def with_environment(config: ConfigDict) -> ConfigDict:
    """Set the rows, reward and workflow that an environment in rollout.workflow stands for."""
    if (name := config.rollout.workflow).startswith("reasoning_gym:"):
        config.data.dataset, config.data.eval, config.rollout.workflow = name, "", "rlvr"
        config.reward.name = "reasoning_gym"
    for player in PLAYERS:
        if name.startswith(player.SCHEME):
            if not config.data.mix:
                config.data.dataset, config.data.eval = name, ""
            config.rollout.workflow = player.AGENT
    return config


def check_tuple(key: str, value: Any) -> None:
    """Raise UserError where the tuple of a key has an entry of another kind than the key takes.

    Keys whose default is no tuple pass.
    """
    if not isinstance(getattr(OPTIONS.get(key), "default", None), tuple):
        return
    kinds: dict[str, tuple[Any, str]] = {
        "train.row_buckets": (int, "whole numbers, as (192, 384)"),
        **dict.fromkeys(_PAIRS, (tuple | list, "pairs, as (('a', 1),) with a last comma")),
        "eval.sets": (tuple | list, "pairs, as (('a', 'a.jsonl'),) with a last comma"),
    }
    kind, form = kinds.get(key, (str, "texts, as ('a', 'b')"))
    for entry in (value,) if isinstance(value, str) else value:
        if not isinstance(entry, kind) or value is entry:
            raise UserError(f"{key} has {entry!r}; write {form}")


def check(config: ConfigDict, *, trains: bool = True) -> None:
    """Raise UserError for the first thing in `config` that cannot work.

    Without `trains` the trainer's budgets do not matter, because nothing will be trained.
    """
    if not config.model.path:
        raise UserError("model.path is empty; give an HF directory or hub name")
    values = dict(leaves(config))
    for key, field in OPTIONS.items():
        if not key.startswith("algorithm."):  # `presets.resolve` knows the preset and own functions
            check_value(key, values.get(key), field.metadata["values"])
    for key in ("offload_optimizer", "vision") if config.trainer != "torch" else ():
        if config.train[key] not in (False, "frozen"):
            raise UserError(f"train.{key} works only with trainer=torch; unset it or set that")
    for entry in config.data.mix:
        kinds = [type(part) for part in entry] if isinstance(entry, tuple | list) else []
        if kinds not in ([str, float], [str, int]) or not 0 < entry[1] < float("inf"):
            form = "(source, weight above 0) pairs, as (('a.jsonl', 0.7), ('b.csv', 0.3))"
            raise UserError(f"data.mix has {entry!r}; write {form}")
    names = [entry[0] for entry in config.eval.sets if [*map(type, entry)] == [str, str]]
    if len({*filter(None, names)}) < len(config.eval.sets) or "/" in "".join(names):
        form = "(name, source) pairs, as (('easy', 'easy.jsonl'), ('hard', 'hard.jsonl'))"
        raise UserError(f"eval.sets={config.eval.sets!r}; write {form}, each name once")
    lora_targets(config.lora.targets)
    if config.reference.mode == "copy":
        check_value("reference.every_steps", config.reference.every_steps, "1")
    for key, value in values.items():
        check_tuple(key, value)
    refuse(_rules(config, trains))


def _rules(config: ConfigDict, trains: bool) -> tuple[tuple[object, str], ...]:
    """Return the rules between values of keys, as of `refuse`."""
    train, fleet, sampling = config.train, config.fleet, config.sampling
    scheduler, held_out = config.scheduler, config.eval
    prompt, answer = config.data.max_prompt_tokens, sampling.max_new_tokens
    bucket = max(train.row_buckets, default=0)
    longest, served = prompt + answer, prompt + max(answer, config.eval.max_new_tokens)
    one_device = "context" not in train.mesh  # else model.mesh.check_rows knows
    others, sleeps = fleet.addresses or fleet.join, trains and fleet.sleep != "off"
    far = others or config.teacher.addresses or config.reward.model.addresses
    far = far or config.observe.metrics_host != OPTIONS["observe.metrics_host"].default
    return (
        (config.trainer == "torch" and config.model.dtype != "float32",
         f"trainer=torch does not take model.dtype={config.model.dtype!r}; set it to 'float32', or "
         "trainer=jax"),
        ((scheduler.container != "none") != bool(scheduler.image),
         f"scheduler.container={scheduler.container} and image={scheduler.image!r}: a container "
         "needs an image, and none has no use for one"),
        (train.balance_coefficient and config.trainer != "jax",
         "train.balance_coefficient works only with trainer=jax; set it to 0 or set that"),
        (config.lora.rank and config.reference.mode == "ema",
         "reference.mode=ema does not go with lora.rank: an average of adapters is not the adapter "
         "of an average; use frozen or copy"),
        (fleet.publish == "adapter" and not config.lora.rank,
         "fleet.publish=adapter needs adapters and lora.rank=0; set lora.rank, or publish by path, "
         "stream or delta"),
        (fleet.publish == "nccl" and (fleet.engine != "vllm" or fleet.tensor_parallel > 1),
         f"fleet.publish=nccl with fleet.engine={fleet.engine} and tensor_parallel="
         f"{fleet.tensor_parallel}: it sends to vLLM on one GPU each; publish by path or stream"),
        (trains and config.model.dtype == "bfloat16" and not config.lora.rank,
         "model.dtype=bfloat16 without lora.rank: small updates would be rounded away; set "
         "model.dtype=float32, and model.compute_dtype=bfloat16 to compute in it"),
        (fleet.tensor_parallel > 1 and fleet.engine != "vllm",
         f"fleet.tensor_parallel={fleet.tensor_parallel} with fleet.engine={fleet.engine}: only "
         "vLLM cuts a model over GPUs; set fleet.engine=vllm, or 1"),
        (sleeps and others,
         f"fleet.sleep={fleet.sleep} with fleet.addresses or fleet.join: servers elsewhere have "
         "devices of their own; set it to off"),
        (sleeps and config.trainer == "torch",
         f"fleet.sleep={fleet.sleep} with trainer=torch, which gives no memory back between its "
         "steps; set trainer=jax, or fleet.sleep=off"),
        (sleeps and "+" in config.allocation_mode,
         f"fleet.sleep={fleet.sleep} with allocation_mode={config.allocation_mode}, which gives "
         "servers and trainer their own GPUs; write | for +, or fleet.sleep=off"),
        (sleeps and fleet.num_servers != 1 and not config.allocation_mode,
         f"fleet.sleep={fleet.sleep} with fleet.num_servers={fleet.num_servers}: without "
         "allocation_mode all share one device; set fleet.num_servers=1, or fleet.sleep=off"),
        (not 0 < sampling.temperature < float("inf"),  # nor NaN
         f"sampling.temperature={sampling.temperature} must be above 0: the loss divides logits by "
         "it; evaluation is greedy by itself"),
        (sampling.guide and sampling.min_new_tokens,
         f"sampling.min_new_tokens={sampling.min_new_tokens} with sampling.guide, which says when "
         "an answer ends; set it to 0"),
        (sampling.guide and fleet.kv_on_update == "abort",
         "fleet.kv_on_update=abort with sampling.guide: an answer with a guide cannot continue "
         "after an update; set it to keep or recompute"),
        (sampling.min_new_tokens > answer,
         f"sampling.min_new_tokens={sampling.min_new_tokens} is above sampling.max_new_tokens="
         f"{answer}; lower the minimum"),
        (trains and longest > bucket,
         f"data.max_prompt_tokens + sampling.max_new_tokens = {longest} exceeds the longest "
         f"train.row_buckets entry {bucket}; add a bucket or lower them"),
        (trains and one_device and 0 < train.max_tokens_per_microbatch < longest,
         f"train.max_tokens_per_microbatch={train.max_tokens_per_microbatch} is below the longest "
         f"possible trajectory ({longest} tokens); raise it or lower sampling.max_new_tokens or "
         "data.max_prompt_tokens"),
        (0 < fleet.max_model_len < served,
         f"fleet.max_model_len={fleet.max_model_len} is below the longest prompt and completion "
         f"({served} tokens); raise it or set it to 0"),
        (train.minibatches > config.rollout.batch_prompts,
         f"train.minibatches={train.minibatches} exceeds rollout.batch_prompts="
         f"{config.rollout.batch_prompts}; a minibatch needs at least one prompt"),
        (not trains and not others and fleet.num_servers < 1,
         "fleet.num_servers=0 without fleet.addresses; give one of them"),
        (trains and not others and fleet.num_servers < 1 and (held_out.sets or held_out.samples),
         f"eval.sets={held_out.sets!r} and eval.samples={held_out.samples} do nothing without "
         "servers; set fleet.num_servers, or leave them out"),
        (fleet.tls.ca and not far,
         f"fleet.tls.ca={fleet.tls.ca} without fleet.addresses or fleet.join: local servers listen "
         "on loopback and need no TLS; give addresses or leave fleet.tls empty"),
    )  # fmt: skip
