"""Config defaults and the arithmetic that must hold between them. No I/O.

`default()` names every key with its unit; a file in `configs/` starts from it and changes what
differs. ml-collections flags override single keys; `check` explains what cannot work before
anything starts. Keys of `config.algorithm` are the fields of `Algorithm`, declared there. The
reference of the docs is made from the comments in `default`, one on each key, and from CHOICES
and RANGES.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict, config_dict

from rlx.algorithms.algorithm import FIELDS
from rlx.base import UserError, unknown

ENGINES = ("jax", "vllm")
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the decoder's matrices
_DTYPES = ("float32", "bfloat16")
CHOICES: dict[str, tuple[str, ...]] = {  # of keys that take one of a few words
    "trainer": ("jax", "torch"),
    "model.dtype": _DTYPES,
    "model.compute_dtype": _DTYPES,
    "model.publish_dtype": _DTYPES,
    "model.remat": ("none", "dots", "attention", "full"),
    "data.kind": ("jsonl", "arithmetic", "word_problems"),
    "data.overlong": ("error", "skip"),
    "agents.export": ("tree", "concat", "individual"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "reference.mode": ("frozen", "copy", "ema"),
    "scheduler.type": ("local", "slurm", "ray"),
    "scheduler.container": ("none", "apptainer", "pyxis"),
    "fleet.engine": ENGINES,
    "fleet.kv_on_update": ("keep", "recompute", "abort"),
    "fleet.publish": ("path", "stream", "delta", "adapter"),
    "teacher.engine": ("", *ENGINES),
    "checkpoint.recover_mode": ("auto", "off"),
}
RANGES: dict[str, str] = {  # of numbers: the least one, or an interval
    **dict.fromkeys((
        "total_steps", "sampling.n_samples", "sampling.max_new_tokens", "fleet.tensor_parallel",
        "rollout.batch_prompts", "rollout.max_concurrent_rollouts", "train.minibatches",
        "train.max_tokens_per_microbatch", "fleet.slots", "fleet.decode_steps",
        "rollout.max_attempts", "model.logprob_chunk", "reward.workers",
        "checkpoint.keep", "gate.prompts", "gate.max_new_tokens", "scheduler.nodes",
        "teacher.num_servers", "reward.model.num_servers",
    ), "1"),
    **dict.fromkeys((
        "rollout.max_staleness", "sampling.min_new_tokens", "sampling.top_k", "fleet.num_servers",
        "eval.num_questions", "eval.max_new_tokens", "fleet.threads", "gate.every_steps",
        "critic.warmup_steps", "fleet.max_restarts", "checkpoint.first_step",
        *(f"{kind}.every_{unit}" for kind in ("checkpoint", "eval", "export")
          for unit in ("epochs", "steps", "seconds")),
        "reward.memory_gb", "reward.max_processes", "agents.memory_gb", "agents.max_processes",
        "agents.reward_seconds", "export.keep", "scheduler.gpus_per_node", "sandbox.workers",
        "lora.rank",
    ), "0"),
    **dict.fromkeys((
        "cluster.timeout_seconds", "cluster.join_seconds", "cluster.call_seconds",
        "scheduler.wait_seconds", "fleet.connect_seconds", "fleet.probe_seconds",
        "fleet.hang_seconds", "fleet.outage_seconds", "fleet.kill_seconds",
        "agents.block_seconds", "lora.alpha",
    ), "(0, inf)"),
    "scheduler.retries": "-1",
    "critic.learning_rate": "[0, inf)",
    "rollout.outage_seconds": "[0, inf)",
    "train.balance_coefficient": "[0, inf)",
    "reference.decay": "[0, 1)",
    "fleet.gpu_memory": "[0, 1)",
    "agents.turn_discount": "[0, 1]",
    "rollout.max_failure_rate": "[0, 1]",
    "sampling.top_p": "(0, 1]",
}  # fmt: skip


def default() -> ConfigDict:
    """Return every key of a run, with the value a newcomer wants."""
    c = ConfigDict()
    c.seed = 0  # of the data's order, of sampling and of random weights
    c.total_steps = 100  # train batches; one publish each
    c.trainer = "jax"  # jax | torch: what the update is computed with
    c.allocation_mode = ""  # e.g. "vllm:d4+jax:f4": decides servers, trainer, mesh and their GPUs

    c.model = ConfigDict()  # the language model: where it is and how it computes
    c.model.path = ""  # HF directory or hub name; "" is not allowed in a run
    c.model.random_init = False  # take config and tokenizer from `path`, random weights
    c.model.dtype = "float32"  # of parameters; bfloat16 is for a base of LoRA alone
    c.model.compute_dtype = "float32"  # activations
    c.model.publish_dtype = "float32"  # what the fleet receives and the exported directory has
    c.model.remat = "none"  # what is computed again in the backward pass: none of a layer | dots
    # (all but products) | attention (all but qkv and attention) | full (all); bytes: model/remat.py
    c.model.logprob_chunk = 1024  # tokens whose logits exist at one time

    c.data = ConfigDict()  # the rows: questions with answers, demonstrations or pairs
    c.data.kind = "jsonl"  # jsonl (rows of files, whatever their format) | generated ones:
    # arithmetic | word_problems
    c.data.train = ""  # .jsonl, .json, .csv or .parquet file, or hub name with an optional :split
    c.data.mix = ()  # ((source, weight), …) in place of train; shares of the prompts
    c.data.dataset = ""  # FILE.py:name, a function that returns rows, in place of train and mix
    c.data.eval = ""  # held-out rows, as in train; "": none, or with kind=arithmetic generated
    c.data.system_prompt = ""  # before each question; "": none
    c.data.question_key = "question"  # of text, or of a list of chat messages
    c.data.answer_key = "answer"  # of what rewards get as `answer`
    c.data.completion_key = "completion"  # of demonstrations (SFT)
    c.data.chosen_key = "chosen"  # of pairs (reward model, DPO, IPO)
    c.data.rejected_key = "rejected"  # of the worse answer in a pair
    c.data.chat_template = ""  # "": the model's own | a Jinja file | none: raw prompts, base models
    c.data.max_prompt_tokens = 1024  # of a row, chat template included
    c.data.overlong = "error"  # rows over max_prompt_tokens or the model's context: error | skip
    c.data.shuffle = True  # rows of each epoch in an order that seed draws
    c.data.allow_change = False  # continue a checkpoint with rows that have changed since

    c.reward = ConfigDict()  # what answers are graded by, in worker processes
    c.reward.name = "gsm8k"  # in rlx.rewards.rewards, or FILE.py:function, module:function
    c.reward.terms = ()  # (name, weight) pairs, added and each logged; empty: reward.name alone
    c.reward.timeout_seconds = 5.0  # for one completion; above 0
    c.reward.workers = 1  # processes, of rewards and of agents
    c.reward.model = ConfigDict()  # a reward model that rlx trained: the reward named "model"
    c.reward.model.path = ""  # HF directory, for JAX servers of the run's own; "": none
    c.reward.model.addresses = ()  # host:port of running ones, in the TLS of fleet
    c.reward.model.num_servers = 1  # how many to start, where there are no addresses
    c.agents = ConfigDict()  # their processes; reward.workers is how many
    c.agents.turn_discount = 1.0  # of the reward of a conversation's next completion, for one
    c.agents.export = "tree"  # rows of a run: tree | concat | individual, see docs/agents.md
    c.agents.reward_seconds = 0.0  # to wait for the reward of a run that returned None
    c.agents.block_seconds = 300.0  # an agent may block its process's event loop
    c.agents.process_per_run = False  # no run sees another's key; reward.workers runs at once
    for workers in (c.reward, c.agents):
        workers.memory_gb = 0.0  # address space of each process; 0: no limit
        workers.max_processes = 0  # a worker and all that it starts; 0: no limit
        workers.environment = ()  # variables it sees besides PATH, HOME, LANG, PYTHON*, OMP_*, …
        workers.resources = ""  # of a Ray cluster that each takes there, as "CPU:1"; "": run here

    c.online = ConfigDict()  # rollout.workflow=online: where applications have sessions
    c.online.host = "127.0.0.1"  # that it listens at, as for agents on other nodes; any but
    # loopback needs TLS. With scheduler.type=slurm or ray: trainer 0's host, and TLS of the run
    c.online.port = 8000  # that its gateway listens on; 0: any
    c.online.admin_key = ""  # a file with the key that makes sessions; "": $RLX_ADMIN_KEY
    c.online.idle_seconds = 3600.0  # without a request, after which a session ends
    c.online.tls_cert = ""  # PEM file, of the gateway
    c.online.tls_key = ""  # PEM file, its key

    c.sampling = ConfigDict()  # how answers are drawn
    c.sampling.n_samples = 8  # trajectories a group
    c.sampling.temperature = 1.0  # above 0; losses are of this distribution
    c.sampling.top_p = 1.0  # share of the probability that tokens are drawn from; 1: all of it
    c.sampling.top_k = 0  # likeliest tokens that are drawn from; 0: all
    c.sampling.max_new_tokens = 256  # also of the answers in a dataset
    c.sampling.min_new_tokens = 0  # before an answer may end
    c.sampling.stop = ()  # texts that end an answer

    c.rollout = ConfigDict()  # how far and how wide generation runs ahead of training
    c.rollout.batch_prompts = 8  # B: prompts a train batch
    c.rollout.max_staleness = 2  # η: versions; 0 is synchronous training
    c.rollout.force_staleness = False  # each batch lags by max_staleness exactly; experiments
    c.rollout.max_concurrent_rollouts = 64  # live prompts
    c.rollout.max_attempts = 3  # at one prompt, before it is skipped and named in skipped.jsonl
    c.rollout.max_failure_rate = 0.5  # of recent prompts; above it an outage begins; 1: never
    c.rollout.outage_seconds = 120.0  # in which no prompt is skipped; then an outage ends the run
    c.rollout.request_timeout_seconds = 600.0  # for one attempt at a prompt
    c.rollout.workflow = "rlvr"  # one turn, graded | tools | multi_turn | online: applications ask;
    # or FILE.py:Class, module:Class: a workflow of one's own, or an agent
    c.rollout.workflow_kwargs = config_dict.placeholder(object)  # of its constructor, a dict

    c.algorithm = ConfigDict()  # advantage, loss and what is around them
    c.algorithm.preset = "grpo"  # a row of docs/algorithms.md
    for name, field in FIELDS.items():  # all else; what is not set is as the preset has it
        c.algorithm[name] = config_dict.placeholder(field.type)

    c.optimizer = ConfigDict()  # of the policy
    c.optimizer.name = "adamw"  # adamw | lion | sgd: the rule of an update
    c.optimizer.learning_rate = 1e-6  # the peak, after warm-up
    c.optimizer.schedule = "constant"  # of the rate after warm-up: constant | linear | cosine
    c.optimizer.warmup_steps = 0  # optimizer updates of linear warm-up from 0
    c.optimizer.b1 = 0.9  # what the first moment keeps at each update
    c.optimizer.b2 = 0.999  # what the second moment keeps
    c.optimizer.eps = 1e-8  # added to the root of the second moment
    c.optimizer.weight_decay = 0.0  # decoupled, of matrices; times the learning rate
    c.optimizer.clip_norm = 1.0  # largest norm of the whole gradient; 0: no limit

    c.lora = ConfigDict()  # adapters are trained in place of the model
    c.lora.rank = 0  # of each adapter; 0: off, the whole model is trained
    c.lora.alpha = 16.0  # what an adapter adds is multiplied by alpha / rank
    c.lora.targets = LORA_TARGETS  # names of matrices, as here or as HF has them (q_proj)

    c.critic = ConfigDict()  # the network behind algorithm.critic, begun as a copy of the model
    c.critic.learning_rate = 1e-5  # its own; all else is as in optimizer
    c.critic.warmup_steps = 0  # train batches in which it alone learns

    c.reference = ConfigDict()  # the policy KL terms and DPO are anchored at
    c.reference.mode = "frozen"  # frozen | copy (every `every_steps`) | ema (of `decay`)
    c.reference.every_steps = 0  # train batches between two copies of the policy
    c.reference.decay = 0.99  # what an EMA keeps at each train batch

    c.train = ConfigDict()  # how a batch becomes updates, and on which devices
    c.train.minibatches = 1  # optimizer updates a batch
    c.train.max_tokens_per_microbatch = 4096  # on each device: with context:4 in the mesh a row of
    # 16384 fits, cut in four
    c.train.row_buckets = (  # tokens: the lengths that packed rows may have
        64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
        16384, 24576, 32768,
    )  # fmt: skip
    c.train.compile = False  # trainer=torch: each layer by torch.compile
    c.train.offload_optimizer = False  # trainer=torch on a GPU: its moments in the host's memory
    c.train.mesh = ""  # "" (all devices on fsdp) or e.g. "fsdp:4,tensor:2"; replica copies
    # parameters, context cuts the tokens of a row (its double divides each of row_buckets), expert
    # is fsdp that cuts a mixture's experts
    c.train.balance_coefficient = 0.0  # of a mixture's load-balancing loss (arXiv 2101.03961,
    # eq. 4); pre-training has 1e-3 to 1e-2, RL mostly none; trainer=jax

    c.cluster = ConfigDict()  # a trainer of several processes, one on each host: the same command
    # on all of them. Empty: as Slurm, Ray or torchrun have started this one, or one process
    c.cluster.coordinator = ""  # host:port of process 0, which has servers, rollouts and records
    c.cluster.processes = 0  # how many; 1: this one alone, whatever has started it
    c.cluster.process = -1  # which one this is, from 0
    c.cluster.timeout_seconds = 60.0  # without a sign of life or of progress: lost, and all end
    c.cluster.join_seconds = 300.0  # for all processes to come, at the start
    c.cluster.call_seconds = 1800.0  # in one call of the trainer that process 0 is in too

    c.scheduler = ConfigDict()  # which hosts the run's processes are on, and who starts them there
    c.scheduler.type = "local"  # local (this machine) | slurm | ray
    c.scheduler.nodes = 1  # hosts, taken whole
    c.scheduler.gpus_per_node = 0  # of each; 0: none, all compute on CPUs
    c.scheduler.retries = -1  # new starts of a run that has lost a process or host, or has made
    # steps; -1: 3 with slurm and ray, none with local
    c.scheduler.partition = ""  # Slurm's, as are account … exclude; "": as the cluster has it
    c.scheduler.account = ""  # Slurm's account
    c.scheduler.qos = ""  # Slurm's quality of service
    c.scheduler.time = ""  # e.g. "12:00:00"
    c.scheduler.nodelist = ""  # hosts to take, in Slurm's spelling
    c.scheduler.exclude = ""  # hosts not to take
    c.scheduler.options = ()  # further ones of sbatch, e.g. ("--mem=0", "--reservation=rl")
    c.scheduler.container = "none"  # that processes run in: none | apptainer | pyxis
    c.scheduler.image = ""  # of the container
    c.scheduler.mounts = ()  # FROM:TO, besides the workdir
    c.scheduler.pre_commands = ()  # lines of bash before each process, in its container
    c.scheduler.template = ""  # a file in place of rlx/launch/slurm_job.sh
    c.scheduler.wait_seconds = 60.0  # with Ray, for resources that others have, or nodes that come

    c.fleet = ConfigDict()  # the servers that generate
    c.fleet.engine = "jax"  # what generates on each server
    c.fleet.num_servers = 1  # 0: none, where a dataset is trained on and nothing generated
    c.fleet.addresses = ()  # host:port of running servers, or @FILE with one a line, which
    # may join and leave while the run goes on; empty: start local ones
    c.fleet.join = ""  # directory of rlx.serve --join=DIR: servers that join and leave by
    # themselves, besides `addresses` or, with num_servers above 0, local ones
    c.fleet.tensor_parallel = 1  # GPUs a vLLM server, each with a slice of every layer
    c.fleet.gpu_memory = 0.0  # share of a GPU that a server takes; 0: the engine's own choice,
    # 0.4 where allocation_mode puts the trainer on the same GPUs
    c.fleet.slots = 64  # sequences decoded together on one server
    c.fleet.max_model_len = 0  # tokens of prompt and answer; 0: from prompt and completion budgets
    c.fleet.decode_steps = 8  # tokens a jitted decode call produces per sequence
    c.fleet.kv_on_update = "keep"  # keep | recompute | abort (and send again)
    c.fleet.publish = "path"  # path | stream | delta (what changed) | adapter (LoRA's alone)
    c.fleet.publish_dir = "/dev/shm"  # where weights lie on their way; without room: the workdir
    c.fleet.threads = 0  # CPU threads a server; 0: cores divided by processes
    c.fleet.publish_timeout_seconds = 120.0  # for a server to take new weights, then it is lost
    c.fleet.connect_seconds = 60.0  # for running servers to answer, at the start
    c.fleet.probe_seconds = 1.0  # between two looks at a server
    c.fleet.hang_seconds = 5.0  # a server silent for so long is lost: its requests go on elsewhere
    c.fleet.outage_seconds = 300.0  # requests wait for so long while no server is alive
    c.fleet.kill_seconds = 60.0  # a local server silent for so long is killed and started again
    c.fleet.max_restarts = 5  # of a local server, in a row
    c.fleet.tls = ConfigDict()  # PEM files, for fleet.addresses beyond this machine
    c.fleet.tls.ca = ""  # who signs the servers' certificates; empty: no TLS
    c.fleet.tls.cert = ""  # what we show to servers that ask for it
    c.fleet.tls.key = ""  # of that certificate

    c.teacher = ConfigDict()  # of distillation (algorithm.kl_anchor): a fleet that only scores
    c.teacher.path = ""  # HF directory or hub name, for servers of the run's own; "": none
    c.teacher.addresses = ()  # host:port of running ones, never published to; in the TLS of fleet
    c.teacher.num_servers = 1  # how many to start, where there are no addresses
    c.teacher.engine = ""  # "": as fleet.engine

    c.gate = ConfigDict()  # the trainer scores tokens of every server and compares logprobs
    c.gate.enabled = True  # off: nothing is compared
    c.gate.every_steps = 50  # publishes between two checks; 0: before the first step only
    c.gate.prompts = 4  # asked of each server at a check
    c.gate.max_new_tokens = 32  # of each answer that is compared
    c.gate.max_delta = 0.0  # nats, of one token; 0: by model.publish_dtype and compute_dtype
    c.gate.mean_delta = 0.0  # nats, on average; 0: likewise

    c.checkpoint = ConfigDict()  # what a run continues from
    c.checkpoint.first_step = 2  # after which the first is written; 0: off
    c.checkpoint.every_epochs = 0  # further ones, by whichever comes first; 0: not by it
    c.checkpoint.every_steps = 0  # train batches; 0: not by it
    c.checkpoint.every_seconds = 600.0  # 0: not by it
    c.checkpoint.keep = 2  # how many; older ones are deleted
    c.checkpoint.recover_mode = "auto"  # auto: continue from WORKDIR's checkpoint | off

    c.eval = ConfigDict()  # the held-out questions, asked of the policy while it trains
    c.eval.every_epochs = 0  # besides those before the first and after the last step
    c.eval.every_steps = 0  # train batches; 0: not by it
    c.eval.every_seconds = 0.0  # 0: not by it
    c.eval.num_questions = 200  # of the held-out rows; 0: no evaluations
    c.eval.max_new_tokens = 0  # of an answer; 0: as sampling

    c.sandbox = ConfigDict()  # of tools, and of rewards and agents that run what a model wrote
    c.sandbox.kind = "local"  # or FILE.py:Class, module:Class: your own
    c.sandbox.require = "landlock"  # least that confines a program: none | seccomp | landlock |
    # bubblewrap | namespaces; docs/security.md says what each holds
    c.sandbox.workers = 0  # programs at once, of each process that has a sandbox; 0: its cores

    c.export = ConfigDict()  # HF directories that stay: exports/epoch1epochstep0globalstep40
    c.export.every_epochs = 0  # 0: not by it
    c.export.every_steps = 0  # train batches; 0: not by it
    c.export.every_seconds = 0.0  # 0: not by it
    c.export.keep = 0  # how many; older ones are deleted; 0: all stay

    c.observe = ConfigDict()  # what is shown and kept of a run
    c.observe.transcripts_per_step = 4  # samples in rollouts/, by step
    c.observe.writers = ("tensorboard",)  # also wandb, trackio; or FILE.py:hook, module:hook
    c.observe.tensorboard = config_dict.placeholder(bool)  # gone: see writers
    return c.lock()


def check(config: ConfigDict, *, trains: bool = True) -> None:
    """Raise UserError for the first thing in `config` that cannot work.

    Args:
      trains: false where nothing will be trained, so that the trainer's budgets do not matter.
    """
    if config.observe.tensorboard is not None:
        raise UserError("observe.tensorboard is gone; set observe.writers=('tensorboard',) or ()")
    if not config.model.path:
        raise UserError("model.path is empty; give an HF directory or hub name")
    for key, choices in CHOICES.items():
        if _get(config, key) not in choices:
            raise unknown(key, str(_get(config, key)), choices)
    for key, interval in RANGES.items():
        _check_range(key, _get(config, key), interval)
    if config.trainer == "torch" and config.model.dtype != "float32":
        raise UserError(
            f"trainer=torch does not take model.dtype={config.model.dtype!r}; set it to 'float32', "
            "or trainer=jax"
        )
    if (config.scheduler.container != "none") != bool(config.scheduler.image):
        raise UserError(
            f"scheduler.container={config.scheduler.container} and image="
            f"{config.scheduler.image!r}: a container needs an image, and none has no use for one"
        )
    for key in ("compile", "offload_optimizer") if config.trainer != "torch" else ():
        if config.train[key]:
            raise UserError(f"train.{key} is of trainer=torch; unset it, or set trainer=torch")
    if config.train.balance_coefficient and config.trainer != "jax":
        raise UserError(
            "train.balance_coefficient is of trainer=jax; set it to 0, or set trainer=jax"
        )
    for entry in config.data.mix:
        kinds = [type(part) for part in entry] if isinstance(entry, tuple | list) else []
        if kinds not in ([str, float], [str, int]) or not 0 < entry[1] < float("inf"):
            wanted = "(source, weight above 0) pairs, as (('a.jsonl', 0.7), ('b.csv', 0.3))"
            raise UserError(f"data.mix has {entry!r}; write {wanted}")
    _check_lora(config)
    if trains and config.model.dtype == "bfloat16" and not config.lora.rank:
        raise UserError(
            "model.dtype=bfloat16 without lora.rank: small updates would be rounded away; set "
            "model.dtype=float32, and model.compute_dtype=bfloat16 to compute in it"
        )
    if config.reference.mode == "copy":
        _check_range("reference.every_steps", config.reference.every_steps, "1")
    if config.fleet.tensor_parallel > 1 and config.fleet.engine != "vllm":
        raise UserError(
            f"fleet.tensor_parallel={config.fleet.tensor_parallel} with fleet.engine="
            f"{config.fleet.engine}: only vLLM cuts a model over GPUs; set fleet.engine=vllm, or 1"
        )
    if config.reward.timeout_seconds <= 0:
        raise UserError(
            f"reward.timeout_seconds={config.reward.timeout_seconds:g} must be above 0: no reward "
            "is computed in no time"
        )
    for key in ("reward.environment", "agents.environment"):
        if isinstance(_get(config, key), str):
            raise UserError(f"{key}={_get(config, key)!r} is one text; give a tuple of names")
    if config.sampling.temperature <= 0:
        raise UserError(
            f"sampling.temperature={config.sampling.temperature} must be above 0: the loss divides "
            "logits by it; evaluation is greedy by itself"
        )
    if config.sampling.min_new_tokens > config.sampling.max_new_tokens:
        raise UserError(
            f"sampling.min_new_tokens={config.sampling.min_new_tokens} is above "
            f"sampling.max_new_tokens={config.sampling.max_new_tokens}; lower the minimum"
        )
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if trains and longest > max(config.train.row_buckets):
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {longest} exceeds the longest "
            f"train.row_buckets entry {max(config.train.row_buckets)}; add a bucket or lower them"
        )
    one_device = "context" not in config.train.mesh  # else model.mesh.check_rows knows
    if trains and one_device and longest > config.train.max_tokens_per_microbatch:
        raise UserError(
            f"train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch} is below "
            f"the longest possible trajectory ({longest} tokens); raise it or lower "
            "sampling.max_new_tokens or data.max_prompt_tokens"
        )
    new_tokens = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
    if 0 < config.fleet.max_model_len < config.data.max_prompt_tokens + new_tokens:
        raise UserError(
            f"fleet.max_model_len={config.fleet.max_model_len} is below the longest prompt and "
            f"completion ({config.data.max_prompt_tokens + new_tokens} tokens); raise it or set "
            "it to 0"
        )
    if config.train.minibatches > config.rollout.batch_prompts:
        raise UserError(
            f"train.minibatches={config.train.minibatches} exceeds rollout.batch_prompts="
            f"{config.rollout.batch_prompts}; a minibatch needs at least one prompt"
        )
    others = config.fleet.addresses or config.fleet.join
    if not trains and not others and config.fleet.num_servers < 1:
        raise UserError("fleet.num_servers=0 without fleet.addresses; give one of them")
    if config.fleet.tls.ca and not others:
        raise UserError(
            f"fleet.tls.ca={config.fleet.tls.ca} without fleet.addresses or fleet.join: local "
            "servers listen on loopback alone and need no TLS; give addresses or leave fleet.tls "
            "empty"
        )


def lora_targets(names: Iterable[str]) -> tuple[str, ...]:
    """Return `names` (ours, or HF's such as `q_proj`) as LORA_TARGETS has them, in its order.

    Raises:
      UserError: a name that is none, with the nearest that is; or no name at all.
    """
    if isinstance(names, str):
        raise UserError(f"lora.targets={names!r} is one text; give a tuple of names")
    joined = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # as Phi 3's files have them
    given = [name.removesuffix("_proj") for name in names]
    short = [each for name in given for each in joined.get(name, (name,))]
    for name in short:
        if name not in LORA_TARGETS:
            raise unknown("lora.targets entry", name, LORA_TARGETS)
    if not short:
        raise UserError(f"lora.targets is empty; give some of {', '.join(LORA_TARGETS)}")
    return tuple(name for name in LORA_TARGETS if name in short)


def _check_lora(config: ConfigDict) -> None:
    lora_targets(config.lora.targets)
    if config.lora.rank and config.reference.mode == "ema":
        raise UserError(
            "reference.mode=ema does not go with lora.rank: an average of adapters is not the "
            "adapter of an average; use frozen or copy"
        )
    if config.fleet.publish == "adapter" and not config.lora.rank:
        raise UserError(
            "fleet.publish=adapter needs adapters and lora.rank=0; set lora.rank, or publish by "
            "path, stream or delta"
        )


def _get(config: ConfigDict, key: str):
    for part in key.split("."):
        config = config[part]
    return config


def _check_range(key: str, value: float, interval: str) -> None:
    low, _, high = interval.strip("()[]").partition(", ")
    above = value > float(low) if interval[0] == "(" else value >= float(low)
    below = not high or (value <= float(high) if interval[-1] == "]" else value < float(high))
    if above and below:
        return
    if not high:
        raise UserError(f"{key}={value:g} is below {low}; set it to {low} or more")
    wanted = {"(0, inf)": "above 0 and finite", "[0, inf)": "finite and 0 or more"}
    raise UserError(f"{key}={value:g} must be {wanted.get(interval, f'in {interval}')}")
