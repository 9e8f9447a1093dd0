"""Lower the trainer's programs for devices that need not be here, without arrays."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding

from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.model_config import ModelConfig
from rlx.model.packed_attention import compiling_for
from rlx.model.params import Params
from rlx.train import objective
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


@contextmanager
def gpus(target: str, hosts: int, per_host: int) -> Iterator[list[jax.Device]]:
    """Give the devices of GPUs that are not here, for which programs are traced inside.

    `target` is text of XLA's GpuTargetConfigProto, and `hosts` machines have `per_host` GPUs.
    RuntimeError if JAX's CUDA plugin is missing.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x{hosts}x{per_host}"
    )
    with compiling_for(topology.devices[0]):
        yield list(topology.devices)


class Lowered(NamedTuple):
    """A program of a train batch, for XLA to compile."""

    name: str
    program: Any
    beside: int  # bytes of the state on each device that are none of its arguments


def planned_bytes(plan: Any) -> int:
    """Return the bytes of XLA's plan: arguments, temporaries, and results that replace none."""
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + results


class ShapesUpdate(JaxUpdate):
    """A trainer without arrays, whose programs are lowered for the devices of `gpus`."""

    def __init__(self, model: ModelConfig, options: TrainOptions, devices: list[jax.Device]):
        self._devices = devices
        mesh = sharding.make_mesh(options.mesh, devices)
        super().__init__(model, options, mesh=mesh, source=lambda places: places)

    def _load(self, other: Params | None = None) -> Params:
        dtype, shapes = jnp.dtype(self._options.dtype), parameters.shapes(self._base)
        return jax.tree.map(partial(_placed, dtype=dtype), shapes, self._places(self._base))

    def bytes_held(self) -> dict[str, int]:
        """Return the bytes that each device holds between steps: name → bytes."""
        state, frozen = self.abstract_state, self._frozen if self.lora else self._reference
        trees = {"parameters": state.params, "optimizer": state.opt_state, "critic": state.critic}
        trees |= {"reference": state.reference, "frozen": frozen}
        return {name: size for name, tree in trees.items() if (size := _bytes_a_device(tree))}

    def tokens_a_device(self, row_length: int) -> float:
        """Return the tokens of a microbatch for each device."""
        rows = max(self._token_budget // row_length, 1) * self._row_shards
        return rows * row_length / len(self._devices)

    def lowered(
        self, row_length: int, *, accumulates: bool, num_segments: int = 16
    ) -> Iterator[Lowered]:
        """Yield each program that a train batch runs.

        A minibatch that `accumulates` has several microbatches, whose rows have `row_length` tokens
        of `num_segments` trajectories at most.
        """
        total = sum(self.bytes_held().values())

        def entry(name: str, tree: Any, program: Any, *arguments: Any) -> Lowered:
            beside = max(total - _bytes_a_device(tree), 0)  # `tree` has counters too
            return Lowered(name, _lower(program, *arguments), beside)

        home = SingleDeviceSharding(self._devices[0])
        everywhere = self._everywhere() or home
        state = jax.tree.map(lambda leaf: _placed(leaf, leaf.sharding or home), self.abstract_state)
        batch = self._batch(row_length, num_segments)
        scored = {name: batch[name] for name in objective.MODEL_INPUTS if name in batch}
        number, waits = (jax.ShapeDtypeStruct((), kind, sharding=everywhere)
                        for kind in (jnp.float32, jnp.bool_))  # fmt: skip
        algorithm, policy = self._algorithm, state.replace(critic=None)
        networks = [("", self._programs, policy, self._frozen)]
        if algorithm.critic:
            networks.append(("critic ", self._critic_programs, state.critic, None))
        for name, programs, learned, frozen in networks:
            if not accumulates:
                arguments = learned, frozen, batch, number, waits
                yield entry(f"{name}train step", arguments[:2], programs.step, *arguments)
                continue
            inputs = learned.params, frozen, batch
            sums = jax.eval_shape(programs.empty, *inputs)
            sums = jax.tree.map(lambda leaf: _placed(leaf, everywhere), sums)
            grads = jax.tree.map(
                lambda leaf, like: _placed(leaf, like.sharding), sums[0], learned.params
            )
            sums = grads, sums[1]
            yield entry(f"{name}microbatch", inputs[:2], programs.accumulate, sums, *inputs)
            applied = learned, grads, number, waits
            yield entry(f"{name}update", learned, programs.apply, *applied)
        if algorithm.needs_proximal_pass(self._options.minibatches) or algorithm.needs_reference:
            policy = state.params, self._frozen
            yield entry("logprobs", policy, self._logprob_step, *policy, scored)
        if algorithm.critic:
            values = state.critic.params
            yield entry("values", values, self._value_step, values, scored)

    def _batch(self, row_length: int, num_segments: int) -> dict[str, Any]:
        """Return the shapes of a microbatch as `objective.gather` makes it."""
        algorithm = self._algorithm
        rows = max(self._token_budget // row_length, 1) * self._row_shards
        home = SingleDeviceSharding(self._devices[0])
        place = home if self._mesh is None else NamedSharding(self._mesh, sharding.BATCH)
        floats = {
            "advantages": True,
            "loss_weights": True,
            "behaviour_logprobs": True,
            "proximal_logprobs": algorithm.needs_proximal_pass(self._options.minibatches),
            "reference_logprobs": algorithm.needs_reference,
            "values": algorithm.critic,
            "returns": algorithm.critic,
            "clip_bound": algorithm.second_moment_clip,
        }
        kinds = dict.fromkeys((name for name, has in floats.items() if has), jnp.float32)
        kinds |= dict.fromkeys(("tokens", "positions", "segment_ids", "versions"), jnp.int32)
        kinds |= dict.fromkeys(("loss_mask", "sampled"), jnp.bool_)
        batch = {
            name: jax.ShapeDtypeStruct((rows, row_length), kind, sharding=place)
            for name, kind in kinds.items()
        }
        if self._sizes_segments:
            sizes = (rows, num_segments)
            batch["segment_sizes"] = jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=place)
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere() or home)
        return batch | {"target_version": number, "kl_coefficient": number}


def _bytes_a_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _placed(leaf: Any, place: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place)


def lower_on(device: jax.Device, function: Any, donated: tuple[int, ...], arguments: Any) -> Any:
    """Return a function lowered for a device of `gpus`; `arguments` are shapes."""
    arguments = jax.tree.map(partial(_placed, place=SingleDeviceSharding(device)), arguments)
    return _lower(jax.jit(function, donate_argnums=donated), *arguments)


def _lower(program: Any, *arguments: Any) -> Any:
    platform = sharding.target_device().platform.replace("gpu", "cuda")
    return program.trace(*arguments).lower(lowering_platforms=(platform,))
