"""The settings of a trainer and its optimizer, read from a run's config and checked once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.algorithms import presets
from rlx.algorithms.algorithm import Algorithm
from rlx.base import refuse
from rlx.cli.user_code import find
from rlx.model.lora_config import LoraConfig
from rlx.model.mesh import parse_mesh
from rlx.option import check_value, option, options_of, read_options
from rlx.train import prefix_trees

AUTO = "auto"  # `rlx.run.auto_values` decides when a run starts
OPTIMIZERS = {"adamw": 2, "lion": 1, "sgd": 0}  # name → float32 moments for each parameter
# Share of the peak rate by the completed fraction of the run, 0 to 1.
SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "constant": lambda done, lib: 1.0,
    "linear": lambda done, lib: 1.0 - done,
    "cosine": lambda done, lib: 0.5 * (1.0 + lib.cos(math.pi * done)),
}


@dataclass(frozen=True)
class OptimizerOptions:
    """The keys of `config.optimizer`; UserError for an unknown name or a value out of range."""

    name: str = option("adamw", "rule of an update", tuple(OPTIMIZERS))
    learning_rate: float = option(1e-6, "the peak, after warm-up", "[0, inf)")
    schedule: str = option("constant", "learning rate after warm-up", tuple(SCHEDULES))
    warmup_steps: int = option(0, "optimizer updates of linear warm-up from 0", "[0, inf)")
    b1: float = option(0.9, "share of the first moment kept at each update", "[0, 1)")
    b2: float = option(0.999, "share of the second moment kept", "[0, 1)")
    eps: float = option(1e-8, "added to the root of the second moment", "[0, inf)")
    weight_decay: float = option(0.0, "decoupled, of matrices; times the learning rate", "[0, inf)")
    clip_norm: float = option(1.0, "largest norm of the whole gradient; 0: no limit", "[0, inf)")

    def __post_init__(self):
        for name, declared in options_of(OptimizerOptions).items():
            check_value(f"optimizer.{name}", getattr(self, name), declared.metadata["values"])


def rate_at(options: OptimizerOptions, total_steps: int, updates: Any, lib: Any) -> Any:
    """Return the learning rate of an update: linear warm-up from 0, then the named schedule.

    With w warm-up steps the first update has learning_rate / w.

    Args:
      total_steps: optimizer updates of the whole run, at which the schedule ends.
      updates: index of the update, from 0; a number or an array. lib: numpy, or jax.numpy.
    """
    warmup = options.warmup_steps
    done = lib.clip((updates - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    after = options.learning_rate * SCHEDULES[options.schedule](done, lib)
    if not warmup:
        return after
    ramp = options.learning_rate * (updates + 1) / warmup
    return lib.where(updates < warmup, ramp, after)


_ROW_BUCKETS = (
    64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
    24576, 32768,
)  # fmt: skip


@dataclass(frozen=True)
class TrainOptions:
    """The settings of a trainer, each with the config key that sets it."""

    algorithm: Algorithm
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    critic_learning_rate: float = 1e-5
    critic_warmup: int = 0  # train batches in which only the critic learns
    total_steps: int = 1
    minibatches: int = option(1, "optimizer updates in a batch", "1")
    token_budget: int = 4096  # train.max_tokens_per_microbatch; under `context` a share of rows
    row_buckets: tuple[int, ...] = option(_ROW_BUCKETS, "tokens: lengths that packed rows may have")
    mesh: str = option(
        "", '"": all devices on fsdp; or e.g. "fsdp:4,tensor:2". replica copies parameters, expert '
        "is fsdp that cuts a mixture's experts, context cuts the tokens of a row: every row bucket "
        "must be a multiple of 2·context",
    )  # fmt: skip
    dtype: str = "float32"  # of parameters; without a run that decides it, `auto` is float32
    compute_dtype: str = "float32"  # of activations
    remat: str = "none"
    chunk: int = 0  # model.logprob_chunk; tokens whose logits exist at one time, 0: by the device
    temperature: float = 1.0  # > 0, the one the tokens were sampled with
    reference_mode: str = "frozen"
    reference_every: int = 1
    reference_decay: float = 0.0
    lora: LoraConfig | None = None  # the adapters; None: the whole model is trained
    seed: int = 0
    publish_dtype: str = "float32"  # of exported weights
    image_dir: str = ""  # directory of the run's `ImageStore`
    compile: bool = option(
        False, "compile at each start for faster steps; trainer=torch: torch.compile of each "
        "layer; trainer=jax: oneDNN's products, in bfloat16 on x86 CPUs from JAX 0.12",
    )  # fmt: skip
    share_prefixes: str = option(
        "auto", "compute tokens that trajectories of a batch begin with once, not in each; auto: "
        "where that costs less", prefix_trees.MODES,
    )  # fmt: skip
    vision: str = option(
        "frozen", "tower of a model that sees images: frozen, so that each image is computed once, "
        "or trained with the language model; trainer=torch", ("frozen", "trained"),
    )  # fmt: skip
    offload_optimizer: bool = option(False, "trainer=torch on a GPU: moments in the host's memory")
    balance_coefficient: float = option(
        0.0, "of a mixture's load-balancing loss (arXiv 2101.03961, eq. 4); 1e-3 to 1e-2 in "
        "pre-training, 0 in most RL; trainer=jax", "[0, inf)",
    )  # fmt: skip

    @classmethod
    def of(cls, config: Any) -> "TrainOptions":
        """Return the options of a run's whole config; UserError for values that do not fit."""
        sampling = config.sampling
        options = read_options(
            cls,
            config,
            config.train,
            config.model,
            algorithm=presets.resolve(
                config.algorithm, sampling.max_new_tokens, sampling.n_samples, find
            ),
            optimizer=OptimizerOptions(**config.optimizer),
            critic_learning_rate=config.critic.learning_rate,
            critic_warmup=config.critic.warmup_steps,
            token_budget=config.train.max_tokens_per_microbatch or _fewest_tokens(config),
            remat=config.model.remat.replace(AUTO, "none"),
            chunk=config.model.logprob_chunk,
            temperature=sampling.temperature,
            reference_mode=config.reference.mode,
            reference_every=config.reference.every_steps,
            reference_decay=config.reference.decay,
            lora=lora_of(config.lora),
            compute_dtype=config.model.compute_dtype.replace(AUTO, "float32"),
            publish_dtype=config.model.publish_dtype.replace(AUTO, "float32"),
        )
        _check(options)
        return options

    @property
    def row_budget(self) -> int:
        """Largest row, tokens: the budget of all devices that share it."""
        return self.token_budget * parse_mesh(self.mesh).get("context", 1)

    @property
    def reference_moves(self) -> bool:
        """Whether the reference policy follows the trained one, as a part of the state."""
        return self.algorithm.needs_reference and self.reference_mode != "frozen"

    @property
    def policy_updates(self) -> int:
        """Optimizer updates of the policy in the whole run, without the critic's warm-up."""
        return (self.total_steps - self.critic_warmup) * self.minibatches


def _fewest_tokens(config: Any) -> int:
    """Return the tokens of a microbatch that no memory limits: a row of the longest trajectory."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    row = min((b for b in config.train.row_buckets if b >= longest), default=longest)
    return max(4096, math.ceil(row / parse_mesh(config.train.mesh).get("context", 1)))


def lora_of(section: Mapping[str, Any]) -> LoraConfig | None:
    """Return the adapters that `config.lora` describes; None where the whole model is trained."""
    return read_options(LoraConfig, section) if section["rank"] else None


def _check(options: TrainOptions) -> None:
    """Raise UserError for settings of a critic, reference or adapters that the algorithm lacks."""
    algorithm, warmup, mode = options.algorithm, options.critic_warmup, options.reference_mode
    what = "a critic" if algorithm.critic else "a reward model"
    refuse((
        (options.lora and (algorithm.critic or algorithm.kind.scores),
         f"algorithm {algorithm.name} trains {what}, whose value head has no adapter; set "
         "lora.rank=0"),
        (mode != "frozen" and not algorithm.needs_reference,
         f"reference.mode={mode} needs a reference policy and algorithm {algorithm.name} has none; "
         "set algorithm.kl_placement, or reference.mode=frozen"),
        (warmup and not algorithm.critic,
         f"critic.warmup_steps={warmup} needs a critic and algorithm {algorithm.name} has none; "
         "set algorithm.critic=True, or critic.warmup_steps=0"),
        (warmup and warmup >= options.total_steps,
         f"critic.warmup_steps={warmup} leaves none of total_steps={options.total_steps} to the "
         "policy; lower it or raise total_steps"),
    ))  # fmt: skip
