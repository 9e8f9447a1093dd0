"""One train batch: groups in, the next policy out. A thin host loop over jitted steps.

    groups ─▶ flatten ─▶ plan, pack ─▶ (proximal, reference logprobs; values) ─▶ advantages, loss
           weights ─▶ for each minibatch: microbatch gradients ─▶ one optimizer update (and one of
           the critic) ─▶ end of the batch

The host only arranges arrays and dispatches; nothing here waits for the device. SFT, reward models
and DPO come the same way: what differs is the row of the preset table.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from ml_collections import ConfigDict

from rlx.algorithms import losses, presets
from rlx.base import Group, UserError
from rlx.model import lora as lora_lib
from rlx.model import params as parameters
from rlx.model import sharding
from rlx.model.lora import LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.train import packing, step_metrics, steps
from rlx.train.optimizer import make_optimizer, make_schedule
from rlx.train.step_metrics import Metrics
from rlx.train.steps import Critic, Learner, Steps, TrainState


class Update(NamedTuple):
    """The trainer as functions.

    Attributes:
      init: params → the state before the first update; copies params, and puts them on the mesh. A
        critic begins as a copy of them, a reward model is one, both with a value head of zeros.
        With LoRA the state begins with adapters that add nothing, and params are not looked at.
      update: (state, groups) → (new state, metrics). The old state's arrays are given up to the new
        one: whoever needs the parameters must read them before the next update. Metrics are read
        lazily, see `Metrics`.
      logprobs: (params, groups) → one [tokens] float32 array a trajectory, in the groups' order;
        log-probabilities of the tempered policy. Waits for the device.
      evaluate: (state, groups) → the metrics of the loss on groups that are not trained on.
      abstract_state: shapes, dtypes and shardings of the state, for restoring a checkpoint.
      model: the config of what is trained; a reward model's has a value head.
      lora: of the adapters, which then are all that `state.params` holds; None without.
      whole: state.params → parameters that the decoder computes the policy with.
      merged: state.params → parameters of `model` alone, to publish and to export.
    """

    init: Callable[[parameters.Params], TrainState]
    update: Callable[[TrainState, Sequence[Group]], tuple[TrainState, Metrics]]
    logprobs: Callable[[parameters.Params, Sequence[Group]], list[np.ndarray]]
    evaluate: Callable[[TrainState, Sequence[Group]], dict[str, float]]
    abstract_state: TrainState
    model: ModelConfig
    lora: LoraConfig | None
    whole: Callable[[parameters.Params], parameters.Params]
    merged: Callable[[parameters.Params], parameters.Params]


def make_update(
    model_config: ModelConfig,
    config: ConfigDict,
    *,
    reference_params: Callable[[], parameters.Params] | None = None,
    base_params: Callable[[], parameters.Params] | None = None,
    mesh: Mesh | None = None,
) -> Update:
    """The trainer of a run.

    Args:
      model_config: the model.
      config: the whole config of the run.
      reference_params: gives the frozen policy of KL terms; called only when there is one.
      base_params: gives what LoRA's adapters are added to, which then is the frozen policy of KL
        terms as well; called only with `config.lora.rank`.
      mesh: devices to use; made from `config.train.mesh` when None.

    Raises:
      UserError: the algorithm needs a reference policy and there is none, or a name is unknown.
    """
    trainer = _Trainer(model_config, config, reference_params, base_params, mesh)
    return Update(
        trainer.init,
        trainer.update,
        trainer.logprobs,
        trainer.evaluate,
        trainer.abstract_state(),
        trainer.steps.model,
        trainer.steps.lora,
        trainer.whole,
        trainer.merged,
    )


def make_steps(model_config: ModelConfig, config: ConfigDict) -> Steps:
    """The device functions of a run."""
    algorithm = presets.resolve(
        config.algorithm, config.sampling.max_new_tokens, config.sampling.n_samples
    )
    if config.lora.rank and (algorithm.critic or algorithm.kind.scores):
        what = "a critic" if algorithm.critic else "a reward model"
        raise UserError(
            f"algorithm {algorithm.name} trains {what}, whose value head is no adapter's; set "
            "lora.rank=0"
        )
    if config.reference.mode != "frozen" and not algorithm.needs_reference:
        raise UserError(
            f"reference.mode={config.reference.mode} is of a reference policy and algorithm "
            f"{algorithm.name} asks for none; set algorithm.kl_placement, or reference.mode=frozen"
        )
    warmup = config.critic.warmup_steps
    if warmup and not algorithm.critic:
        raise UserError(
            f"critic.warmup_steps={warmup} is of a critic and algorithm {algorithm.name} has none; "
            "set algorithm.critic=True, or critic.warmup_steps=0"
        )
    if warmup and warmup >= config.total_steps:
        raise UserError(
            f"critic.warmup_steps={warmup} leaves none of total_steps={config.total_steps} to the "
            "policy; lower it or raise total_steps"
        )
    valued = dataclasses.replace(model_config, value_head=True)
    critic = dict(config.optimizer) | {"learning_rate": config.critic.learning_rate}
    return Steps(
        model=valued if algorithm.kind.scores else model_config,
        algorithm=algorithm,
        optimizer=make_optimizer(config.optimizer, _policy_updates(config)),
        critic_model=valued if algorithm.critic else None,
        critic_optimizer=make_optimizer(
            ConfigDict(critic), config.total_steps * config.train.minibatches
        )
        if algorithm.critic
        else None,
        critic_warmup=warmup,
        reference_mode=config.reference.mode,
        reference_every=config.reference.every_steps,
        reference_decay=config.reference.decay,
        temperature=config.sampling.temperature,
        remat=config.model.remat,
        compute_dtype=jnp.dtype(config.model.compute_dtype),
        chunk=config.model.logprob_chunk,
        clip_norm=config.optimizer.clip_norm,
        lora=make_lora(config.lora),
    )


def make_lora(config: ConfigDict) -> LoraConfig | None:
    """What `config.lora` describes; None where the whole model is trained."""
    return LoraConfig(config.rank, config.alpha, tuple(config.targets)) if config.rank else None


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


def _policy_updates(config: ConfigDict) -> int:
    """Return how many updates the policy makes: none while it waits for its critic."""
    return (config.total_steps - config.critic.warmup_steps) * config.train.minibatches


class _Jitted(NamedTuple):
    """A learner's functions, compiled when first called; `gradient` and `apply` stand for `step`
    where a minibatch has several microbatches."""

    empty: Callable
    accumulate: Callable
    apply: Callable
    step: Callable


class _Trainer:
    """Jitted steps and where arrays go; holds nothing that changes."""

    def __init__(self, model_config, config, reference_params, base_params, mesh):
        self.config, self.model_config = config, model_config
        self.steps = make_steps(model_config, config)
        self.schedule = make_schedule(config.optimizer, _policy_updates(config))
        self.attention_cost = attention_cost(model_config, jax.default_backend())
        self.mesh = sharding.make_mesh(config.train.mesh) if mesh is None else mesh
        algorithm = self.steps.algorithm
        if self.steps.lora and base_params is None:
            raise UserError("lora.rank without a base; give base_params")
        if algorithm.needs_reference and reference_params is None and not self.steps.lora:
            raise UserError(
                f"algorithm {algorithm.name} with kl_placement={algorithm.kl_placement} needs a "
                "reference policy and there is none; give reference_params or set "
                "algorithm.kl_placement=none"
            )
        self.frozen = self._place(base_params(), model_config) if self.steps.lora else None
        self.reference_params = None  # with LoRA: of the base, without adapters
        if algorithm.needs_reference and not self.steps.follows and not self.steps.lora:
            self.reference_params = self._place(reference_params(), model_config)
        self._jit()

    def _jit(self):
        """Compiles nothing yet; says what is donated and where results stay."""
        s = self.steps
        shardings = self._state_shardings()
        # Committed to the device as restored arrays are: a resumed run finds the same programs.
        home = SingleDeviceSharding(jax.devices()[0]) if shardings is None else shardings
        self.jit_init = jax.jit(s.init, donate_argnums=(0, 1), out_shardings=home)
        policy, critic = shardings, None
        if shardings is not None:
            policy, critic = shardings.replace(critic=None), shardings.critic
        self.learner = self._jit_learner(s.learner, policy)
        self.critic_learner = self._jit_learner(s.critic_learner, critic)
        self.logprob_step = jax.jit(s.logprob_step)
        self.value_step = jax.jit(s.value_step)
        self.loss = jax.jit(s.loss)
        self.prepare = jax.jit(s.prepare, static_argnums=4)
        self.gather = jax.jit(s.gather)
        self.waits = jax.jit(s.waits)
        self.end_batch = jax.jit(s.end_batch, donate_argnums=0, out_shardings=shardings)
        self.scatter = jax.jit(steps.scatter, donate_argnums=0)

    def _jit_learner(self, learner: Learner, shardings) -> _Jitted:
        accumulators: Any = None
        placed: dict[str, Any] = {}
        if shardings is not None:
            accumulators = (shardings.params, self._replicated())
            placed = {"out_shardings": (shardings, self._replicated())}
        return _Jitted(
            empty=jax.jit(learner.empty, out_shardings=accumulators),
            accumulate=jax.jit(learner.accumulate, donate_argnums=0, out_shardings=accumulators),
            apply=jax.jit(learner.apply, donate_argnums=0, **placed),
            step=jax.jit(learner.step, donate_argnums=0, **placed),
        )

    # Where arrays live. Without a mesh everything is on the default device.

    def _replicated(self):
        return NamedSharding(self.mesh, PartitionSpec())

    def _trained_shapes(self):
        """Of what the learner trains: the model's parameters, or the adapters."""
        s = self.steps
        if s.lora:
            return lora_lib.shapes(s.model, s.lora)
        return parameters.shapes(s.model, jnp.dtype(self.config.model.dtype))

    def _learned_shardings(self, model, optimizer, lora=None):
        """Of parameters (or adapters), and of what the optimizer keeps of each of them."""
        rows = lora_lib.table(model, lora) if lora else None
        params = sharding.named_shardings(model, self.mesh, rows)
        shapes = lora_lib.shapes(model, lora) if lora else parameters.shapes(model)
        moments = optax.tree.map_params(
            optimizer,
            lambda _, place: place,
            jax.eval_shape(optimizer.init, shapes),
            params,
            transform_non_params=lambda _: self._replicated(),
        )
        return params, moments

    def _state_shardings(self) -> Any:
        if self.mesh is None:
            return None
        s, everywhere = self.steps, self._replicated()
        params, moments = self._learned_shardings(s.model, s.optimizer, s.lora)
        critic = None
        if s.critic_model is not None:
            own = self._learned_shardings(s.critic_model, s.critic_optimizer)
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

    def _place(self, params, model):
        """A copy of params where they belong, in the dtype of `model.dtype`."""
        dtype = jnp.dtype(self.config.model.dtype)
        params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)
        if self.mesh is None:
            return params
        return jax.device_put(params, sharding.named_shardings(model, self.mesh))

    def _adapters(self):
        """New adapters where they belong."""
        model, lora = self.model_config, self.steps.lora
        adapters = lora_lib.init(model, lora, jax.random.key(self.config.seed))
        if self.mesh is None:
            return adapters
        rows = lora_lib.table(model, lora)
        return jax.device_put(adapters, sharding.named_shardings(model, self.mesh, rows))

    def _put(self, arrays: packing.Arrays, spec: PartitionSpec):
        if self.mesh is None:
            return jax.device_put(arrays)
        return jax.device_put(arrays, NamedSharding(self.mesh, spec))

    def abstract_state(self) -> TrainState:
        dtype, s = jnp.dtype(self.config.model.dtype), self.steps
        critic = s.critic_model and parameters.shapes(s.critic_model, dtype)
        state = jax.eval_shape(s.init, self._trained_shapes(), critic)
        if self.mesh is None:
            return state
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            state,
            self._state_shardings(),
        )

    def init(self, params) -> TrainState:
        s, critic = self.steps, None
        if s.lora:
            return self.jit_init(self._adapters(), None)
        if s.critic_model is not None:
            valued, _ = parameters.with_value_head(params, self.model_config)
            critic = self._place(valued, s.critic_model)
        trained = steps.trained_model(self.model_config, params, s.algorithm)
        return self.jit_init(self._place(trained, s.model), critic)

    def whole(self, params):
        return self.steps.whole(params, self.frozen)

    def merged(self, params):
        lora = self.steps.lora
        return lora_lib.merge(self.frozen, params, lora) if lora else params

    # One batch.

    def _pack(self, flat: packing.FlatBatch, ids: np.ndarray):
        """The plan and device microbatches of some sequences."""
        plan = packing.plan(
            flat.sizes[ids],
            self.config.train.max_tokens_per_microbatch,
            self.config.train.row_buckets,
            attention_cost=self.attention_cost,
            shards=1 if self.mesh is None else self.mesh.shape.get("data", 1),
            together=flat.pairs(ids) if self.steps.algorithm.data == "pairs" else None,
        )
        parts = packing.microbatches(flat, ids, plan)
        return plan, [self._put(part, sharding.BATCH) for part in parts]

    def _flat_zeros(self, size: int):
        return self._put({"x": np.zeros(size, np.float32)}, PartitionSpec())["x"]

    def _score(self, params, batches, size: int):
        """[F] log-probabilities under `params` of all tokens in the microbatches."""
        out = self._flat_zeros(size)
        for batch in batches:
            scores = self.logprob_step(params, self.frozen, _model_inputs(batch))
            out = self.scatter(out, batch["flat_index"], scores)
        return out

    def _values(self, critic, batches, size: int):
        """The critic's V before and after each token, [F] each."""
        before, after = self._flat_zeros(size), self._flat_zeros(size)
        for batch in batches:
            values = self.value_step(critic.params, _model_inputs(batch))
            before = self.scatter(before, batch["flat_index"], values[0])
            after = self.scatter(after, batch["flat_index"], values[1])
        return before, after

    def _flat_arrays(self, state, flat, batches, num_minibatches):
        """The flat batch on the device, with whatever other networks say about it."""
        arrays = dict(self._put(flat.arrays(), PartitionSpec()))
        size = len(flat.tokens["tokens"])
        algorithm = self.steps.algorithm
        if algorithm.needs_proximal_pass(num_minibatches):
            arrays["proximal_logprobs"] = self._score(state.params, batches, size)
        if algorithm.needs_reference:
            reference = state.reference if self.steps.follows else self.reference_params
            arrays["reference_logprobs"] = self._score(reference, batches, size)
        if state.critic is not None:
            arrays["values"], arrays["values_after"] = self._values(state.critic, batches, size)
        return arrays

    def _minibatch(self, jitted, learned, frozen, batches, denominator, held):
        """One optimizer update of one learner."""
        if len(batches) == 1:
            return jitted.step(learned, frozen, batches[0], denominator, held)
        accumulator = jitted.empty(learned.params, frozen, batches[0])
        for batch in batches:
            accumulator = jitted.accumulate(accumulator, learned.params, frozen, batch)
        grads, stats = accumulator
        learned, applied = jitted.apply(learned, grads, denominator, held)
        return learned, {**stats, **applied}

    def _update_both(self, state, batches, divisors, waits):
        """One minibatch: the policy's update, and its critic's."""
        denominator, tokens = divisors
        critic = state.critic
        state, stats = self._minibatch(
            self.learner, state.replace(critic=None), self.frozen, batches, denominator, waits
        )
        if critic is not None:
            critic, more = self._minibatch(
                self.critic_learner, critic, None, batches, tokens, np.bool_(False)
            )
            del more["updates"]
            own = ("grad_norm", "skipped_updates")
            stats |= {f"critic_{k}" if k in own else k: value for k, value in more.items()}
        return state.replace(critic=critic), stats

    def _require(self, groups: Sequence[Group], flat: packing.FlatBatch) -> None:
        """Raises for groups that this algorithm cannot be trained on."""
        algorithm = self.steps.algorithm
        if not flat.num_sequences:
            raise ValueError("an update needs at least one trajectory")
        if algorithm.data == "pairs":
            for group in groups:
                if len(group.trajectories) != 2:
                    raise ValueError(
                        f"group {group.group_id} has {len(group.trajectories)} trajectories; "
                        f"loss={algorithm.loss} wants a chosen and a rejected one"
                    )
        if algorithm.kl_anchor == "teacher" and "reference_logprobs" not in flat.tokens:
            raise UserError(
                "algorithm.kl_anchor=teacher and the trajectories have no logprobs of a teacher; "
                "set teacher.path or teacher.addresses"
            )
        if algorithm.peers == "turn" and "turn_ids" not in flat.tokens:
            raise UserError(
                "algorithm.peers=turn and the trajectories tell no turns; use a workflow of "
                "several turns, or set peers=prompt"
            )

    def update(self, state: TrainState, groups: Sequence[Group]) -> tuple[TrainState, Metrics]:
        flat = packing.flatten(groups)
        self._require(groups, flat)
        parts = packing.minibatch_ids(flat, self.config.train.minibatches)
        plans, packed = zip(*(self._pack(flat, ids) for ids in parts), strict=True)
        minibatch_of = np.full(len(flat.sequences["valid"]), -1, np.int32)
        for index, ids in enumerate(parts):
            minibatch_of[ids] = index
        everything = [batch for batches in packed for batch in batches]
        arrays = self._flat_arrays(state, flat, everything, len(parts))
        per_token, divisors, sums = self.prepare(
            arrays, minibatch_of, state.step, state.kl_coefficient, len(parts)
        )
        waits, results = self.waits(state.step), []
        for index, batches in enumerate(packed):
            progress = np.float32(index / len(parts))
            inputs = [self.gather(per_token, b, sums, progress) for b in batches]
            state, stats = self._update_both(state, inputs, divisors[index], waits)
            results.append(stats)
        state = self.end_batch(
            state,
            sum(stats.get("reference_kl", 0.0) for stats in results),
            sum(stats["n_valid_tokens"] for stats in results),
            np.float32(flat.num_sequences),
        )
        known = step_metrics.host_metrics(groups, flat, plans)
        versions = step_metrics.count_versions(flat)
        denominators = [denominator for denominator, _ in divisors]

        def compute():
            return {
                **known,
                **step_metrics.staleness(versions, int(sums["version"])),
                **step_metrics.device_metrics(
                    results, denominators, sums, flat.num_sequences, self.schedule
                ),
            }

        return state, Metrics(compute)

    def evaluate(self, state: TrainState, groups: Sequence[Group]) -> dict[str, float]:
        flat = packing.flatten(groups)
        self._require(groups, flat)
        _, batches = self._pack(flat, np.arange(flat.num_sequences))
        arrays = self._flat_arrays(state, flat, batches, 1)
        everything = np.where(flat.sequences["valid"], 0, -1).astype(np.int32)
        per_token, divisors, sums = self.prepare(
            arrays, everything, state.step, state.kl_coefficient, 1
        )
        totals = []
        for batch in batches:
            inputs = self.gather(per_token, batch, sums, np.float32(0.0))
            totals.append(self.loss(state.params, self.frozen, inputs)[1])
        totals, denominator = jax.device_get((totals, divisors[0][0]))
        stats = {name: float(sum(part[name] for part in totals)) for name in totals[0]}
        return losses.summarise(stats, float(denominator))

    def logprobs(self, params, groups: Sequence[Group]) -> list[np.ndarray]:
        flat = packing.flatten(groups)
        _, batches = self._pack(flat, np.arange(flat.num_sequences))
        scores = np.asarray(self._score(params, batches, len(flat.tokens["tokens"])))
        return [scores[a : a + n] for a, n in zip(flat.starts, flat.sizes, strict=True)]


def _model_inputs(batch):
    return {name: batch[name] for name in ("tokens", "positions", "segment_ids")}
