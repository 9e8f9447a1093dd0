"""The device side of training: pure functions of arrays, and a learner that jits its own.

Shapes: F tokens of the flat axis, N trajectories, B rows of a microbatch, T tokens of a row.

    minibatch of one microbatch     step = gradient + apply, in one program
    of several                      accumulate each, into a donated accumulator, then apply

Losses and gradients are sums over tokens; the minibatch's denominator divides once, in `apply`.
A `Learner` is a loss and an optimizer. A run has one for the policy (or reward model), and PPO a
second one for its critic. `objective.prepare` and `end_batch` stand around a batch's minibatches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from rlx.algorithms import kl, losses
from rlx.algorithms.algorithm import Algorithm
from rlx.model import decoder
from rlx.model import lora as lora_lib
from rlx.model.experts import balance_loss
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params, shapes
from rlx.model.sharding import ONE_DEVICE, Layout
from rlx.train import objective, step_metrics
from rlx.train.optimizer import make_optimizer
from rlx.train.train_options import TrainOptions

Batch = Mapping[str, Array]
Stats = dict[str, Array]


class Critic(flax.struct.PyTreeNode):
    """PPO's second network: parameters with a value head, optimizer state, updates done."""

    params: Params
    opt_state: Any
    updates: Array


class TrainState(flax.struct.PyTreeNode):
    """The arrays that an update changes; what a checkpoint holds.

    Attributes:
      params: the parameters that are trained.
      opt_state: the optimizer's; float32, whatever the parameters are.
      step: int32; train batches done, which is the policy version of `params`.
      updates: int32; optimizer updates done; skipped ones do not count.
      kl_coefficient: float32; β of the KL term, where it adapts.
      reference: the reference policy, where it follows the trained one; None where it is frozen.
      critic: of algorithms that have one.
    """

    params: Params
    opt_state: Any
    step: Array
    updates: Array
    kl_coefficient: Array
    reference: Params | None = None
    critic: Critic | None = None


Learned = TypeVar("Learned", TrainState, Critic)  # has params, opt_state, updates


@dataclass(frozen=True)
class Learner:
    """Gradient descent on one loss.

    Attributes:
      loss: (params, frozen, batch) → (summed loss, summed stats). `frozen` are parameters that are
        needed and not trained, or None.
      optimizer: gradients to updates, in float32.
      clip_norm: largest global gradient norm; 0 is no limit.
    """

    loss: Callable[[Params, Params | None, Batch], tuple[Array, Stats]]
    optimizer: optax.GradientTransformation
    clip_norm: float = 0.0

    def gradient(self, params: Params, frozen: Params | None, batch: Batch) -> tuple[Params, Stats]:
        """Return the gradient of the microbatch's summed loss, in the parameters' dtype; stats."""
        return jax.grad(self.loss, has_aux=True)(params, frozen, batch)

    def empty(self, params: Params, frozen: Params | None, batch: Batch) -> tuple[Params, Stats]:
        """Return an accumulator of zeros: float32 gradients and stats."""
        grads, stats = jax.eval_shape(self.gradient, params, frozen, batch)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (grads, stats))

    def accumulate(
        self, accumulator: tuple[Params, Stats], params: Params, frozen: Params | None, batch: Batch
    ) -> tuple[Params, Stats]:
        """Return the accumulator with one more microbatch in it."""
        return jax.tree.map(jnp.add, accumulator, self.gradient(params, frozen, batch))

    def apply(
        self, learned: Learned, grads: Params, denominator: Array, held: Array
    ) -> tuple[Learned, Stats]:
        """Make one optimizer update with the gradient grads / denominator, clipped by its norm.

        A gradient norm that is not finite leaves parameters and optimizer as they were.

        Args:
          learned: before the update.
          grads: summed over the minibatch.
          denominator: float32 scalar, of the whole minibatch.
          held: bool scalar; true leaves everything as it was too (a policy that waits for its
            critic), and is not counted as skipped.

        Returns:
          `learned` after it; grad_norm (before clipping), skipped_updates (0 or 1) and updates
          (before this one).
        """
        grads = jax.tree.map(lambda g: g / denominator, _float32(grads))
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        if self.clip_norm:
            scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
        wide = _float32(learned.params)
        changes, opt_state = self.optimizer.update(grads, learned.opt_state, wide)
        params = jax.tree.map(
            lambda p, w, u: (w + u).astype(p.dtype), learned.params, wide, changes
        )
        moves = finite & ~held

        def if_moved(new, old):
            return jax.tree.map(lambda n, o: jnp.where(moves, n, o), new, old)

        new = learned.replace(
            params=if_moved(params, learned.params),
            opt_state=if_moved(opt_state, learned.opt_state),
            updates=learned.updates + moves.astype(jnp.int32),
        )
        skipped = 1.0 - finite.astype(jnp.float32)
        return new, {"grad_norm": norm, "skipped_updates": skipped, "updates": learned.updates}

    def step(
        self, learned: Learned, frozen: Params | None, batch: Batch, denominator: Array, held: Array
    ) -> tuple[Learned, Stats]:
        """Update by a minibatch that is one microbatch: `gradient` and `apply` in one program."""
        grads, stats = self.gradient(learned.params, frozen, batch)
        learned, applied = self.apply(learned, grads, denominator, held)
        return learned, {**stats, **applied}

    def compiled(self, places: Any = None, everywhere: Any = None) -> Callable:
        """Return the update by a whole minibatch, of programs compiled when first called.

        Args:
          places: shardings of what learns; None keeps everything on one device.
          everywhere: the sharding of scalars.

        Returns:
          (learned, frozen, microbatches, denominator, held) → (learned after it, stats). The old
          one's arrays are given up to the new one.
        """
        sums = None if places is None else (places.params, everywhere)
        both = None if places is None else (places, everywhere)
        empty = jax.jit(self.empty, out_shardings=sums)
        accumulate = jax.jit(self.accumulate, donate_argnums=0, out_shardings=sums)
        apply = jax.jit(self.apply, donate_argnums=0, out_shardings=both)
        step = jax.jit(self.step, donate_argnums=0, out_shardings=both)

        def minibatch(
            learned: Learned, frozen: Params | None, batches: Sequence[Batch], denominator, held
        ) -> tuple[Learned, Stats]:
            if len(batches) == 1:
                return step(learned, frozen, batches[0], denominator, held)
            accumulator = empty(learned.params, frozen, batches[0])
            for batch in batches:
                accumulator = accumulate(accumulator, learned.params, frozen, batch)
            grads, stats = accumulator
            learned, applied = apply(learned, grads, denominator, held)
            return learned, {**stats, **applied}

        return minibatch


@dataclass(frozen=True)
class Steps:
    """The functions of a run that a device computes.

    Attributes:
      base: the config of the model as it was given, without a value head.
      options: of the run.
      layout: of weights and activations on the mesh.
    """

    base: ModelConfig
    options: TrainOptions
    layout: Layout = ONE_DEVICE

    @property
    def algorithm(self) -> Algorithm:
        """The row of the preset table."""
        return self.options.algorithm

    @property
    def _valued(self) -> ModelConfig:
        return replace(self.base, value_head=True)

    @property
    def model(self) -> ModelConfig:
        """The config of what is trained; a reward model's has a value head."""
        return self._valued if self.algorithm.kind.scores else self.base

    @property
    def critic_model(self) -> ModelConfig | None:
        """The critic's config, for algorithms that have one."""
        return self._valued if self.algorithm.critic else None

    @cached_property
    def learner(self) -> Learner:
        """The learner of `state`: the policy, or the reward model."""
        optimizer = make_optimizer(self.options.optimizer, self.options.policy_updates)
        return Learner(self.loss, optimizer, self.options.optimizer.clip_norm)

    @cached_property
    def critic_learner(self) -> Learner:
        """The learner of `state.critic`."""
        o = self.options
        own = replace(o.optimizer, learning_rate=o.critic_learning_rate)
        optimizer = make_optimizer(own, o.total_steps * o.minibatches)
        return Learner(self.value_loss, optimizer, o.optimizer.clip_norm)

    @property
    def follows(self) -> bool:
        """Whether the reference policy follows the trained one and so belongs to the state."""
        return self.algorithm.needs_reference and self.options.reference_mode != "frozen"

    def abstract(self) -> TrainState:
        """Return the shapes and dtypes of the state."""
        dtype, lora = jnp.dtype(self.options.dtype), self.options.lora
        trained = lora_lib.shapes(self.model, lora) if lora else shapes(self.model, dtype)
        critic = self.critic_model and shapes(self.critic_model, dtype)
        return jax.eval_shape(self.init, trained, critic)

    def init(self, params: Params, critic_params: Params | None = None) -> TrainState:
        """Return the state before the first update; its arrays are those of the parameters."""
        critic = reference = None
        if self.algorithm.critic:
            critic = Critic(
                params=critic_params or {},
                opt_state=self.critic_learner.optimizer.init(_float32(critic_params)),
                updates=jnp.zeros((), jnp.int32),
            )
        if self.follows:  # an average's small steps would be rounded away in bfloat16
            wide = jnp.float32 if self.options.reference_mode == "ema" else None
            reference = jax.tree.map(lambda leaf: jnp.array(leaf, wide or leaf.dtype), params)
        return TrainState(
            params=params,
            opt_state=self.learner.optimizer.init(_float32(params)),
            step=jnp.zeros((), jnp.int32),
            updates=jnp.zeros((), jnp.int32),
            kl_coefficient=jnp.float32(self.algorithm.kl_coefficient),
            reference=reference,
            critic=critic,
        )

    # Forward passes.

    def whole(self, params: Any, frozen: Any) -> Params:
        """Return what the decoder computes with: `params`, or the base with these adapters."""
        lora = self.options.lora
        if lora is None:
            return params
        return frozen if params is None else lora_lib.attach(frozen, params, lora)

    def logprobs(
        self, params: Params | None, frozen: Params | None, batch: Batch
    ) -> tuple[Array, Array]:
        """Return log-probabilities and entropies of a microbatch's tokens, [B, T] float32 each.

        With LoRA `frozen` is the base, and params of None are the base without adapters.
        """
        whole = self.whole(params, frozen)
        return self._logprobs(whole, batch, self._states(whole, self.model, batch)[0])

    def _logprobs(self, whole: Params, batch: Batch, x: Array) -> tuple[Array, Array]:
        o = self.options
        return decoder.logprobs(
            whole, self.model, batch, x=x, temperature=o.temperature, chunk=o.chunk,
            asked=batch.get("sampled", batch["loss_mask"]), layout=self.layout,
        )  # fmt: skip

    def _states(self, params: Params, model: ModelConfig, batch: Batch) -> tuple[Array, Any]:
        o, dtype = self.options, jnp.dtype(self.options.compute_dtype)
        return decoder.states(
            params, model, batch, remat=o.remat, compute_dtype=dtype, layout=self.layout
        )

    def logprob_step(self, params: Params | None, frozen: Params | None, batch: Batch) -> Array:
        """Return log-probabilities alone, for policies that are not trained: [B, T] float32."""
        return self.logprobs(params, frozen, batch)[0]

    def value_step(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        """Return the critic's V before and after each token, [B, T] float32 each."""
        x, _ = self._states(params, self._valued, batch)
        after_BT = decoder.values(params, self._valued, batch, x=x, layout=self.layout)
        return decoder.shift(after_BT, batch["segment_ids"]), after_BT

    # Losses.

    def loss(self, params: Params, frozen: Params | None, batch: Batch) -> tuple[Array, Stats]:
        """Return the microbatch's summed loss and its summed stats.

        The load-balancing loss of a mixture of experts is of each microbatch by itself, and weighs
        as much as the microbatch's tokens do in the loss.
        """
        whole = self.whole(params, frozen)
        x, routing = self._states(whole, self.model, batch)
        total, stats = objective.loss(
            batch, self.algorithm, logprobs=lambda: self._logprobs(whole, batch, x),
            scores=lambda: decoder.values(whole, self.model, batch, x=x, layout=self.layout),
        )  # fmt: skip
        if routing is None:
            return total, stats
        weight = self.options.balance_coefficient * jnp.sum(batch["loss_weights"])
        balance = weight * balance_loss(routing)
        stats |= dict(zip(step_metrics.ROUTING, routing, strict=True))
        return total + balance, {**stats, "balance_loss": balance}

    def value_loss(
        self, params: Params, frozen: Params | None, batch: Batch
    ) -> tuple[Array, Stats]:
        """Return the critic's summed loss and its summed stats."""
        del frozen
        return losses.value_loss(self.value_step(params, batch)[0], batch, self.algorithm)

    # Around the minibatches.

    def waits(self, step: Array) -> Array:
        """Return whether the policy waits for its critic at this train batch; bool scalar."""
        return step < self.options.critic_warmup

    def end_batch(
        self, state: TrainState, reference_kl: Array, trained: Array, trajectories: Array
    ) -> TrainState:
        """Return the state after a train batch: one version on, with β and the reference policy.

        Args:
          state: after the last minibatch.
          reference_kl, trained: the summed KL to the reference and the tokens it is of.
          trajectories: of the batch.
        """
        algorithm, coefficient, step = self.algorithm, state.kl_coefficient, state.step + 1
        if algorithm.kl_target:
            adapted = kl.adapt(
                coefficient, reference_kl / trained, trajectories,
                target=algorithm.kl_target, horizon=algorithm.kl_horizon,
            )  # fmt: skip
            # The divergence of a policy that stands still says nothing about β.
            coefficient = jnp.where(self.waits(state.step), coefficient, adapted)
        reference = state.reference
        if self.follows:
            keep = jnp.float32(self.options.reference_decay)
            if self.options.reference_mode == "copy":
                keep = jnp.where(step % self.options.reference_every == 0, 0.0, 1.0)
            reference = jax.tree.map(
                lambda old, new: (keep * old + (1.0 - keep) * new).astype(old.dtype),
                reference, state.params,
            )  # fmt: skip
        return state.replace(step=step, kl_coefficient=coefficient, reference=reference)


def scatter(flat_F: Array, flat_index_BT: Array, values_BT: Array) -> Array:
    """Return flat_F with values_BT put at flat_index_BT; what points beyond F is padding."""
    return flat_F.at[flat_index_BT].set(values_BT, mode="drop")


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
