"""What the trainer takes from a run's config: one frozen dataclass, made and checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.algorithms import presets
from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError
from rlx.cli.user_code import find
from rlx.model.lora_config import LoraConfig
from rlx.model.mesh import parse_mesh
from rlx.option import option, read_options
from rlx.train.optimizer_options import OptimizerOptions

_ROW_BUCKETS = (
    64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
    24576, 32768,
)  # fmt: skip


@dataclass(frozen=True)
class TrainOptions:
    """The settings of a trainer; fields without a word here are those of the same config key.

    Attributes:
      token_budget: train.max_tokens_per_microbatch; tokens on each device, which is all of its
        rows or, under `context`, its share of them.
      dtype, compute_dtype, publish_dtype: of parameters, of activations, of exported weights.
      chunk: model.logprob_chunk; tokens whose logits exist at one time.
      temperature: > 0, the one the tokens were sampled with.
      critic_warmup: train batches in which the critic alone learns.
      lora: the adapters, where they are trained in place of the model.
    """

    algorithm: Algorithm
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    critic_learning_rate: float = 1e-5
    critic_warmup: int = 0
    total_steps: int = 1
    minibatches: int = option(1, "optimizer updates in a batch", "1")
    token_budget: int = 4096
    row_buckets: tuple[int, ...] = option(_ROW_BUCKETS, "tokens: lengths that packed rows may have")
    mesh: str = option(
        "", '"": all devices on fsdp; or e.g. "fsdp:4,tensor:2". replica copies parameters, expert '
        "is fsdp that cuts a mixture's experts, context cuts the tokens of a row: every row bucket "
        "must be a multiple of 2·context",
    )  # fmt: skip
    dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"
    chunk: int = 1024
    temperature: float = 1.0
    reference_mode: str = "frozen"
    reference_every: int = 1
    reference_decay: float = 0.0
    lora: LoraConfig | None = None
    seed: int = 0
    publish_dtype: str = "float32"
    compile: bool = option(False, "trainer=torch: use torch.compile on each layer")
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
            token_budget=config.train.max_tokens_per_microbatch,
            chunk=config.model.logprob_chunk,
            temperature=sampling.temperature,
            reference_mode=config.reference.mode,
            reference_every=config.reference.every_steps,
            reference_decay=config.reference.decay,
            lora=lora_of(config.lora),
        )
        _check(options)
        return options

    @property
    def row_budget(self) -> int:
        """Tokens that a row may have: those of all devices that share it."""
        return self.token_budget * parse_mesh(self.mesh).get("context", 1)

    @property
    def reference_moves(self) -> bool:
        """Whether the reference policy follows the trained one and so belongs to the state."""
        return self.algorithm.needs_reference and self.reference_mode != "frozen"

    @property
    def policy_updates(self) -> int:
        """Optimizer updates of the policy in the whole run: none while it waits for its critic."""
        return (self.total_steps - self.critic_warmup) * self.minibatches


def lora_of(section: Mapping[str, Any]) -> LoraConfig | None:
    """Return the adapters that `config.lora` describes; None where the whole model is trained."""
    return read_options(LoraConfig, section) if section["rank"] else None


def _check(options: TrainOptions) -> None:
    """Raise UserError for settings of a critic, reference or adapters that the algorithm lacks."""
    algorithm, warmup = options.algorithm, options.critic_warmup
    if options.lora and (algorithm.critic or algorithm.kind.scores):
        what = "a critic" if algorithm.critic else "a reward model"
        raise UserError(
            f"algorithm {algorithm.name} trains {what}, whose value head is no adapter's; set "
            "lora.rank=0"
        )
    if options.reference_mode != "frozen" and not algorithm.needs_reference:
        raise UserError(
            f"reference.mode={options.reference_mode} is of a reference policy and algorithm "
            f"{algorithm.name} asks for none; set algorithm.kl_placement, or reference.mode=frozen"
        )
    if warmup and not algorithm.critic:
        raise UserError(
            f"critic.warmup_steps={warmup} is of a critic and algorithm {algorithm.name} has none; "
            "set algorithm.critic=True, or critic.warmup_steps=0"
        )
    if warmup and warmup >= options.total_steps:
        raise UserError(
            f"critic.warmup_steps={warmup} leaves none of total_steps={options.total_steps} to the "
            "policy; lower it or raise total_steps"
        )
