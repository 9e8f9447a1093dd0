"""Which matrices of a model have adapters, and how large they are. Without JAX."""

import math
from dataclasses import dataclass

from rlx.base import UserError
from rlx.config import LORA_TARGETS, lora_targets


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
