"""Gradient descent in JAX: the state, pure functions of a learner, optimizers.

    minibatch of one microbatch     step = gradient + apply, in one program
    of several                      accumulate each, into a donated accumulator, then apply

Losses and gradients are sums over tokens; `apply` divides once by the minibatch's denominator.
A run has a learner for the policy (or reward model), and with PPO another for the critic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from rlx.model.params import Params
from rlx.train.train_options import OptimizerOptions, rate_at

Batch = Mapping[str, Array]
Stats = dict[str, Array]
Schedule = Callable[[Any], Any]


class Critic(flax.struct.PyTreeNode):
    """PPO's second network: parameters with a value head, optimizer state, updates done."""

    params: Params
    opt_state: Any
    updates: Array


class TrainState(flax.struct.PyTreeNode):
    """The arrays that an update changes and a checkpoint holds."""

    params: Params  # the trained parameters
    opt_state: Any  # the optimizer's; float32, whatever the parameters' dtype
    step: Array  # int32; train batches done, which is the policy version of `params`
    updates: Array  # int32; optimizer updates done; skipped ones do not count
    kl_coefficient: Array  # float32; β of the KL term, which may adapt
    reference: Params | None = None  # a policy that follows the trained one; None: frozen
    critic: Critic | None = None  # of algorithms that have one


Learned = TypeVar("Learned", TrainState, Critic)  # has params, opt_state, updates


class LearnerPrograms(NamedTuple):
    """A Learner's functions, jitted."""

    empty: Callable
    accumulate: Callable
    apply: Callable
    step: Callable


@dataclass(frozen=True)
class Learner:
    """Gradient descent on one loss."""

    # (params, frozen, batch) → (summed loss, summed stats); `frozen` is not trained, or None.
    loss: Callable[[Params, Params | None, Batch], tuple[Array, Stats]]
    optimizer: optax.GradientTransformation  # gradients to updates, in float32
    clip_norm: float = 0.0  # largest global gradient norm; 0 is no limit

    @cached_property
    def gradient(self) -> Callable[[Params, Params | None, Batch], tuple[Params, Stats]]:
        """Arguments of `loss` → gradient of the summed loss, in the parameters' dtype; stats."""
        return jax.grad(self.loss, has_aux=True)

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
        self, learned: Learned, grads: Params, denominator: Array, wait: Array
    ) -> tuple[Learned, Stats]:
        """Make one optimizer update with the gradient grads / denominator, clipped by its norm.

        A non-finite gradient norm changes nothing.

        Args:
          grads: summed over the minibatch.
          denominator: float32 scalar, of the whole minibatch.
          wait: bool scalar; true changes nothing either, for a policy that waits for its critic,
            and does not count as skipped.

        Returns:
          `learned` after it; grad_norm (before clipping), skipped_updates (0 or 1) and updates
          (before this one).
        """
        grads = jax.tree.map(lambda g: g / denominator, float32(grads))
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        if self.clip_norm:
            scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
        wide = float32(learned.params)
        changes, opt_state = self.optimizer.update(grads, learned.opt_state, wide)
        params = jax.tree.map(
            lambda p, w, u: (w + u).astype(p.dtype), learned.params, wide, changes
        )
        moves = finite & ~wait

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
        self, learned: Learned, frozen: Params | None, batch: Batch, denominator: Array, wait: Array
    ) -> tuple[Learned, Stats]:
        """Make one update with a minibatch of one microbatch: `gradient`, then `apply`."""
        grads, stats = self.gradient(learned.params, frozen, batch)
        learned, applied = self.apply(learned, grads, denominator, wait)
        return learned, {**stats, **applied}

    def compiled(
        self, places: Any, everywhere: Any, jit: Callable = jax.jit, **options: Any
    ) -> LearnerPrograms:
        """Return the jitted programs; they donate `learned` and accumulators.

        `places` are shardings of `learned`, None for one device; `everywhere` is that of scalars.
        `options` of `jit` are for the programs that compute gradients.
        """
        sums = None if places is None else (places.params, everywhere)
        both = None if places is None else (places, everywhere)
        return LearnerPrograms(
            empty=jit(self.empty, out_shardings=sums),
            accumulate=jit(self.accumulate, donate_argnums=0, out_shardings=sums, **options),
            apply=jit(self.apply, donate_argnums=0, out_shardings=both),
            step=jit(self.step, donate_argnums=0, out_shardings=both, **options),
        )


def float32(tree: Any) -> Any:
    """Return a pytree with its leaves in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


OPTIMIZERS: dict[str, Callable[[OptimizerOptions, Schedule], optax.GradientTransformation]] = {
    "adamw": lambda c, rate: optax.adamw(
        rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=decay_mask
    ),
    "lion": lambda c, rate: optax.lion(
        rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=decay_mask
    ),
    "sgd": lambda c, rate: optax.chain(
        optax.add_decayed_weights(c.weight_decay, decay_mask), optax.scale_by_learning_rate(rate)
    ),
}


def decay_mask(params: Any) -> Any:
    """Return a bool pytree, true for matrices, which decay, and false for norms and biases."""
    others = ("norm", "bias")
    return jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(others), params)


def make_optimizer(options: OptimizerOptions, total_steps: int) -> optax.GradientTransformation:
    """Return the optimizer without clipping, for a run of `total_steps` updates."""
    return OPTIMIZERS[options.name](options, lambda n: rate_at(options, total_steps, n, jnp))
