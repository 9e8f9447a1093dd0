"""Layout of parameters and activations on a mesh of devices.

    replica   cuts rows of the batch; each device has all parameters (for slow links)
    fsdp      cuts rows of the batch, and parameters, which are gathered for each use, their
              gradients scattered back (ZeRO-3, arXiv 1910.02054)
    expert    as fsdp; each device has some experts of a mixture, see experts.py
    context   cuts tokens of a row, see `context_attention`. The devices of a row need the same
              weights, which are cut over `fsdp` and `context` together
    tensor    cuts heads, MLP and vocabulary (Megatron, arXiv 1909.08053), and between blocks the
              tokens of the residual stream (sequence parallelism, arXiv 2205.05198)

`mesh.RULES` place parameters where the axis divides the size. `Layout` constrains activations;
else XLA applies the cut of a weight to them, and reduces all tokens in every layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx.model import mesh as mesh_lib
from rlx.model import params as parameters
from rlx.model.mesh import EXPERT_WEIGHTS, ROWS, WEIGHTS
from rlx.model.model_config import ModelConfig

BATCH = PartitionSpec(ROWS)  # of a batch's arrays; the decoder cuts the tokens
# The device that programs are traced for, where it is not one of this process.
TARGET: ContextVar[Any] = ContextVar("TARGET", default=None)


def target_device() -> jax.Device:
    """Return the device that programs are traced for: of TARGET, else this process's first."""
    return TARGET.get() or jax.local_devices()[0]


def make_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Return the mesh of `text` over `devices`, None: all; or None for one device and no text."""
    count = jax.device_count() if devices is None else len(devices)
    if not mesh_lib.parse_mesh(text) and count == 1:
        return None
    mesh_lib.check_devices(text, count)
    axes = mesh_lib.mesh_axes(text, count)
    # Auto: the compiler shards intermediates; explicit axes would need a sharding at every gather.
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def spec(config: ModelConfig, row: parameters.Row, mesh: Mesh) -> PartitionSpec:
    """Return the partition of one parameter over the mesh."""
    return PartitionSpec(*mesh_lib.cuts(config, row, mesh.shape))


def named_shardings(
    config: ModelConfig, mesh: Mesh, rows: Sequence[parameters.Row] = ()
) -> parameters.Params:
    """Return the pytree of NamedShardings of the parameters, or of other `rows`."""
    rows = rows or parameters.table(config)
    return parameters.build(
        {row.path: NamedSharding(mesh, spec(config, row, mesh)) for row in rows}
    )


@dataclass(frozen=True)
class Placement:
    """Shardings of one weight of one layer; hashable."""

    stored: NamedSharding  # in storage, also of its gradient
    used: NamedSharding  # in use, with WEIGHTS gathered

    @property
    def transposed(self) -> "Placement":
        both = (self.stored, self.used)
        return Placement(*(NamedSharding(x.mesh, PartitionSpec(*reversed(x.spec))) for x in both))


def used(weight: Array, dtype, place: Placement | None) -> Array:
    """Return a weight cast to `dtype`, then gathered over WEIGHTS."""
    weight = weight.astype(dtype)
    if place:
        weight = jax.lax.with_sharding_constraint(weight, place.stored)
    return full(weight, place)


def gradient_as_stored(gradient: Array, place: Placement | None) -> Array:
    """Return a weight's gradient, summed over devices and cut as the weight is stored."""
    # Cutting at once could make XLA send the columns of all tokens; replicas sum only parts.
    if place is None:
        return gradient
    if place.stored.mesh.shape["replica"] == 1:
        gradient = full(gradient, place)
    return jax.lax.with_sharding_constraint(gradient, place.stored)


def full(weight: Array, place: Placement | None) -> Array:
    """Return a weight or its gradient gathered over WEIGHTS."""
    return weight if place is None else jax.lax.with_sharding_constraint(weight, place.used)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scattered_gradient(weight: Array, place: Placement | None) -> Array:
    """Return `weight`, whose gradient is cut as the weight is stored."""
    return weight


scattered_gradient.defvjp(
    lambda weight, place: (weight, None), lambda place, _, grad: (gradient_as_stored(grad, place),)
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_layout(x: Array, target: NamedSharding, back: NamedSharding) -> Array:
    """Return x laid out as `target`, and lay out its gradient as `back`."""
    return jax.lax.with_sharding_constraint(x, target)


_with_layout.defvjp(
    lambda x, target, back: (_with_layout(x, target, back), None),
    lambda target, back, _, grad: (jax.lax.with_sharding_constraint(grad, back),),
)


def row_order(x: Array, devices: int) -> Array:
    """Return an array [B, T, …] laid out by `Layout.balanced` with tokens in their order."""
    blocks = x.reshape(x.shape[0], devices, 2, -1, *x.shape[2:])
    return jnp.stack([blocks[:, :, 0], blocks[:, ::-1, 1]], axis=1).reshape(x.shape)


@dataclass(frozen=True)
class Layout:
    """Constraints on the activations and weights of a decoder; none without a mesh."""

    mesh: Mesh | None = None  # of the axes in AXES; None: one device
    places: Mapping[str, Placement] = field(default_factory=dict)  # by name of a parameter

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh | None, rows: Iterable[parameters.Row]) -> "Layout":
        """Return the layout of a model, with placements of these rows of its tables."""
        if mesh is None:
            return cls()
        places = {}
        for row in rows:
            axes = spec(config, row, mesh)[1 if row.stacked else 0 :]
            weight_axes = WEIGHTS, EXPERT_WEIGHTS
            gathered = PartitionSpec(*(None if axis in weight_axes else axis for axis in axes))
            places[row.path[-1]] = Placement(
                NamedSharding(mesh, PartitionSpec(*axes)), NamedSharding(mesh, gathered)
            )
        return cls(mesh, places)

    @property
    def row_shards(self) -> int:
        """Number of parts into which the rows of a batch are cut."""
        return 1 if self.mesh is None else mesh_lib.num_row_shards(self.mesh.shape)

    @property
    def context(self) -> int:
        """Number of parts into which the tokens of a row are cut."""
        return 1 if self.mesh is None else self.mesh.shape["context"]

    def balanced(self, x: Array) -> Array:
        """Return a batch's array [B, T] with its tokens in the order in which `context` cuts."""
        # Device i of a row has block i and the one as far from the end: equal work.
        if self.context == 1:
            return x
        blocks = x.reshape(x.shape[0], 2, self.context, -1)
        return jnp.stack([blocks[:, 0], blocks[:, 1, ::-1]], axis=2).reshape(x.shape)

    def in_order(self, x: Array) -> Array:
        """Return an array [B, T] laid out by `balanced` with the tokens of a row in their order."""
        if self.context == 1:
            return x
        return row_order(self._laid_out(x, ROWS), self.context)

    def place(self, name: str) -> Placement | None:
        """Return the place of a parameter; None without a mesh."""
        return None if self.mesh is None else self.places[name]

    def stream(self, x: Array) -> Array:
        """Lay out the residual stream [B, T, D]: rows cut, tokens over `context` and `tensor`."""
        # Gradients arrive with all of the device's tokens under `context`.
        if self.mesh is None:
            return x
        return _with_layout(x, self._tokens_cut(x), self._cut(ROWS, "context"))

    def rows(self, x: Array) -> Array:
        """Lay out [B, T, D] for lookups and heads, cut over rows and `context`."""
        return self._laid_out(x, ROWS, "context")

    def tokens(self, x: Array) -> Array:
        """Gather [B, T, D] over `tensor` for a block; gradients are cut as the stream is."""
        if self.mesh is None:
            return x
        return _with_layout(x, self._cut(ROWS, "context"), self._tokens_cut(x))

    def heads(self, x: Array) -> Array:
        """Lay out [B, T, heads, H]: as `tokens`, and heads over `tensor` where it divides them."""
        axis = self.mesh and self.heads_axis(x.shape[2])
        return self._laid_out(x, ROWS, "context", axis)

    def heads_axis(self, count: int) -> str | None:
        """Return the axis of a mesh that cuts `count` heads: `tensor` if it divides them."""
        assert self.mesh is not None
        return "tensor" if count % self.mesh.shape["tensor"] == 0 else None

    def columns(self, x: Array) -> Array:
        """Lay out [B, T, F] inside a block: as `tokens`, and columns over `tensor`."""
        return self._laid_out(x, ROWS, "context", "tensor")

    def flat(self, x: Array) -> Array:
        """Return x [..., D] as a product's rows, [N, D], or [shards, N, D] under `context`."""
        # One axis cannot express that rows and tokens are cut; with two, XLA sums gradients twice.
        return self._split(x) if self.context > 1 else x.reshape(-1, x.shape[-1])

    def unflat(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return the product's rows as [*shape, F]."""
        return self._joined(x, shape) if self.context > 1 else x.reshape(*shape, x.shape[-1])

    def per_shard(
        self, function: Callable[..., Any], weight: Array, place: Placement | None, *arrays: Array
    ) -> Any:
        """Return function(weight, *arrays), computed separately for the tokens of each shard.

        `function` gets parts [N, …], N tokens, of the `arrays` [B, T, …]; its results have these
        shapes too. The weight's gradient is summed and cut, as of its `place`, within a replica,
        and its parts over replicas.
        """
        shape = arrays[0].shape[:2]
        if self.mesh is None:
            out = function(weight, *(x.reshape(-1, *x.shape[2:]) for x in arrays))
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), out)
        replicas = self.mesh.shape["replica"]

        def of_replica(weight: Array, *arrays: Array) -> Any:
            return jax.vmap(partial(function, scattered_gradient(weight, place)))(*arrays)

        copies = jnp.broadcast_to(weight, (replicas, *weight.shape))
        parts = (x.reshape(replicas, -1, *x.shape[1:]) for x in map(self._split, arrays))
        out = jax.vmap(of_replica, spmd_axis_name="replica")(copies, *parts)
        return jax.tree.map(lambda x: self._joined(x.reshape(-1, *x.shape[2:]), shape), out)

    def _split(self, x: Array) -> Array:
        """Return [B, T, …] as [shards, N, …], N tokens of each shard."""
        shards = self.row_shards, self.context
        x = x.reshape(shards[0], -1, shards[1], x.shape[1] // shards[1], *x.shape[2:])
        return self._by_shard(x.swapaxes(1, 2).reshape(prod(shards), -1, *x.shape[4:]))

    def _joined(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return [shards, N, …] as [B, T, …], B and T of `shape`."""
        shards = self.row_shards, self.context
        sizes = (size // cut for size, cut in zip(shape, shards, strict=True))
        x = self._by_shard(x).reshape(*shards, *sizes, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(*shape, *x.shape[4:])

    def _by_shard(self, x: Array) -> Array:
        """Lay out [shards, N, …]; axes after the tokens stay as they are."""
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2)
        return self._laid_out(x, (*ROWS, "context"), None, *others)

    def _laid_out(self, x: Array, *axes: Any) -> Array:
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, self._cut(*axes))

    def _cut(self, *axes) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def _tokens_cut(self, x: Array) -> NamedSharding:
        assert self.mesh is not None
        divides = x.shape[1] % (self.context * self.mesh.shape["tensor"]) == 0
        return self._cut(ROWS, ("context", "tensor") if divides else "context")


ONE_DEVICE = Layout()
