"""The device side of training: pure functions of arrays, to be jitted.

    minibatch of one microbatch     train_step = gradient + apply, in one program
    of several                      grad_step each, into a donated accumulator, then apply_step

Losses and gradients are sums over tokens; the minibatch's denominator divides once, in `apply`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from rlx.algorithms import advantages as advantages_lib
from rlx.algorithms import losses
from rlx.algorithms.presets import Algorithm
from rlx.model import decoder
from rlx.model.config import ModelConfig
from rlx.model.params import Params

Batch = Mapping[str, Array]
Stats = dict[str, Array]


class TrainState(flax.struct.PyTreeNode):
    """What an update changes.

    Attributes:
      params: the model's parameters.
      opt_state: the optimizer's; float32, whatever the parameters are.
      step: int32; train batches done, which is the policy version of `params`.
      updates: int32; optimizer updates done; skipped ones do not count.
    """

    params: Params
    opt_state: Any
    step: Array
    updates: Array


@dataclass(frozen=True)
class Steps:
    """What the functions below depend on besides arrays; fixed for a run.

    Attributes:
      model, algorithm: static descriptions.
      optimizer: gradients to updates, in float32.
      temperature: > 0, the one the tokens were sampled with.
      remat, compute_dtype, chunk: as `decoder.logprobs` has them.
      clip_norm: largest global gradient norm; 0 is no limit.
    """

    model: ModelConfig
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    temperature: float = 1.0
    remat: str = "none"
    compute_dtype: Any = jnp.float32
    chunk: int = 1024
    clip_norm: float = 0.0

    def init(self, params: Params) -> TrainState:
        """The state before the first update."""
        return TrainState(
            params=params,
            opt_state=self.optimizer.init(_float32(params)),
            step=jnp.zeros((), jnp.int32),
            updates=jnp.zeros((), jnp.int32),
        )

    def logprobs(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        """Log-probabilities and entropies of a microbatch's tokens, [B, T] float32 each."""
        return decoder.logprobs(
            params, self.model, batch,
            temperature=self.temperature, remat=self.remat,
            compute_dtype=self.compute_dtype, chunk=self.chunk,
        )  # fmt: skip

    def logprob_step(self, params: Params, batch: Batch) -> Array:
        """Log-probabilities alone, for policies that are not trained: [B, T] float32."""
        return self.logprobs(params, batch)[0]

    def gradient(self, params: Params, batch: Batch) -> tuple[Params, Stats]:
        """The gradient of the microbatch's summed loss, in the parameters' dtype, and the stats."""

        def loss(params):
            target, entropy = self.logprobs(params, batch)
            return losses.policy_loss(target, entropy, batch, self.algorithm)

        return jax.grad(loss, has_aux=True)(params)

    def empty(self, params: Params, batch: Batch) -> tuple[Params, Stats]:
        """An accumulator of zeros: float32 gradients and stats."""
        grads, stats = jax.eval_shape(self.gradient, params, batch)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (grads, stats))

    def grad_step(
        self, params: Params, accumulator: tuple[Params, Stats], batch: Batch
    ) -> tuple[Params, Stats]:
        """The accumulator with one more microbatch in it."""
        return jax.tree.map(jnp.add, accumulator, self.gradient(params, batch))

    def apply_step(
        self, state: TrainState, grads: Params, denominator: Array, done: Array
    ) -> tuple[TrainState, Stats]:
        """One optimizer update with the gradient grads / denominator, clipped by global norm.

        A gradient norm that is not finite leaves parameters and optimizer as they were.

        Args:
          state: before the update.
          grads: summed over the minibatch.
          denominator: float32 scalar, of the whole minibatch.
          done: int32 scalar, 1 with the batch's last minibatch, else 0: what `step` grows by.

        Returns:
          The new state; grad_norm (before clipping), skipped_updates (0 or 1) and updates (before
          this one).
        """
        grads = jax.tree.map(lambda g: g / denominator, _float32(grads))
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        if self.clip_norm:
            scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
        wide = _float32(state.params)
        changes, opt_state = self.optimizer.update(grads, state.opt_state, wide)
        params = jax.tree.map(lambda p, w, u: (w + u).astype(p.dtype), state.params, wide, changes)

        def unless_skipped(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        new = TrainState(
            params=unless_skipped(params, state.params),
            opt_state=unless_skipped(opt_state, state.opt_state),
            step=state.step + done,
            updates=state.updates + finite.astype(jnp.int32),
        )
        skipped = 1.0 - finite.astype(jnp.float32)
        return new, {"grad_norm": norm, "skipped_updates": skipped, "updates": state.updates}

    def train_step(
        self, state: TrainState, batch: Batch, denominator: Array, done: Array
    ) -> tuple[TrainState, Stats]:
        """`gradient` and `apply_step` at once, for a minibatch that is one microbatch."""
        grads, stats = self.gradient(state.params, batch)
        state, applied = self.apply_step(state, grads, denominator, done)
        return state, {**stats, **applied}

    def prepare(
        self, flat: Batch, minibatch_of: Array, step: Array, num_minibatches: int
    ) -> tuple[Batch, tuple[Array, ...], Stats]:
        """From a flat batch to what the loss needs of each token.

        Args:
          flat: as `advantages.advantages` takes it.
          minibatch_of: [N] int32; the minibatch each sequence belongs to, −1 at padding.
          step: int32, the version before the batch.
          num_minibatches: M.

        Returns:
          [F] float32 arrays to gather from (advantages, loss_weights, and the proximal and
          reference logprobs when given); M float32 denominators; the version as float32 and sums
          for metrics.
        """
        out = advantages_lib.advantages(flat, self.algorithm)
        ids, mask = flat["sequence_ids"], flat["loss_mask"]
        part_of = minibatch_of.at[ids].get(mode="fill", fill_value=-1)
        weights = jnp.zeros(mask.shape, jnp.float32)
        denominators: list[Array] = []
        for index in range(num_minibatches):
            own, denominator = losses.loss_weights(
                mask & (part_of == index), ids, flat["group_ids"], self.algorithm
            )
            weights, denominators = weights + own, [*denominators, denominator]
        per_token = {"advantages": out["advantages"], "loss_weights": weights}
        for name in ("proximal_logprobs", "reference_logprobs"):
            if name in flat:
                per_token[name] = flat[name]
        sums = {
            "task_reward": jnp.sum(jnp.where(flat["valid"], flat["rewards"], 0.0)),
            "shaped_reward": jnp.sum(out["shaped_rewards"]),
            "kl_reward": jnp.sum(out["kl_rewards"]),
            "n_nonfinite_kl": out["nonfinite_kl"],
            "version": step.astype(jnp.float32),
        }
        return per_token, tuple(denominators), sums

    def gather(self, per_token: Batch, batch: Batch, version: Array, progress: Array) -> Batch:
        """The microbatch with its rows of the flat arrays, and the version being optimised.

        Args:
          per_token: [F] float32 arrays; 0 is gathered at padding.
          batch: [B, T] arrays with `flat_index`.
          version: float32, before the batch. progress: float32, share of its minibatches done.
        """
        index = batch["flat_index"]
        rows = {
            name: values.at[index].get(mode="fill", fill_value=0.0)
            for name, values in per_token.items()
        }
        kept = {name: batch[name] for name in MODEL_INPUTS}
        return {**kept, **rows, "target_version": version + progress}


MODEL_INPUTS = (
    "tokens",
    "positions",
    "segment_ids",
    "loss_mask",
    "behaviour_logprobs",
    "versions",
)


def scatter(flat: Array, flat_index: Array, values: Array) -> Array:
    """flat [F] with values [B, T] put at flat_index; what points beyond F is padding."""
    return flat.at[flat_index].set(values, mode="drop")


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
