"""Layout of parameters and activations on a mesh of devices.

    replica   rows of the batch are cut; parameters are whole on each (across slow links)
    fsdp      rows of the batch are cut, and so are parameters, which are gathered where they are
              used and whose gradients are scattered back (ZeRO-3, arXiv 1910.02054)
    tensor    heads, MLP and vocabulary are cut (Megatron, arXiv 1909.08053); between the blocks the
              tokens of the residual stream are (sequence parallelism, arXiv 2205.05198)

Parameters follow from RULES, which apply only where the axis divides the size. Activations follow
from the constraints of `Layout`: without them XLA's partitioner spreads the cut of a weight over
the activations, and reduces the tokens of all rows over all devices in every layer.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlx.base import UserError, unknown
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig

AXES = ("replica", "fsdp", "tensor")
ALIASES = {"data": "fsdp"}
ROWS = ("replica", "fsdp")  # what cuts the rows of a batch; its tokens are not cut
BATCH = PartitionSpec(ROWS)
RULES = {
    "layers": None,
    "vocab": "tensor",
    "values": None,
    "model": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "rank": None,
}


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
    return axes["replica"] * axes["fsdp"]


def make_mesh(text: str) -> Mesh | None:
    """Return the mesh of `text` over all devices, or None for one device and empty text.

    Raises:
      UserError: `text` is malformed or its product is not the number of devices.
    """
    devices = jax.device_count()
    if not parse_mesh(text) and devices == 1:
        return None
    axes = mesh_axes(text, devices)
    places = num_row_shards(axes) * axes["tensor"]
    if places != devices:
        raise UserError(
            f"train.mesh={text!r} has {places} places, not {devices}; make the product equal"
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


def share(config: ModelConfig, rows: tuple[parameters.Row, ...], axes: Mapping[str, int]) -> float:
    """Return which part of these parameters one device of a mesh keeps, in (0, 1]."""
    mesh: Any = AbstractMesh(tuple(axes.values()), tuple(axes))
    cut = (NamedSharding(mesh, spec(config, row, mesh)).shard_shape(row.shape) for row in rows)
    return sum(map(math.prod, cut)) / sum(math.prod(row.shape) for row in rows)


@dataclass(frozen=True)
class Placement:
    """Where one weight, of one layer, stays and where it is used; hashable.

    Attributes:
      own: as it is stored, and where its gradient goes.
      used: the same with `fsdp` gathered.
    """

    own: NamedSharding
    used: NamedSharding

    @property
    def own_transposed(self) -> NamedSharding:
        """The stored cut of the transposed matrix."""
        return NamedSharding(self.own.mesh, PartitionSpec(*reversed(self.own.spec)))


def stored(weight: Array, place: Placement | None) -> Array:
    """Return a weight or its gradient, cut as the weight is stored."""
    return weight if place is None else jax.lax.with_sharding_constraint(weight, place.own)


def whole(weight: Array, place: Placement | None) -> Array:
    """Return a weight or its gradient with what `fsdp` cuts in one piece."""
    return weight if place is None else jax.lax.with_sharding_constraint(weight, place.used)


def used(weight: Array, dtype, place: Placement | None) -> Array:
    """Return a weight in `dtype`, gathered over `fsdp`; what travels is already cast."""
    return whole(stored(weight.astype(dtype), place), place)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scattered_gradient(weight: Array, place: Placement | None) -> Array:
    """Return `weight`, whose gradient is cut as the weight is stored."""
    return weight


scattered_gradient.defvjp(
    lambda weight, place: (weight, None), lambda place, _, grad: (stored(grad, place),)
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: Array, there: NamedSharding, back: NamedSharding) -> Array:
    """Return x laid out as `there`; its gradient is laid out as `back`."""
    return jax.lax.with_sharding_constraint(x, there)


_moved.defvjp(
    lambda x, there, back: (_moved(x, there, back), None),
    lambda there, back, _, grad: (jax.lax.with_sharding_constraint(grad, back),),
)


@dataclass(frozen=True)
class Layout:
    """Constraints on the activations and weights of a decoder; without a mesh it changes nothing.

    Attributes:
      mesh: of the axes in AXES; None: one device.
      places: name of a parameter → its place.
    """

    mesh: Mesh | None = None
    places: Mapping[str, Placement] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh | None, rows: Iterable[parameters.Row]) -> "Layout":
        """Return the layout of a model, with the places of these rows of its tables."""
        if mesh is None:
            return cls()
        places = {}
        for row in rows:
            own = spec(config, row, mesh)[1 if row.stacked else 0 :]
            gathered = PartitionSpec(*(None if axis == "fsdp" else axis for axis in own))
            places[row.path[-1]] = Placement(
                NamedSharding(mesh, PartitionSpec(*own)), NamedSharding(mesh, gathered)
            )
        return cls(mesh, places)

    @property
    def row_shards(self) -> int:
        """Into how many parts the rows of a batch are cut."""
        return 1 if self.mesh is None else num_row_shards(self.mesh.shape)

    def place(self, name: str) -> Placement | None:
        """Return the place of a parameter; None without a mesh."""
        return None if self.mesh is None else self.places[name]

    def stream(self, x: Array) -> Array:
        """Lay out the residual stream [B, T, D]: rows cut, and tokens over `tensor` if they can be.

        Gradients arrive with all tokens of a row, as the products before them need them.
        """
        if self.mesh is None:
            return x
        return _moved(x, self._tokens_cut(x), self._cut(ROWS))

    def tokens(self, x: Array) -> Array:
        """Gather the tokens of rows [B, T, D] for a block; gradients are cut as the stream is."""
        if self.mesh is None:
            return x
        return _moved(x, self._cut(ROWS), self._tokens_cut(x))

    def heads(self, x: Array) -> Array:
        """Lay out [B, T, heads, H]: rows cut, and heads over `tensor` where it divides them."""
        if self.mesh is None:
            return x
        cut = "tensor" if x.shape[2] % self.mesh.shape["tensor"] == 0 else None
        return jax.lax.with_sharding_constraint(x, self._cut(ROWS, None, cut))

    def columns(self, x: Array) -> Array:
        """Lay out [B, T, F] inside a block: rows cut, columns over `tensor`."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, self._cut(ROWS, None, "tensor"))

    def per_row_shard(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """Return function(*arrays) with the tokens of each row shard by themselves.

        Args:
          function: of arrays [N, …], N tokens, to a pytree of [N] arrays.
          arrays: [B, T, …] each.

        Returns:
          the pytree, of [B, T] arrays.
        """
        shape = arrays[0].shape[:2]
        if self.mesh is None:
            out = function(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        else:
            cut = (x.reshape(self.row_shards, -1, *x.shape[2:]) for x in arrays)
            placed = (jax.lax.with_sharding_constraint(x, self._cut(ROWS)) for x in cut)
            out = jax.vmap(function)(*placed)
        return jax.tree.map(lambda x: x.reshape(shape), out)

    def _cut(self, *axes) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def _tokens_cut(self, x: Array) -> NamedSharding:
        assert self.mesh is not None
        divides = x.shape[1] % self.mesh.shape["tensor"] == 0
        return self._cut(ROWS, "tensor" if divides else None)


ONE_DEVICE = Layout()
