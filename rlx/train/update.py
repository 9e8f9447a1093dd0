"""One train batch: groups in, the next policy out. A thin host loop over jitted steps.

    groups ─▶ flatten ─▶ plan, pack ─▶ (proximal, reference logprobs; values) ─▶ advantages, loss
           weights ─▶ for each minibatch: microbatch gradients ─▶ one optimizer update (and one of
           the critic) ─▶ end of the batch

The host only arranges arrays and dispatches; nothing here waits for the device. SFT, reward models
and DPO come the same way: what differs is the row of the preset table.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rlx.algorithms import losses
from rlx.base import Group, UserError
from rlx.model import lora as lora_lib
from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.attention import attention_kind
from rlx.model.buckets import Merge, export
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.model.tensors import Buckets
from rlx.train import objective, packing, state_files, step_metrics, steps
from rlx.train.optimizer_options import rate_at
from rlx.train.step_metrics import Metrics
from rlx.train.steps import Critic, Steps, TrainState
from rlx.train.train_options import TrainOptions

ParamsSource = Callable[[Params], Params]  # where each parameter goes → all of them, there


class JaxUpdate:
    """The trainer in JAX: jitted steps and where arrays go; holds nothing that changes.

    It is an `Update` as rlx/train/contract.py has it.

    Args:
      model_config: the model.
      options: of the run.
      source: gives the weights that the run begins with, which are the frozen policy of KL terms
        too, and what LoRA's adapters are added to; called when one of these is made, whose memory
        is that of what it gives.
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
        self._options, self._base, self._source = options, model_config, source
        self._algorithm = algorithm = options.algorithm
        self.lora = options.lora
        self._mesh: Any = sharding.make_mesh(options.mesh) if mesh is None else mesh
        self._layout = self._laid_out()
        self._steps = s = Steps(model_config, options, self._layout)
        self.model = s.model
        self._rate_at = partial(rate_at, options.optimizer, options.policy_updates, lib=np)
        how = attention_kind(options.compute_dtype, model_config.head_dim)
        self._sizes_segments = how == "packed" and self._layout.context == 1
        self._attention_cost = 0.0  # of what looks at each segment alone
        if not self._sizes_segments:
            self._attention_cost = parameters.attention_cost(model_config, jax.default_backend())
        self._frozen: Any = None
        self._reference: Any = None  # stays so with LoRA: the base without adapters
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
        self._learn = s.learner.compiled(policy, everywhere)
        if self._algorithm.critic:
            self._learn_values = s.critic_learner.compiled(critic, everywhere)
        self._logprob_step, self._value_step = jax.jit(s.logprob_step), jax.jit(s.value_step)
        self._loss = jax.jit(s.loss)
        self._prepare = jax.jit(objective.prepare, static_argnums=(4, 5))
        self._gather, self._waits = jax.jit(objective.gather), jax.jit(s.waits)
        self._end_batch = jax.jit(s.end_batch, donate_argnums=0, out_shardings=places)
        # Every host has all scores: it may have to read them.
        self._scatter = jax.jit(steps.scatter, donate_argnums=0, out_shardings=everywhere)

    # Where arrays live. Without a mesh everything is on the default device.

    def _laid_out(self) -> sharding.Layout:
        """Return the layout of the policy, the critic and the adapters on the mesh."""
        valued = dataclasses.replace(self._base, value_head=True)
        adapters = lora_lib.table(self._base, self.lora) if self.lora else ()
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
        dtype, s = jnp.dtype(self._options.dtype), self._steps
        trained = lora_lib.shapes(s.model, self.lora) if self.lora else None
        critic = s.critic_model and parameters.shapes(s.critic_model, dtype)
        state = jax.eval_shape(s.init, trained or parameters.shapes(s.model, dtype), critic)
        if places is None:
            return state
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state,
            places,
        )

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

    def _put(self, arrays: Any, spec: PartitionSpec) -> Any:
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
        """Return the state of a checkpoint; UserError where it is of another model."""
        return state_files.read(path, self.abstract_state)

    def save(self, path: Path, state: TrainState) -> Future[None]:
        """Begin to write the state to `path`, for `restore`; see the contract."""
        return state_files.begin(path, state)

    # One batch.

    def _pack(
        self, flat: packing.FlatBatch, ids: np.ndarray
    ) -> tuple[packing.PackPlan, list[dict[str, Any]]]:
        """Return the plan and the device's microbatches of some sequences."""
        plan = packing.plan(
            flat.sizes[ids],
            self._options.token_budget * self._layout.context,
            self._options.row_buckets,
            attention_cost=self._attention_cost,
            shards=self._layout.row_shards,
            together=flat.pairs(ids) if self._algorithm.data == "pairs" else None,
        )
        parts = packing.microbatches(flat, ids, plan)
        if self._sizes_segments:
            for part in parts:
                part["segment_sizes"] = packing.segment_sizes(part["segment_ids"])
        return plan, [self._put(part, sharding.BATCH) for part in parts]

    def _score(self, params: Any, batches: Sequence[dict], size: int) -> Any:
        """Return log-probabilities under `params` of all the microbatches' tokens, [F] float32."""
        scores_F = self._put(np.zeros(size, np.float32), PartitionSpec())
        for batch in batches:
            scores_BT = self._logprob_step(params, self._frozen, _model_inputs(batch))
            scores_F = self._scatter(scores_F, batch["flat_index"], scores_BT)
        return scores_F

    def _values(self, critic: Critic, batches: Sequence[dict], size: int) -> tuple[Any, Any]:
        """Return the critic's V before and after each token, [F] float32 each."""
        zeros = np.zeros(size, np.float32)
        before_F, after_F = (self._put(zeros, PartitionSpec()) for _ in range(2))
        for batch in batches:
            before_BT, after_BT = self._value_step(critic.params, _model_inputs(batch))
            before_F = self._scatter(before_F, batch["flat_index"], before_BT)
            after_F = self._scatter(after_F, batch["flat_index"], after_BT)
        return before_F, after_F

    def _begin(self, state: TrainState, groups: Sequence[Group], minibatches: int) -> tuple:
        """Pack groups, ask other networks about their tokens, and compute what the loss needs.

        Returns:
          The flat batch; of each minibatch the plan and the microbatches; what `prepare` has.
        """
        flat = packing.flatten(groups)
        objective.require(groups, flat, self._algorithm)
        parts = packing.minibatch_ids(flat, minibatches)
        plans, packed = zip(*(self._pack(flat, ids) for ids in parts), strict=True)
        minibatch_of = np.full(len(flat.sequences["valid"]), -1, np.int32)
        for index, ids in enumerate(parts):
            minibatch_of[ids] = index
        batches, size = [b for part in packed for b in part], len(flat.tokens["tokens"])
        arrays = dict(self._put(flat.arrays(), PartitionSpec()))
        if self._algorithm.needs_proximal_pass(len(parts)):
            arrays["proximal_logprobs"] = self._score(state.params, batches, size)
        if self._algorithm.needs_reference:
            reference = state.reference if self._steps.follows else self._reference
            arrays["reference_logprobs"] = self._score(reference, batches, size)
        if state.critic is not None:
            arrays["values"], arrays["values_after"] = self._values(state.critic, batches, size)
        scalars = state.step, state.kl_coefficient
        given = arrays, minibatch_of, *scalars, len(parts), self._algorithm
        return flat, plans, packed, self._prepare(*given)

    def _minibatch(self, state, batches, divisors, waits) -> tuple[TrainState, dict[str, Any]]:
        """Make one minibatch's update of the policy, and that of its critic."""
        denominator, tokens = divisors
        critic = state.critic
        state, stats = self._learn(
            state.replace(critic=None), self._frozen, batches, denominator, waits
        )
        if critic is not None:
            critic, more = self._learn_values(critic, None, batches, tokens, np.bool_(False))
            del more["updates"]
            own = ("grad_norm", "skipped_updates")
            stats |= {f"critic_{k}" if k in own else k: value for k, value in more.items()}
        return state.replace(critic=critic), stats

    def update(self, state: TrainState, groups: Sequence[Group]) -> tuple[TrainState, Metrics]:
        """Train on a batch of groups; return the new state and lazy `Metrics`; see the contract.

        Raises:
          UserError, ValueError: the groups lack what the algorithm is trained on.
        """
        flat, plans, packed, prepared = self._begin(state, groups, self._options.minibatches)
        per_token, divisors, sums = prepared
        waits, results = self._waits(state.step), []
        for index, batches in enumerate(packed):
            progress = np.float32(index / len(packed))
            inputs = [self._gather(per_token, b, sums, progress) for b in batches]
            state, stats = self._minibatch(state, inputs, divisors[index], waits)
            results.append(stats)
        state = self._end_batch(
            state,
            sum(stats.get("reference_kl", 0.0) for stats in results),
            sum(stats["n_valid_tokens"] for stats in results),
            np.float32(flat.num_sequences),
        )
        known = step_metrics.host_metrics(groups, flat, plans)
        versions = step_metrics.count_versions(flat)
        denominators = [denominator for denominator, _ in divisors]

        def compute() -> dict[str, Any]:
            made, divided, whole = jax.device_get((results, denominators, sums))
            count = flat.num_sequences
            return {
                **step_metrics.device_metrics(made, divided, whole, count, self._rate_at),
                **known,
                **step_metrics.staleness(versions, int(whole["version"])),
            }

        return state, Metrics(compute)

    def evaluate(self, state: TrainState, groups: Sequence[Group]) -> dict[str, float]:
        """Return the loss's metrics on groups that are not trained on; raises as `update` does."""
        _, _, packed, (per_token, divisors, sums) = self._begin(state, groups, 1)
        totals = []
        for batch in packed[0]:
            inputs = self._gather(per_token, batch, sums, np.float32(0.0))
            totals.append(self._loss(state.params, self._frozen, inputs)[1])
        totals, denominator = jax.device_get((totals, divisors[0][0]))
        stats = {name: float(sum(part[name] for part in totals)) for name in totals[0]}
        return losses.summarise(stats, float(denominator))

    def logprobs(self, state: TrainState, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return the log-probabilities of each trajectory's tokens; see the contract."""
        flat = packing.flatten(groups)
        _, batches = self._pack(flat, np.arange(flat.num_sequences))
        scores = np.asarray(self._score(state.params, batches, len(flat.tokens["tokens"])))
        return [scores[a : a + n] for a, n in zip(flat.starts, flat.sizes, strict=True)]


def _model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in objective.MODEL_INPUTS if name in batch}
