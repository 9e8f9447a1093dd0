"""One train batch: groups in, the next policy out. A thin host loop over jitted steps.

    groups ─▶ flatten ─▶ plan, pack ─▶ (proximal, reference logprobs) ─▶ advantages, loss weights
           ─▶ for each minibatch: microbatch gradients ─▶ one optimizer update

The host only arranges arrays and dispatches; nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from rlx.algorithms import presets
from rlx.base import Group, UserError
from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.config import ModelConfig
from rlx.train import metrics as metrics_lib
from rlx.train import packing, steps
from rlx.train.metrics import Metrics
from rlx.train.optimizer import make_optimizer, make_schedule
from rlx.train.steps import Steps, TrainState


class Update(NamedTuple):
    """The trainer as functions.

    Attributes:
      init: params → the state before the first update; copies params, and puts them on the mesh.
      update: (state, groups) → (new state, metrics). The old state's arrays are given up to the new
        one: whoever needs the parameters must read them before the next update. Metrics are read
        lazily, see `Metrics`.
      logprobs: (params, groups) → one [tokens] float32 array a trajectory, in the groups' order;
        log-probabilities of the tempered policy. Waits for the device.
      abstract_state: shapes, dtypes and shardings of the state, for restoring a checkpoint.
    """

    init: Callable[[parameters.Params], TrainState]
    update: Callable[[TrainState, Sequence[Group]], tuple[TrainState, Metrics]]
    logprobs: Callable[[parameters.Params, Sequence[Group]], list[np.ndarray]]
    abstract_state: TrainState


def make_update(
    model_config: ModelConfig,
    config: ConfigDict,
    *,
    reference_params: Callable[[], parameters.Params] | None = None,
    mesh: Mesh | None = None,
) -> Update:
    """The trainer of a run.

    Args:
      model_config: the model.
      config: the whole config of the run.
      reference_params: gives the frozen policy of KL terms; called only when there is one.
      mesh: devices to use; made from `config.train.mesh` when None.

    Raises:
      UserError: the algorithm needs a reference policy and there is none, or a name is unknown.
    """
    trainer = _Trainer(model_config, config, reference_params, mesh)
    return Update(trainer.init, trainer.update, trainer.logprobs, trainer.abstract_state())


def make_steps(model_config: ModelConfig, config: ConfigDict) -> Steps:
    """The device functions of a run."""
    return Steps(
        model=model_config,
        algorithm=presets.resolve(config.algorithm, config.sampling.max_new_tokens),
        optimizer=make_optimizer(config.optimizer, _total_updates(config)),
        temperature=config.sampling.temperature,
        remat=config.model.remat,
        compute_dtype=jnp.dtype(config.model.compute_dtype),
        chunk=config.model.logprob_chunk,
        clip_norm=config.optimizer.clip_norm,
    )


# How much longer attention takes than its arithmetic says, beside matrix products. Measured on a
# CPU: a 4-layer model 256 wide takes 1.35 times as long per token in rows of 512 as in rows of 128.
ATTENTION_SLOWDOWN = {"cpu": 2.0}


def attention_cost(config: ModelConfig, platform: str = "gpu") -> float:
    """Time of attention per token and key over the time of everything else per token.

    Arithmetic: 4 · layers · heads · head width over 2 · parameters used per token.
    """
    unused = 0 if config.tie_embeddings else config.vocab_size * config.model_dim
    dense = 2 * (parameters.count(config) - unused)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return ATTENTION_SLOWDOWN.get(platform, 1.0) * attention / dense


def _total_updates(config: ConfigDict) -> int:
    return config.total_steps * config.train.minibatches


class _Trainer:
    """Jitted steps and where arrays go; holds nothing that changes."""

    def __init__(self, model_config, config, reference_params, mesh):
        self.config, self.model_config = config, model_config
        self.steps = make_steps(model_config, config)
        self.schedule = make_schedule(config.optimizer, _total_updates(config))
        self.attention_cost = attention_cost(model_config, jax.default_backend())
        self.mesh = sharding.make_mesh(config.train.mesh) if mesh is None else mesh
        algorithm = self.steps.algorithm
        if algorithm.needs_reference and reference_params is None:
            raise UserError(
                f"algorithm.kl_placement={algorithm.kl_placement} needs a reference policy and "
                "there is none; give reference_params or set algorithm.kl_placement=none"
            )
        self.reference_params = None
        if algorithm.needs_reference:
            self.reference_params = self._place(reference_params())
        self._jit()

    def _jit(self):
        """Compiles nothing yet; says what is donated and where results stay."""
        s, placed = self.steps, {}
        states = params = accumulators = None
        if self.mesh is not None:
            states, params = self._state_shardings(), self._param_shardings()
            accumulators = (params, self._replicated())
            placed = {"out_shardings": (states, self._replicated())}
        self.jit_init = jax.jit(s.init, donate_argnums=0, out_shardings=states)
        self.empty = jax.jit(s.empty, out_shardings=accumulators)
        self.grad_step = jax.jit(s.grad_step, donate_argnums=1, out_shardings=accumulators)
        self.apply_step = jax.jit(s.apply_step, donate_argnums=0, **placed)
        self.train_step = jax.jit(s.train_step, donate_argnums=0, **placed)
        self.logprob_step = jax.jit(s.logprob_step)
        self.prepare = jax.jit(s.prepare, static_argnums=3)
        self.gather = jax.jit(s.gather)
        self.scatter = jax.jit(steps.scatter, donate_argnums=0)

    # Where arrays live. Without a mesh everything is on the default device.

    def _replicated(self):
        return NamedSharding(self.mesh, PartitionSpec())

    def _param_shardings(self):
        return sharding.named_shardings(self.model_config, self.mesh)

    def _state_shardings(self):
        params, everywhere = self._param_shardings(), self._replicated()
        shapes = parameters.shapes(self.model_config)
        moments = optax.tree.map_params(
            self.steps.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self.steps.optimizer.init, shapes),
            params,
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(params, moments, everywhere, everywhere)

    def _place(self, params):
        """A copy of params where they belong, in the dtype of `model.dtype`."""
        dtype = jnp.dtype(self.config.model.dtype)
        params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)
        return params if self.mesh is None else jax.device_put(params, self._param_shardings())

    def _put(self, arrays: packing.Arrays, spec: PartitionSpec):
        if self.mesh is None:
            return jax.device_put(arrays)
        return jax.device_put(arrays, NamedSharding(self.mesh, spec))

    def abstract_state(self) -> TrainState:
        shapes = parameters.shapes(self.model_config, jnp.dtype(self.config.model.dtype))
        state = jax.eval_shape(self.steps.init, shapes)
        if self.mesh is None:
            return state
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state,
            self._state_shardings(),
        )

    def init(self, params) -> TrainState:
        return self.jit_init(self._place(params))

    # One batch.

    def _pack(self, flat: packing.FlatBatch, ids: np.ndarray):
        """The plan and device microbatches of some sequences."""
        plan = packing.plan(
            flat.sizes[ids],
            self.config.train.max_tokens_per_microbatch,
            self.config.train.row_buckets,
            attention_cost=self.attention_cost,
            shards=1 if self.mesh is None else self.mesh.shape.get("data", 1),
        )
        parts = packing.microbatches(flat, ids, plan)
        return plan, [self._put(part, sharding.BATCH) for part in parts]

    def _score(self, params, batches, size: int):
        """[F] log-probabilities under `params` of all tokens in the microbatches."""
        out = self._put({"x": np.zeros(size, np.float32)}, PartitionSpec())["x"]
        for batch in batches:
            inputs = {name: batch[name] for name in ("tokens", "positions", "segment_ids")}
            out = self.scatter(out, batch["flat_index"], self.logprob_step(params, inputs))
        return out

    def _flat_arrays(self, state, flat, batches, num_minibatches):
        """The flat batch on the device, with whatever other policies' logprobs it needs."""
        arrays = dict(self._put(flat.arrays(), PartitionSpec()))
        size = len(flat.tokens["tokens"])
        algorithm = self.steps.algorithm
        if algorithm.needs_proximal_pass(num_minibatches):
            arrays["proximal_logprobs"] = self._score(state.params, batches, size)
        if algorithm.needs_reference:
            arrays["reference_logprobs"] = self._score(self.reference_params, batches, size)
        return arrays

    def _minibatch(self, state, batches, denominator, done):
        """One optimizer update."""
        if len(batches) == 1:
            return self.train_step(state, batches[0], denominator, done)
        accumulator = self.empty(state.params, batches[0])
        for batch in batches:
            accumulator = self.grad_step(state.params, accumulator, batch)
        grads, stats = accumulator
        state, applied = self.apply_step(state, grads, denominator, done)
        return state, {**stats, **applied}

    def update(self, state: TrainState, groups: Sequence[Group]) -> tuple[TrainState, Metrics]:
        flat = packing.flatten(groups)
        if not flat.num_sequences:
            raise ValueError("an update needs at least one trajectory")
        parts = packing.minibatch_ids(flat, self.config.train.minibatches)
        plans, packed = zip(*(self._pack(flat, ids) for ids in parts), strict=True)
        minibatch_of = np.full(len(flat.sequences["valid"]), -1, np.int32)
        for index, ids in enumerate(parts):
            minibatch_of[ids] = index
        everything = [batch for batches in packed for batch in batches]
        arrays = self._flat_arrays(state, flat, everything, len(parts))
        per_token, denominators, sums = self.prepare(arrays, minibatch_of, state.step, len(parts))
        results = []
        for index, batches in enumerate(packed):
            progress = np.float32(index / len(parts))
            inputs = [self.gather(per_token, b, sums["version"], progress) for b in batches]
            done = np.int32(index == len(parts) - 1)
            state, stats = self._minibatch(state, inputs, denominators[index], done)
            results.append(stats)
        known = metrics_lib.host_metrics(groups, flat, plans)
        versions = metrics_lib.count_versions(flat)

        def compute():
            return {
                **known,
                **metrics_lib.staleness(versions, int(sums["version"])),
                **metrics_lib.device_metrics(
                    results, denominators, sums, flat.num_sequences, self.schedule
                ),
            }

        return state, Metrics(compute)

    def logprobs(self, params, groups: Sequence[Group]) -> list[np.ndarray]:
        flat = packing.flatten(groups)
        _, batches = self._pack(flat, np.arange(flat.num_sequences))
        scores = np.asarray(self._score(params, batches, len(flat.tokens["tokens"])))
        return [scores[a : a + n] for a, n in zip(flat.starts, flat.sizes, strict=True)]
