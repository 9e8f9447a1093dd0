"""Rules that map each logical axis of a parameter to a mesh axis.

FSDP-style sharding cuts the model width along `data`; tensor parallelism cuts heads, MLP and
vocabulary along `tensor`. A rule applies only where the mesh has the axis and it divides the size.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx.base import UserError
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig

RULES = {
    "layers": None,
    "vocab": "tensor",
    "values": None,
    "model": "data",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "rank": None,
}
# A batch's rows are cut along `data`; its tokens are not.
BATCH = PartitionSpec("data")


def parse_mesh(text: str) -> dict[str, int]:
    """Parse "data:4,tensor:2" as {"data": 4, "tensor": 2}; empty text is an empty mesh."""
    axes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition(":")
        if name not in ("data", "tensor") or not size.isdigit() or int(size) < 1 or name in axes:
            raise UserError(f"train.mesh={text!r} is not like 'data:4,tensor:2'; mend {part!r}")
        axes[name] = int(size)
    return axes


def make_mesh(text: str) -> Mesh | None:
    """Return the mesh of `text` over all devices, or None for one device and empty text.

    Empty text with several devices puts all of them on `data`.

    Raises:
      UserError: `text` is malformed or its product is not the number of devices.
    """
    axes = parse_mesh(text)
    devices = jax.device_count()
    if not axes:
        if devices == 1:
            return None
        axes = {"data": devices}
    axes = {"data": 1, "tensor": 1} | axes
    if axes["data"] * axes["tensor"] != devices:
        raise UserError(
            f"train.mesh={text!r} has {axes['data'] * axes['tensor']} places, not {devices}; "
            "make the product equal"
        )
    # Auto: the compiler shards intermediates; explicit axes would need a sharding at every gather.
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def spec(config: ModelConfig, row: parameters.Row, mesh: Mesh) -> PartitionSpec:
    """Return the partition of one parameter over the mesh."""
    sizes = parameters.axis_sizes(config)
    # Whole heads only: half a head on a device would split RoPE's pairs.
    units = sizes | {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    cut = []
    for axis in row.axes:
        target = RULES[axis]
        divides = target in mesh.shape and units[axis] % mesh.shape[target] == 0
        cut.append(target if divides and len(row.axes) > 1 + row.stacked else None)
    return PartitionSpec(*cut)


def named_shardings(
    config: ModelConfig, mesh: Mesh, rows: tuple[parameters.Row, ...] | None = None
) -> parameters.Params:
    """Return the pytree of NamedShardings of the parameters, or of other `rows`."""
    rows = parameters.table(config) if rows is None else rows
    return parameters.build(
        {row.path: NamedSharding(mesh, spec(config, row, mesh)) for row in rows}
    )
