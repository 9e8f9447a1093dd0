"""What `train.mesh` says: the axes of a mesh of devices, their sizes, and what they must divide.

replica   rows of the batch are cut; parameters are whole on each (across slow links)
fsdp      rows of the batch are cut, and so are parameters
context   tokens of a row are cut, and so are parameters
tensor    heads, MLP and vocabulary are cut; its devices are neighbours
"""

from collections.abc import Iterable, Mapping
from math import prod

from rlx.base import UserError, unknown
from rlx.model.model_config import ModelConfig

AXES = ("replica", "fsdp", "context", "tensor")  # from the slowest links to the fastest
ALIASES = {"data": "fsdp"}
ROWS = ("replica", "fsdp")  # what cuts the rows of a batch


def parse_mesh(text: str) -> dict[str, int]:
    """Parse "fsdp:4,tensor:2" as {"fsdp": 4, "tensor": 2}; empty text is an empty mesh.

    Raises:
      UserError: an axis is unknown or given twice, or its size is no number of at least 1.
    """
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


def num_row_shards(axes: Mapping[str, int]) -> int:
    """Return into how many parts a mesh of these axes cuts the rows of a batch."""
    return prod(axes[name] for name in ROWS)


def check_devices(text: str, devices: int) -> None:
    """Raise UserError where the mesh of `text` has other than `devices` places."""
    places = prod(mesh_axes(text, devices).values())
    if places != devices:
        found = f"{devices} device{'s' * (devices > 1)}"
        raise UserError(
            f"train.mesh={text!r} has {places} places and there are {found}; make the product "
            "equal, or leave it empty: all devices then are on fsdp"
        )


def check_model(text: str, model: ModelConfig) -> None:
    """Raise UserError where `tensor` cannot cut the model's query heads or its MLP.

    Key and value heads that it does not divide are whole on each of its devices.
    """
    tensor = parse_mesh(text).get("tensor", 1)
    for size, words in ((model.num_heads, "query heads"), (model.mlp_dim, "columns of the MLP")):
        if size % tensor:
            fitting = [n for n in range(1, model.num_heads + 1) if fits_tensor(model, n)]
            raise UserError(
                f"train.mesh={text!r}: tensor:{tensor} does not divide the model's {size} {words}; "
                f"use tensor of {', '.join(map(str, fitting))}"
            )


def fits_tensor(model: ModelConfig, size: int) -> bool:
    """Return whether `tensor` of this size cuts the model's query heads and its MLP evenly."""
    return model.num_heads % size == 0 and model.mlp_dim % size == 0


def check_rows(text: str, lengths: Iterable[int]) -> None:
    """Raise UserError where `context` cannot cut rows of these lengths, each in 2 · context blocks.

    Each device has two blocks of a row, see context_attention.
    """
    blocks = 2 * parse_mesh(text).get("context", 1)
    wrong = [length for length in lengths if blocks > 2 and length % blocks]
    if wrong:
        least = -(-wrong[0] // blocks) * blocks
        raise UserError(
            f"train.mesh={text!r} cuts rows into {blocks} blocks, which does not go with rows of "
            f"{wrong[0]} tokens (train.row_buckets, or else train.max_tokens_per_microbatch × "
            f"context); use {least}"
        )
