"""The trainer in JAX: jitted pure functions under a host loop that never waits for the device.

Shapes: F tokens of the flat axis, N trajectories, B rows of a microbatch, T tokens of a row.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rlx.algorithms import kl, losses
from rlx.base import UserError
from rlx.model import decoder, remat, sharding
from rlx.model import lora as lora_lib
from rlx.model import params as parameters
from rlx.model.attention import attention_kind, tree_error
from rlx.model.buckets import Merge, export
from rlx.model.experts import balance_loss
from rlx.model.kept_programs import KeptPrograms
from rlx.model.model_config import ModelConfig
from rlx.model.ops import compiler_options, on_cpu
from rlx.model.params import Params
from rlx.model.tensors import Buckets
from rlx.train import objective, packing, prefix_trees, state_files, step_metrics
from rlx.train.batch_update import BatchUpdate
from rlx.train.learner import Batch, Critic, Learner, Stats, TrainState, float32, make_optimizer
from rlx.train.train_options import TrainOptions

# Of `prefix_trees.plan`, where attention has a call for each level of forks: of a step of 1.5B
# each takes 1.7 % (experiments/2026-12-shared-prefixes).
FORK_COST = 0.02
RESTING = "pinned_host"  # memory of a state that rests

ParamsSource = Callable[[Params], Params]  # sharding of each parameter → all parameters, so placed


class JaxUpdate(BatchUpdate):
    """The trainer in JAX, an `Update` of rlx/train/contract.py without mutable state.

    Args:
      model_config: the model, without a value head.
      options: of the run.
      source: returns the run's first weights, which are also the frozen policy of KL terms and the
        base of LoRA, which raise UserError without it; called once, here or by `init`. The first
        update deletes these arrays.
      mesh: devices to use; None: made from `options.mesh`.
      programs: folder of compiled programs that later trainers load; None: they compile theirs.

    Attributes:
      abstract_state: shapes, dtypes and shardings of the state, for restoring a checkpoint.
      lora: settings of the adapters, with which `state.params` holds only adapters; or None.
      unrolled: whether the loss has the layers without a loop.
      learner: of the policy or the reward model. critic_learner: of `state.critic`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        options: TrainOptions,
        *,
        source: ParamsSource | None = None,
        mesh: Mesh | None = None,
        programs: str | None = None,
    ):
        self._base, self._source, self.lora = model_config, source, options.lora
        self._with_head = dataclasses.replace(model_config, value_head=True)
        self._mesh: Any = sharding.make_mesh(options.mesh) if mesh is None else mesh
        self._layout = self._laid_out()
        super().__init__(options, self._layout.row_shards, self._layout.context)
        algorithm, settings = self._algorithm, options.optimizer
        self.model = self._with_head if algorithm.kind.scores else model_config
        own_rows = parameters.table(self.model)
        self._rows = lora_lib.table(self.model, self.lora) if self.lora else own_rows
        optimizer = make_optimizer(settings, options.policy_updates)
        self.learner = Learner(self.loss, optimizer, settings.clip_norm)
        settings = dataclasses.replace(settings, learning_rate=options.critic_learning_rate)
        optimizer = make_optimizer(settings, options.total_steps * options.minibatches)
        self.critic_learner = Learner(self.value_loss, optimizer, settings.clip_norm)
        self.unrolled = options.remat in remat.UNROLLED and not on_cpu()
        attention = attention_kind(
            options.compute_dtype, model_config.head_dim, model_config.attention_softcap
        )
        self._sizes_segments = attention == "packed" and self._layout.context == 1
        if self._sizes_segments:
            self._fork_cost = FORK_COST
        else:
            self._tree_cost = self._attention_cost = parameters.attention_cost(
                model_config, sharding.target_device().platform
            )
        self._share_prefixes(self._obstacle(attention))
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
            if not options.reference_moves:
                self._reference = self._load()
        self.abstract_state = self._abstract_state()
        places = self._mesh and jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        leaves = jax.tree.leaves(self.abstract_state)
        self.state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        self.devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
        about = dataclasses.replace(options, seed=0, image_dir=""), self.model, self._mesh
        user_code = algorithm.loss_function or algorithm.advantage_function  # no text has all of it
        self._compile(places, KeptPrograms(None if user_code else programs, about).jit)

    def _obstacle(self, attention: str) -> str:
        """Return why attention of this kind computes no trees here; empty if it does."""
        model, device = self._base, sharding.target_device()
        if self._layout.context > 1:
            return "train.mesh cuts rows over context, where attention has no trees"
        if attention == "mask" or (self._sizes_segments and any(model.layer_windows)):
            return (
                "cuDNN's attention has trees from Hopper on and without sliding windows: others "
                "need model.compute_dtype=float32"
            )
        # Programs for GPUs elsewhere cannot be tried.
        if self._sizes_segments and device.platform == "gpu" and device in jax.local_devices():
            shape = model.num_heads, model.num_kv_heads, model.head_dim
            error = partial(tree_error, *shape, jnp.dtype(self._options.compute_dtype))
            return self._wrong_trees("cuDNN", error)
        return ""

    def _compile(self, places: Any, jit: Callable) -> None:
        """Declare the arguments that each program donates and the shardings of its results."""
        policy, critic, everywhere = places, None, self._everywhere()
        # Committed to the device as restored arrays are: a resumed run finds the same programs.
        home = SingleDeviceSharding(sharding.target_device()) if places is None else places
        self._home: Any = home
        self._params_home: Any = home if places is None else places.params
        if places is not None:
            policy, critic = places.replace(critic=None), places.critic
        self._init = jax.jit(self.first_state, donate_argnums=(0, 1), out_shardings=home)
        o = self._options
        faster = o.compile and o.compute_dtype == "bfloat16"
        compiled: Any = {"compiler_options": compiler_options() if faster else None}
        self._programs = self.learner.compiled(policy, everywhere, jit, **compiled)
        of_critic = partial(jit, name="critic's ")
        self._critic_programs = self.critic_learner.compiled(
            critic, everywhere, of_critic, **compiled
        )
        self._logprob_step = jit(self.logprob_step, **compiled)
        self._value_step = jit(self.value_step, **compiled)
        self._loss = jit(self.loss, **compiled)
        prepare = partial(objective.prepare, algorithm=self._algorithm)
        self._prepare_steps = {
            count: jit(partial(prepare, num_minibatches=count), name=f"prepare {count}")
            for count in (1, o.minibatches)
        }
        self._gather, self._waits = jit(objective.gather), jit(self.policy_waits)
        self._end_batch = jit(self.end_batch, donate_argnums=0, out_shardings=places)
        # Every host gets all scores because it may have to read them.
        self._scatter = jit(_scatter, donate_argnums=0, out_shardings=everywhere)

    # Pure functions, which run on the device.

    def first_state(self, params: Params, critic_params: Params | None = None) -> TrainState:
        """Return the state before the first update; its arrays are those of the parameters."""
        critic = reference = None
        if self._algorithm.critic:
            critic = Critic(
                params=critic_params or {},
                opt_state=self.critic_learner.optimizer.init(float32(critic_params)),
                updates=jnp.zeros((), jnp.int32),
            )
        if self._options.reference_moves:
            # An average's small steps would be rounded away in bfloat16.
            wide = jnp.float32 if self._options.reference_mode == "ema" else None
            reference = jax.tree.map(lambda leaf: jnp.array(leaf, wide or leaf.dtype), params)
        return TrainState(
            params=params,
            opt_state=self.learner.optimizer.init(float32(params)),
            step=jnp.zeros((), jnp.int32),
            updates=jnp.zeros((), jnp.int32),
            kl_coefficient=jnp.float32(self._algorithm.kl_coefficient),
            reference=reference,
            critic=critic,
        )

    def full_params(self, params: Any, frozen: Any) -> Params:
        """Return the decoder's parameters: `params`, or with LoRA `frozen` and any adapters."""
        if self.lora is None:
            return params
        return frozen if params is None else lora_lib.attach(frozen, params, self.lora)

    def _token_logprobs(self, full: Params, batch: Batch, x: Array) -> tuple[Array, Array]:
        o = self._options
        return decoder.logprobs(
            full, self.model, batch, x=x, temperature=o.temperature, chunk=o.chunk,
            scored=batch.get("sampled", batch["loss_mask"]), layout=self._layout,
        )  # fmt: skip

    def _states(
        self, full: Params, model: ModelConfig, batch: Batch, unrolled: bool = False
    ) -> tuple[Array, Any]:
        o, dtype = self._options, jnp.dtype(self._options.compute_dtype)
        return decoder.states(
            full, model, batch, remat=o.remat, compute_dtype=dtype, layout=self._layout,
            unrolled=unrolled,
        )  # fmt: skip

    def logprob_step(self, params: Params | None, frozen: Params | None, batch: Batch) -> Array:
        """Return log-probabilities of a microbatch's tokens, [B, T] float32."""
        full = self.full_params(params, frozen)
        return self._token_logprobs(full, batch, self._states(full, self.model, batch)[0])[0]

    def value_step(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        """Return the critic's V before and after each token, [B, T] float32 each."""
        x, _ = self._states(params, self._with_head, batch)
        after_BT = decoder.values(params, self._with_head, batch, x=x, layout=self._layout)
        return decoder.shift(after_BT, batch["segment_ids"]), after_BT

    def loss(self, params: Params, frozen: Params | None, batch: Batch) -> tuple[Array, Stats]:
        """Return the microbatch's summed loss, with the experts' balance loss; summed stats."""
        full = self.full_params(params, frozen)
        x, routing = self._states(full, self.model, batch, self.unrolled)
        total, stats = objective.loss(
            batch, self._algorithm, logprobs=lambda: self._token_logprobs(full, batch, x),
            scores=lambda: decoder.values(full, self.model, batch, x=x, layout=self._layout),
        )  # fmt: skip
        if routing is None:
            return total, stats
        weight = self._options.balance_coefficient * jnp.sum(batch["loss_weights"])
        balance = weight * balance_loss(routing)
        stats |= dict(zip(step_metrics.ROUTING, routing, strict=True))
        return total + balance, {**stats, "balance_loss": balance}

    def value_loss(self, params: Params, _: Any, batch: Batch) -> tuple[Array, Stats]:
        """Return the critic's summed loss and its summed stats."""
        return losses.value_loss(self.value_step(params, batch)[0], batch, self._algorithm)

    def policy_waits(self, step: Array) -> Array:
        """Return whether the policy waits for its critic at this train batch; bool scalar."""
        return step < self._options.critic_warmup

    def end_batch(
        self, state: TrainState, reference_kl: Array, trained: Array, trajectories: Array
    ) -> TrainState:
        """Return the state after a train batch: the next version, β and reference policy.

        Takes the state after the last minibatch, `reference_kl` summed over trained tokens, nats,
        their number, and that of trajectories.
        """
        o, algorithm, coefficient = self._options, self._algorithm, state.kl_coefficient
        step, reference = state.step + 1, state.reference
        if algorithm.kl_target:
            adapted = kl.adapt(
                coefficient, reference_kl / trained, trajectories,
                target=algorithm.kl_target, horizon=algorithm.kl_horizon,
            )  # fmt: skip
            # The divergence of a policy that stands still says nothing about β.
            coefficient = jnp.where(self.policy_waits(state.step), coefficient, adapted)
        if o.reference_moves:
            keep = jnp.float32(o.reference_decay)
            if o.reference_mode == "copy":
                keep = jnp.where(step % o.reference_every == 0, 0.0, 1.0)
            reference = jax.tree.map(
                lambda old, new: (keep * old + (1.0 - keep) * new).astype(old.dtype),
                reference, state.params,
            )  # fmt: skip
        return state.replace(step=step, kl_coefficient=coefficient, reference=reference)

    # Where arrays live. Without a mesh everything is on the default device.

    def _laid_out(self) -> sharding.Layout:
        """Return the layout of the policy, the critic and the adapters on the mesh."""
        single = dataclasses.replace(self._base, fused=False)  # see lora.attach
        adapters = lora_lib.table(single, self.lora) if self.lora else ()
        rows = (*parameters.table(self._base), *parameters.table(self._with_head), *adapters)
        return sharding.Layout.of(self._base, self._mesh, rows)

    def _everywhere(self) -> Any:
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def _abstract_state(self) -> TrainState:
        """Return the state's shapes, on a mesh with shardings; moments have their parameter's."""
        dtype, mesh = jnp.dtype(self._options.dtype), self._mesh
        trained = parameters.shapes(self.model, "float32" if self.lora else dtype, self._rows)
        critic = parameters.shapes(self._with_head, dtype) if self._algorithm.critic else None
        state = jax.eval_shape(self.first_state, trained, critic)
        rows = {row.path[-1]: row for row in (*parameters.table(self._with_head), *self._rows)}

        def placed(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            row = rows.get(getattr(path[-1], "key", ""))
            spec = PartitionSpec() if row is None else sharding.spec(self.model, row, mesh)
            return leaf.update(sharding=NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(placed, state) if mesh else state

    def _places(self, model: ModelConfig) -> Params:
        if self._mesh is not None:
            return sharding.named_shardings(model, self._mesh)
        home = SingleDeviceSharding(sharding.target_device())
        return jax.tree.map(lambda _: home, parameters.shapes(model))

    def _load(self, other: Params | None = None) -> Params:
        """Return the source's weights, or a copy of `other` ones, in the run's dtype and places."""
        places, dtype = self._places(self._base), jnp.dtype(self._options.dtype)
        params = other or (self._source and self._source(places))
        assert params, "params or a source of them"
        copied = jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=bool(other)), params)
        return jax.device_put(copied, places)

    def _device_put(self, arrays: Any, spec: PartitionSpec) -> Any:
        if self._mesh is None:
            return jax.device_put(arrays)
        place = NamedSharding(self._mesh, spec)
        if place.is_fully_addressable:
            return jax.device_put(arrays, place)
        # Each host has the whole batch; device_put would send it around to compare.
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, place, lambda index: x[index]), arrays
        )

    # The parameters.

    def init(self, params: Params | None = None) -> TrainState:
        """Return the state before the first update, with a copy of params, or those of `source`.

        A critic or reward model begins as a copy of them with a value head of zeros. With LoRA the
        state begins with adapters that add nothing, and params are ignored.
        """
        model, critic = self._base, None
        if self.lora:
            mesh = self._mesh
            places = sharding.named_shardings(model, mesh, self._rows) if mesh else None
            make = jax.jit(partial(lora_lib.init, model, self.lora), out_shardings=places)
            return self._init(make(jax.random.key(self._options.seed)), None)
        params = self._load(params)
        if self._algorithm.critic:
            critic = self._valued(jax.tree.map(jnp.copy, params))
        if self.model.value_head and not model.value_head:
            params = self._valued(params)
        return self._init(params, critic)

    def rest(self, state: TrainState) -> TrainState:
        """Return `state`, which is donated, in the host's memory; all calls take it there too."""
        places = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(RESTING), state)
        resting = jax.block_until_ready(jax.device_put(state, places))
        for leaf, moved in zip(jax.tree.leaves(state), jax.tree.leaves(resting), strict=True):
            if moved is not leaf:
                leaf.delete()  # others may still refer to it
        return resting

    def _here(self, tree: Any, places: Any) -> Any:
        """Return `tree` on the devices, a copy if it rests."""
        rests = jax.tree.leaves(tree)[0].sharding.memory_kind == RESTING
        return jax.device_put(tree, places) if rests else tree

    def _valued(self, params: Params) -> Params:
        valued, model = parameters.with_value_head(params, self._base)
        return jax.device_put(valued, self._places(model))

    def weights(self, state: TrainState, adapters: bool = False) -> Buckets:
        assert self.lora or not adapters, "a run without adapters has none to give"
        params, dtype = self._policy(state), "float32" if adapters else self._options.publish_dtype
        if self.lora and not adapters:
            merge, rows = Merge(params, self.lora), parameters.table(self._base)
            return export(self._frozen, rows, dtype, merge=merge, mesh=self._mesh)
        return export(params, self._rows, dtype, mesh=self._mesh)

    # The state as a whole.

    def restore(self, path: Path) -> TrainState:
        return state_files.read(path, self.abstract_state)

    def save(self, path: Path, state: TrainState) -> Future[None]:
        return state_files.begin(path, state)

    # One batch.

    def update(self, state: TrainState, groups: Any) -> tuple[TrainState, Any]:
        return super().update(self._here(state, self._home), groups)

    def evaluate(self, state: TrainState, groups: Any) -> dict[str, float]:
        return super().evaluate(self._here(state, self._home), groups)

    _to_host = staticmethod(jax.device_get)

    def _put(self, arrays: Any) -> Any:
        return dict(self._device_put(arrays, PartitionSpec()))

    def _put_rows(self, microbatch: Any) -> Any:
        if self._sizes_segments:
            is_tree = "tree_tokens" in microbatch
            ids = prefix_trees.chains(microbatch) if is_tree else microbatch["segment_ids"]
            microbatch["segment_sizes"] = packing.segment_sizes(ids)
        return self._device_put(microbatch, sharding.BATCH)

    def _policy(self, state: TrainState) -> Params:
        return self._here(state.params, self._params_home)

    def _logprobs_of(self, policy: Any, batch: Any) -> Any:
        return self._logprob_step(policy, self._frozen, _model_inputs(batch))

    def _values_of(self, critic: Critic, batch: Any) -> tuple[Any, Any]:
        return self._value_step(critic.params, _model_inputs(batch))

    def _prepare(self, state: TrainState, flat: Any, minibatch_of: Any, count: int) -> tuple:
        args = flat, minibatch_of, state.step, state.kl_coefficient
        return self._prepare_steps[count](*args)

    def _learn(
        self, state: TrainState, inputs: Any, denominator: Any, wait: Any, critic: bool = False
    ) -> tuple[TrainState, Stats]:
        programs, frozen = self._programs, self._frozen
        learned: Any = state.replace(critic=None)
        if critic:
            programs, learned, frozen = self._critic_programs, state.critic, None
        if len(inputs) == 1:
            learned, stats = programs.step(learned, frozen, inputs[0], denominator, wait)
        else:
            sums = programs.empty(learned.params, frozen, inputs[0])
            for batch in inputs:
                sums = programs.accumulate(sums, learned.params, frozen, batch)
            grads, stats = sums
            learned, applied = programs.apply(learned, grads, denominator, wait)
            stats = {**stats, **applied}
        if critic:
            return state.replace(critic=learned), stats
        return learned.replace(critic=state.critic), stats

    def _stats(self, state: TrainState, inputs: Any) -> Any:
        return self._loss(state.params, self._frozen, inputs)[1]


def _scatter(flat_F: Array, flat_index_BT: Array, values_BT: Array) -> Array:
    """Return flat_F with values_BT at flat_index_BT; an index beyond F is padding."""
    return flat_F.at[flat_index_BT].set(values_BT, mode="drop")


def _model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in objective.MODEL_INPUTS if name in batch}
