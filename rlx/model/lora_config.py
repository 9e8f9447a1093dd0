"""The matrices of a model that have LoRA adapters, and the adapters' sizes. No JAX."""

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from rlx.base import UserError, unknown
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.model.params import Row
from rlx.option import option

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the decoder's matrices
PREFIX = "base_model.model."  # of every name in PEFT's files


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Targets and size of the adapters; targets become names in LORA_TARGETS, in its order."""

    rank: int = option(0, "rank of each adapter; 0: train the whole model", "0")
    alpha: float = option(16.0, "an adapter's output is multiplied by alpha / rank", "(0, inf)")
    targets: tuple[str, ...] = option(LORA_TARGETS, "names of matrices, these or HF's (q_proj)")

    def __post_init__(self):
        if self.rank < 1:
            raise UserError(f"lora.rank={self.rank} is below 1; set it to 1 or more")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lora.alpha={self.alpha} is not a finite number above 0; set one")
        object.__setattr__(self, "targets", lora_targets(self.targets))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def lora_targets(names: Iterable[str]) -> tuple[str, ...]:
    """Return names (ours or HF's, `q_proj`) in LORA_TARGETS' order; UserError if one is unknown."""
    if isinstance(names, str):
        raise UserError(f"lora.targets={names!r} is one text; give a tuple of names")
    joined = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # as Phi 3's files have them
    stems = [name.removesuffix("_proj") for name in names]
    short = [part for name in stems for part in joined.get(name, (name,))]
    for name in short:
        if name not in LORA_TARGETS:
            raise unknown("lora.targets entry", name, LORA_TARGETS)
    if not short:
        raise UserError(f"lora.targets is empty; give some of {', '.join(LORA_TARGETS)}")
    return tuple(name for name in LORA_TARGETS if name in short)


def table(config: ModelConfig, lora: LoraConfig) -> tuple[Row, ...]:
    """Return the rows of the adapters, with PEFT's names; UserError for an unsuitable target."""
    sizes = parameters.axis_sizes(config) | {"rank": lora.rank}
    bases = {row.path: row for row in parameters.table(config)}
    rows: list[Row] = []
    if missing := [name for name in lora.targets if ("layers", name) not in bases]:
        targets = tuple(name for name in LORA_TARGETS if ("layers", name) in bases)
        raise UserError(
            f"lora.targets has {', '.join(missing)} and the experts of {config.architecture} have "
            f"no adapters; set lora.targets={targets}"
        )
    for name in lora.targets:
        base = bases["layers", name]
        for other in LORA_TARGETS:  # matrices that HF joins have one adapter
            row = bases.get(("layers", other))
            if row and row.hf == base.hf and other not in lora.targets:
                raise UserError(
                    f"lora.targets has {name} without {other}, and {config.architecture} has both "
                    f"in one matrix; name it whole: {module(base)}"
                )
        if base.begin:
            continue
        inner, outer = base.axes[1], "joined" if base.joined_size else base.axes[2]
        stem, widths = PREFIX + base.hf.removesuffix("weight"), sizes | {"joined": base.joined_size}
        for half, axes, kind in (("a", (inner, "rank"), "matrix"), ("b", ("rank", outer), "zeros")):
            path = "layers", f"{adapter(base)}_lora_{half}"
            hf = f"{stem}lora_{half.upper()}.weight"
            rows.append(Row(path, ("layers", *axes), hf, True, kind).sized(widths))
    return tuple(rows)


def module(base: Row) -> str:
    """Return HF's name of a matrix in a layer; for a joined one, the name of the whole."""
    return base.hf.split(".")[-2]


def adapter(base: Row) -> str:
    """Return the name of a matrix's adapter; joined matrices share it."""
    return module(base).removesuffix("_proj")


def modules(targets: Iterable[str], known: Container[str]) -> list[str]:
    """Return HF's names of the matrices to adapt, in a model whose modules are called `known`."""
    fused = {part: hf.split(".")[1] for hf, parts in parameters.FUSED.items() for part in parts}
    names = (fused[name] if fused.get(name) in known else f"{name}_proj" for name in targets)
    return list(dict.fromkeys(names))


def count(config: ModelConfig, lora: LoraConfig) -> int:
    """Return how many numbers the adapters have."""
    return sum(math.prod(row.shape) for row in table(config, lora))
