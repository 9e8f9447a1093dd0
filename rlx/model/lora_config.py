"""Which matrices of a model have adapters, and how large they are. Without JAX."""

import math
from dataclasses import dataclass

from rlx.base import UserError
from rlx.config import LORA_TARGETS, lora_targets
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.model.params import Row

PREFIX = "base_model.model."  # of every name in PEFT's files


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Targets and size of the adapters.

    Attributes:
      rank: ≥ 1.
      alpha: > 0; what an adapter adds is multiplied by alpha / rank.
      targets: names in LORA_TARGETS, in its order; HF's names (`q_proj`) become ours.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self):
        if self.rank < 1:
            raise UserError(f"lora.rank={self.rank} is below 1; set it to 1 or more")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lora.alpha={self.alpha} must be above 0 and finite")
        object.__setattr__(self, "targets", lora_targets(self.targets))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def table(config: ModelConfig, lora: LoraConfig) -> tuple[Row, ...]:
    """Return the rows of the adapters: A and B of each target, with PEFT's names and layouts.

    Raises:
      UserError: a target is of a mixture's experts.
    """
    sizes = parameters.axis_sizes(config) | {"rank": lora.rank}
    bases = {row.path: row for row in parameters.table(config)}
    rows: list[Row] = []
    if missing := [name for name in lora.targets if ("layers", name) not in bases]:
        there = tuple(name for name in LORA_TARGETS if ("layers", name) in bases)
        raise UserError(
            f"lora.targets has {', '.join(missing)} and the experts of {config.architecture} have "
            f"no adapters; set lora.targets={there}"
        )
    for name in lora.targets:
        base = bases["layers", name]
        if base.whole:
            free = [each for each in LORA_TARGETS if not bases["layers", each].whole]
            raise UserError(
                f"lora.targets has {name}, which {config.architecture} keeps in one matrix with "
                f"others ({base.hf.split('.')[-2]}); set it to some of {', '.join(free)}"
            )
        _, inner, outer = base.axes
        stem = PREFIX + base.hf.removesuffix("weight")
        down = ("layers", f"{name}_lora_a"), ("layers", inner, "rank"), f"{stem}lora_A.weight"
        up = ("layers", f"{name}_lora_b"), ("layers", "rank", outer), f"{stem}lora_B.weight"
        rows += [Row(*down, True, "matrix"), Row(*up, True, "zeros")]
    return tuple(row.sized(sizes) for row in rows)


def count(config: ModelConfig, lora: LoraConfig) -> int:
    """Return how many numbers the adapters have."""
    return sum(math.prod(row.shape) for row in table(config, lora))
