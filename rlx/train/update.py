"""The trainer in JAX: a thin host loop over jitted steps.

The host only arranges arrays and dispatches; nothing here waits for the device.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rlx.base import UserError
from rlx.model import lora as lora_lib
from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.attention import attention_kind
from rlx.model.buckets import Merge, export
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.model.tensors import Buckets
from rlx.train import objective, packing, state_files, steps
from rlx.train.batch_update import BatchUpdate
from rlx.train.steps import Critic, Steps, TrainState
from rlx.train.train_options import TrainOptions

ParamsSource = Callable[[Params], Params]  # where each parameter goes → all of them, there


class JaxUpdate(BatchUpdate):
    """The trainer in JAX: jitted steps and where arrays go; holds nothing that changes.

    It is an `Update` as rlx/train/contract.py has it.

    Args:
      model_config: the model.
      options: of the run.
      source: gives the weights that the run begins with and hands them over: the first update
        deletes these arrays, so give a copy of what you keep. They are the frozen policy of KL
        terms too, and what LoRA's adapters are added to; called when one of these is made.
      mesh: devices to use; made from `options.mesh` when None.

    Attributes:
      abstract_state: shapes, dtypes and shardings of the state, for restoring a checkpoint.
      lora: of the adapters, which then are all that `state.params` holds; None without.

    Raises:
      UserError: the algorithm needs a reference policy, or adapters a base, and there is none.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        options: TrainOptions,
        *,
        source: ParamsSource | None = None,
        mesh: Mesh | None = None,
    ):
        self._base, self._source, self.lora = model_config, source, options.lora
        self._mesh: Any = sharding.make_mesh(options.mesh) if mesh is None else mesh
        self._layout = self._laid_out()
        super().__init__(options, self._layout.row_shards, self._layout.context)
        algorithm = self._algorithm
        self._steps = s = Steps(model_config, options, self._layout)
        self.model = s.model
        how = attention_kind(
            options.compute_dtype, model_config.head_dim, model_config.attention_softcap
        )
        self._sizes_segments = how == "packed" and self._layout.context == 1
        if not self._sizes_segments:
            self._attention_cost = parameters.attention_cost(model_config, jax.default_backend())
        self._frozen: Any = None
        if self.lora:
            if source is None:
                raise UserError("lora.rank without a base; give a source of its weights")
            self._frozen = self._load()
        elif algorithm.needs_reference:
            if source is None:
                raise UserError(
                    f"algorithm {algorithm.name} with kl_placement={algorithm.kl_placement} needs "
                    "a reference policy and there is none; give a source of its weights or set "
                    "algorithm.kl_placement=none"
                )
            if not s.follows:
                self._reference = self._load()
        places = self._state_shardings()
        self.abstract_state = self._abstract_state(places)
        leaves = jax.tree.leaves(self.abstract_state)
        self.state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        self.devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
        self._compile(places)

    def _compile(self, places: Any) -> None:
        """Say what each program gives up and where its results stay; compile at the first call."""
        s, policy, critic = self._steps, places, None
        # Committed to the device as restored arrays are: a resumed run finds the same programs.
        home = SingleDeviceSharding(jax.devices()[0]) if places is None else places
        if places is not None:
            policy, critic = places.replace(critic=None), places.critic
        everywhere = self._everywhere()
        self._init = jax.jit(s.init, donate_argnums=(0, 1), out_shardings=home)
        self._learn_policy = s.learner.compiled(policy, everywhere)
        if self._algorithm.critic:
            self._learn_critic = s.critic_learner.compiled(critic, everywhere)
        self._logprob_step, self._value_step = jax.jit(s.logprob_step), jax.jit(s.value_step)
        self._loss = jax.jit(s.loss)
        self._prepare_step = jax.jit(objective.prepare, static_argnums=(4, 5))
        self._gather, self._waits = jax.jit(objective.gather), jax.jit(s.waits)
        self._end_batch = jax.jit(s.end_batch, donate_argnums=0, out_shardings=places)
        # Every host has all scores: it may have to read them.
        self._scatter = jax.jit(steps.scatter, donate_argnums=0, out_shardings=everywhere)

    # Where arrays live. Without a mesh everything is on the default device.

    def _laid_out(self) -> sharding.Layout:
        """Return the layout of the policy, the critic and the adapters on the mesh."""
        valued = dataclasses.replace(self._base, value_head=True)
        single = dataclasses.replace(self._base, fused=False)  # see lora.attach
        adapters = lora_lib.table(single, self.lora) if self.lora else ()
        rows = (*parameters.table(self._base), *parameters.table(valued), *adapters)
        return sharding.Layout.of(self._base, self._mesh, rows)

    def _everywhere(self) -> Any:
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def _learned_shardings(self, model: ModelConfig, optimizer, rows=None) -> tuple[Any, Any]:
        """Return shardings of what is trained (adapters by their table, `rows`) and its moments."""
        params = sharding.named_shardings(model, self._mesh, rows)
        shapes = parameters.shapes(model)
        if self.lora and rows:
            shapes = lora_lib.shapes(model, self.lora)
        moments = optax.tree.map_params(
            optimizer,
            lambda _, place: place,
            jax.eval_shape(optimizer.init, shapes),
            params,
            transform_non_params=lambda _: self._everywhere(),
        )
        return params, moments

    def _state_shardings(self) -> Any:
        if self._mesh is None:
            return None
        s, everywhere = self._steps, self._everywhere()
        rows = lora_lib.table(s.model, self.lora) if self.lora else None
        params, moments = self._learned_shardings(s.model, s.learner.optimizer, rows)
        critic = None
        if s.critic_model is not None:
            own = self._learned_shardings(s.critic_model, s.critic_learner.optimizer)
            critic = Critic(params=own[0], opt_state=own[1], updates=everywhere)
        return TrainState(
            params=params,
            opt_state=moments,
            step=everywhere,
            updates=everywhere,
            kl_coefficient=everywhere,
            reference=params if s.follows else None,
            critic=critic,
        )

    def _abstract_state(self, places: Any) -> TrainState:
        def placed(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        state = self._steps.abstract()
        return state if places is None else jax.tree.map(placed, state, places)

    def _places(self, model: ModelConfig) -> Params:
        """Return the sharding of each parameter of a model."""
        if self._mesh is not None:
            return sharding.named_shardings(model, self._mesh)
        home = SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: home, parameters.shapes(model))

    def _load(self, given: Params | None = None) -> Params:
        """Return the source's weights, each device's slices read by itself, or a copy of others."""
        places, dtype = self._places(self._base), jnp.dtype(self._options.dtype)
        params = given or (self._source and self._source(places))
        assert params, "params or a source of them"
        copied = jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=bool(given)), params)
        return jax.device_put(copied, places)

    def _device_put(self, arrays: Any, spec: PartitionSpec) -> Any:
        if self._mesh is None:
            return jax.device_put(arrays)
        place = NamedSharding(self._mesh, spec)
        if place.is_fully_addressable:
            return jax.device_put(arrays, place)
        # Each host has the whole batch; device_put would send it round to see that they agree.
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, place, lambda index: x[index]), arrays
        )

    # The parameters.

    def init(self, params: Params | None = None) -> TrainState:
        """Return the state before the first update, with a copy of params, or those of `source`.

        A critic begins as a copy of them, a reward model is one, both with a value head of zeros.
        With LoRA the state begins with adapters that add nothing, and params are not looked at.
        """
        model, critic = self._base, None
        if self.lora:
            rows = lora_lib.table(model, self.lora)
            places = None
            if self._mesh is not None:
                places = sharding.named_shardings(model, self._mesh, rows)
            make = jax.jit(partial(lora_lib.init, model, self.lora), out_shardings=places)
            return self._init(make(jax.random.key(self._options.seed)), None)
        params = self._load(params)
        if self._algorithm.critic:
            critic = self._valued(jax.tree.map(jnp.copy, params))
        if self.model.value_head and not model.value_head:
            params = self._valued(params)
        return self._init(params, critic)

    def _valued(self, params: Params) -> Params:
        valued, model = parameters.with_value_head(params, self._base)
        return jax.device_put(valued, self._places(model))

    def weights(self, state: TrainState, adapters: bool = False) -> Buckets:
        """Return the policy's tensors, as the device computes them; see the contract."""
        if adapters:
            assert self.lora, "a run without adapters has none to give"
            rows = lora_lib.table(self._base, self.lora)
            return export(state.params, rows, "float32", mesh=self._mesh)
        rows, dtype = parameters.table(self.model), self._options.publish_dtype
        if self.lora:
            merge = Merge(state.params, self.lora)
            return export(self._frozen, rows, dtype, merge=merge, mesh=self._mesh)
        return export(state.params, rows, dtype, mesh=self._mesh)

    # The state as a whole.

    def restore(self, path: Path) -> TrainState:
        """Return the state of a checkpoint; UserError where it belongs to another model."""
        return state_files.read(path, self.abstract_state)

    def save(self, path: Path, state: TrainState) -> Future[None]:
        """Begin to write the state to `path`, for `restore`; see the contract."""
        return state_files.begin(path, state)

    # One batch.

    _to_host = staticmethod(jax.device_get)

    def _put(self, arrays: Any) -> Any:
        return dict(self._device_put(arrays, PartitionSpec()))

    def _put_rows(self, microbatch: Any) -> Any:
        if self._sizes_segments:
            microbatch["segment_sizes"] = packing.segment_sizes(microbatch["segment_ids"])
        return self._device_put(microbatch, sharding.BATCH)

    def _policy(self, state: TrainState) -> Params:
        return state.params

    def _logprobs_of(self, policy: Any, batch: Any) -> Any:
        return self._logprob_step(policy, self._frozen, _model_inputs(batch))

    def _values_of(self, critic: Critic, batch: Any) -> tuple[Any, Any]:
        return self._value_step(critic.params, _model_inputs(batch))

    def _prepare(self, state: TrainState, flat: Any, minibatch_of: Any, count: int) -> tuple:
        given = flat, minibatch_of, state.step, state.kl_coefficient
        return self._prepare_step(*given, count, self._algorithm)

    def _learn(self, state: TrainState, inputs: Any, denominator: Any, waits: Any) -> tuple:
        learned = state.replace(critic=None)
        learned, stats = self._learn_policy(learned, self._frozen, inputs, denominator, waits)
        return learned.replace(critic=state.critic), stats

    def _learn_values(self, state: TrainState, inputs: Any, tokens: Any) -> tuple:
        given = state.critic, None, inputs, tokens, np.bool_(False)
        critic, stats = self._learn_critic(*given)
        return state.replace(critic=critic), stats

    def _stats(self, state: TrainState, inputs: Any) -> Any:
        return self._loss(state.params, self._frozen, inputs)[1]


def _model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in objective.MODEL_INPUTS if name in batch}
