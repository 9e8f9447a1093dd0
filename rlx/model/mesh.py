"""`train.mesh`: the axes of a mesh of devices, their sizes, and checks of what they must divide.

sharding.py describes the axes.
"""

from collections.abc import Mapping, Sequence
from math import gcd, prod

from rlx.base import UserError, refuse, unknown
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig

AXES = ("replica", "fsdp", "expert", "context", "tensor")  # from the slowest links to the fastest
ALIASES = {"data": "fsdp"}
ROWS = ("replica", "fsdp", "expert")  # axes that cut the rows of a batch
WEIGHTS = ("fsdp", "expert", "context")  # axes that cut parameters, gathered for each use
EXPERT_WEIGHTS = ("fsdp", "context")  # the same for an expert's parameters
RULES: dict[str, str | tuple[str, ...]] = {  # axis of a parameter → of the mesh; others are whole
    "vocab": "tensor",
    "model": WEIGHTS,
    "mlp": "tensor",
    "experts": "expert",
    "heads": "tensor",
    "kv_heads": "tensor",
}


def parse_mesh(text: str) -> dict[str, int]:
    """Parse text such as `fsdp:4,tensor:2` into sizes by axis; UserError if it is malformed."""
    axes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition(":")
        axis = ALIASES.get(name, name)
        if axis not in AXES:
            raise unknown("axis of train.mesh", name, (*AXES, *ALIASES))
        if not size.isdecimal() or int(size) < 1 or axis in axes:
            raise UserError(f"train.mesh={text!r} is not like 'fsdp:4,tensor:2'; mend {part!r}")
        axes[axis] = int(size)
    return axes


def mesh_axes(text: str, devices: int) -> dict[str, int]:
    """Return the size of every axis of AXES; empty text puts all `devices` on `fsdp`."""
    return dict.fromkeys(AXES, 1) | (parse_mesh(text) or {"fsdp": devices})


def cuts(
    config: ModelConfig, row: parameters.Row, axes: Mapping[str, int]
) -> list[str | tuple[str, ...] | None]:
    """Return the mesh axes that cut each axis of one parameter, None where none does."""
    sizes = parameters.axis_sizes(config)
    # Whole heads only: half a head on a device would split RoPE's pairs.
    units = sizes | {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    cut = []
    for axis in row.axes:
        target = RULES.get(axis)
        if target == WEIGHTS and "experts" in row.axes:
            target = EXPERT_WEIGHTS
        matrix = len(row.axes) > 1 + row.stacked
        divides = target and units[axis] % _parts(target, axes) == 0
        cut.append(target if divides and matrix else None)
    return cut


def _parts(target: str | tuple[str, ...] | None, axes: Mapping[str, int]) -> int:
    return prod(axes[name] for name in ((target,) if isinstance(target, str) else target or ()))


def share(config: ModelConfig, rows: tuple[parameters.Row, ...], axes: Mapping[str, int]) -> float:
    """Return the fraction of these parameters that one device of a mesh keeps, in (0, 1]."""
    sizes = (
        prod(row.shape) // prod(_parts(target, axes) for target in cuts(config, row, axes))
        for row in rows
    )
    return sum(sizes) / sum(prod(row.shape) for row in rows)


def num_row_shards(axes: Mapping[str, int]) -> int:
    """Return into how many parts a mesh of these axes cuts the rows of a batch."""
    return prod(axes[name] for name in ROWS)


def check_devices(text: str, devices: int) -> None:
    """Raise UserError unless the mesh of `text` has exactly `devices` places."""
    places = prod(mesh_axes(text, devices).values())
    if places != devices:
        count = f"{devices} device{'s' * (devices > 1)}"
        raise UserError(
            f"train.mesh={text!r} has {places} places and there are {count}; make the product "
            "equal, or leave it empty to put all devices on fsdp"
        )


def check_model(text: str, model: ModelConfig) -> None:
    """Raise UserError where `tensor` cannot cut the query heads or MLP, or `expert` the experts."""
    axes = parse_mesh(text)
    tensor, experts = axes.get("tensor", 1), axes.get("expert", 1)
    columns = model.expert_dim or model.mlp_dim
    most = gcd(model.num_heads, columns)
    fitting = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
    refuse((
        (max(model.num_experts, 1) % experts,
         f"train.mesh={text!r}: expert:{experts} does not divide the model's {model.num_experts} "
         f"experts; {'lower it' if model.num_experts else 'use fsdp'}"),
        (most % tensor,
         f"train.mesh={text!r}: tensor:{tensor} does not divide the model's {model.num_heads} "
         f"query heads and {columns} columns of the MLP; use tensor of {fitting}"),
    ))  # fmt: skip


def check_torch(text: str, model: ModelConfig) -> None:
    """Raise UserError for a mesh that trainer=torch does not support, though trainer=jax does."""
    axes = mesh_axes(text, 1)
    cut = {"context": "the tokens of a row", "expert": "experts by themselves"}
    refuse((
        *((axes[axis] > 1,
           f"train.mesh={text!r}: trainer=torch does not cut {what}; use fsdp and tensor in place "
           f"of {axis}, or trainer=jax") for axis, what in cut.items()),
        (model.num_kv_heads % axes["tensor"],
         f"train.mesh={text!r}: tensor:{axes['tensor']} does not divide the model's "
         f"{model.num_kv_heads} key heads; lower it, or use trainer=jax, which copies them"),
    ))  # fmt: skip


def check_rows(text: str, longest: int, buckets: Sequence[int], budget: int) -> None:
    """Raise UserError unless each device of a row gets two equal blocks; see context_attention.

    The `longest` trajectory is in tokens; `buckets` is train.row_buckets, and `budget` is
    train.max_tokens_per_microbatch, of each device.
    """
    context = parse_mesh(text).get("context", 1)
    if longest > context * budget:
        raise UserError(
            f"train.max_tokens_per_microbatch={budget} on each of {context} devices of a row is "
            f"below the longest possible trajectory ({longest} tokens); raise it or lower "
            "sampling.max_new_tokens or data.max_prompt_tokens"
        )
    fitting = [length for length in buckets if length <= context * budget]
    rows = [*fitting, context * budget]  # which pairs, twice as long, may need
    wrong = [length for length in rows if context > 1 and length % (2 * context)]
    if wrong:
        raise UserError(
            f"train.mesh={text!r} cuts a row in {2 * context} equal blocks, and rows of {wrong[0]} "
            f"tokens cannot be; make train.row_buckets multiples of {2 * context}"
            + " and train.max_tokens_per_microbatch even"
            * (wrong[0] not in buckets)
        )
