"""The device side of training: pure functions of arrays, to be jitted.

    minibatch of one microbatch     step = gradient + apply, in one program
    of several                      accumulate each, into a donated accumulator, then apply

Losses and gradients are sums over tokens; the minibatch's denominator divides once, in `apply`.
What learns is a `Learner`: a loss and an optimizer. A run has one for the policy (or reward model),
and PPO a second one for its critic. `prepare` and `end_batch` stand around a batch's minibatches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from rlx.algorithms import advantages as advantages_lib
from rlx.algorithms import critic as critic_lib
from rlx.algorithms import kl, losses, supervised
from rlx.algorithms.algorithm import Algorithm
from rlx.model import decoder
from rlx.model import lora as lora_lib
from rlx.model import params as parameters
from rlx.model.lora import LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params

Batch = Mapping[str, Array]
Stats = dict[str, Array]


class Critic(flax.struct.PyTreeNode):
    """PPO's second network: parameters with a value head, optimizer state, updates done."""

    params: Params
    opt_state: Any
    updates: Array


class TrainState(flax.struct.PyTreeNode):
    """What an update changes.

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
        """The gradient of the microbatch's summed loss, in the parameters' dtype, and the stats."""
        return jax.grad(self.loss, has_aux=True)(params, frozen, batch)

    def empty(self, params: Params, frozen: Params | None, batch: Batch) -> tuple[Params, Stats]:
        """An accumulator of zeros: float32 gradients and stats."""
        grads, stats = jax.eval_shape(self.gradient, params, frozen, batch)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (grads, stats))

    def accumulate(
        self,
        accumulator: tuple[Params, Stats],
        params: Params,
        frozen: Params | None,
        batch: Batch,
    ) -> tuple[Params, Stats]:
        """The accumulator with one more microbatch in it."""
        return jax.tree.map(jnp.add, accumulator, self.gradient(params, frozen, batch))

    def apply(
        self, learned: Learned, grads: Params, denominator: Array, held: Array
    ) -> tuple[Learned, Stats]:
        """One optimizer update with the gradient grads / denominator, clipped by global norm.

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
        self,
        learned: Learned,
        frozen: Params | None,
        batch: Batch,
        denominator: Array,
        held: Array,
    ) -> tuple[Learned, Stats]:
        """`gradient` and `apply` at once, for a minibatch that is one microbatch."""
        grads, stats = self.gradient(learned.params, frozen, batch)
        learned, applied = self.apply(learned, grads, denominator, held)
        return learned, {**stats, **applied}


@dataclass(frozen=True)
class Steps:
    """What the functions below depend on besides arrays; fixed for a run.

    Attributes:
      model, algorithm: static descriptions; a reward model's has a value head.
      lora: of the adapters, where they are trained in place of the model; `frozen` parameters then
        are the base, and parameters that are None are the base without them.
      optimizer: of `params`.
      critic_model, critic_optimizer: of the critic; None without one.
      critic_warmup: train batches in which the critic alone learns.
      reference_mode, reference_every, reference_decay: as config.reference has them.
      temperature: > 0, the one the tokens were sampled with.
      remat, compute_dtype, chunk: as `decoder.logprobs` has them.
      clip_norm: largest global gradient norm; 0 is no limit.
    """

    model: ModelConfig
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    critic_model: Any = None
    critic_optimizer: Any = None
    critic_warmup: int = 0
    reference_mode: str = "frozen"
    reference_every: int = 1
    reference_decay: float = 0.0
    temperature: float = 1.0
    remat: str = "none"
    compute_dtype: Any = jnp.float32
    chunk: int = 1024
    clip_norm: float = 0.0
    lora: LoraConfig | None = None

    # What learns.

    @property
    def learner(self) -> Learner:
        """Of `state`: the policy, or the reward model."""
        return Learner(self.loss, self.optimizer, self.clip_norm)

    @property
    def critic_learner(self) -> Learner:
        """Of `state.critic`."""
        return Learner(self.value_loss, self.critic_optimizer, self.clip_norm)

    @property
    def follows(self) -> bool:
        """Whether the reference policy follows the trained one and so belongs to the state."""
        return self.algorithm.needs_reference and self.reference_mode != "frozen"

    def init(self, params: Params, critic_params: Params | None = None) -> TrainState:
        """The state before the first update."""
        critic = None
        if self.critic_model is not None:
            critic = Critic(
                params=critic_params or {},
                opt_state=self.critic_optimizer.init(_float32(critic_params)),
                updates=jnp.zeros((), jnp.int32),
            )
        return TrainState(
            params=params,
            opt_state=self.optimizer.init(_float32(params)),
            step=jnp.zeros((), jnp.int32),
            updates=jnp.zeros((), jnp.int32),
            kl_coefficient=jnp.float32(self.algorithm.kl_coefficient),
            reference=self._first_reference(params) if self.follows else None,
            critic=critic,
        )

    def _first_reference(self, params: Params) -> Params:
        """A copy of the policy; float32 for an average, whose steps bfloat16 would round away."""
        average = self.reference_mode == "ema"
        return jax.tree.map(
            lambda leaf: jnp.array(leaf, jnp.float32 if average else leaf.dtype), params
        )

    # Forward passes.

    def whole(self, params: Any, frozen: Any) -> Params:
        """What the decoder computes with: `params`, or the base with these adapters."""
        if self.lora is None:
            return params
        return frozen if params is None else lora_lib.attach(frozen, params, self.lora)

    def logprobs(
        self, params: Params | None, frozen: Params | None, batch: Batch
    ) -> tuple[Array, Array]:
        """Log-probabilities and entropies of a microbatch's tokens, [B, T] float32 each."""
        return decoder.logprobs(
            self.whole(params, frozen), self.model, batch,
            temperature=self.temperature, remat=self.remat,
            compute_dtype=self.compute_dtype, chunk=self.chunk,
        )  # fmt: skip

    def logprob_step(self, params: Params | None, frozen: Params | None, batch: Batch) -> Array:
        """Log-probabilities alone, for policies that are not trained: [B, T] float32."""
        return self.logprobs(params, frozen, batch)[0]

    def values(self, params: Params, config: ModelConfig, batch: Batch) -> Array:
        """The value head's number after each token, [B, T] float32."""
        return decoder.values(
            params, config, batch, remat=self.remat, compute_dtype=self.compute_dtype
        )

    def value_step(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        """The critic's V before and after each token, [B, T] float32 each."""
        after = self.values(params, self.critic_model, batch)
        return decoder.shift(after, batch["segment_ids"]), after

    # Losses.

    def loss(self, params: Params, frozen: Params | None, batch: Batch) -> tuple[Array, Stats]:
        """The microbatch's summed loss by `algorithm.loss`, and its summed stats."""
        algorithm = self.algorithm
        if algorithm.kind.scores:
            return supervised.pair_loss(self.values(params, self.model, batch), batch, algorithm)
        target, entropy = self.logprobs(params, frozen, batch)

        def policy_loss() -> tuple[Array, Stats]:
            total, stats = losses.policy_loss(target, entropy, batch, algorithm)
            return total, stats | losses.lag_stats(target, batch)

        return {
            "rollouts": policy_loss,
            "demonstrations": lambda: supervised.nll_loss(target, entropy, batch),
            "pairs": lambda: supervised.pair_loss(target, batch, algorithm),
        }[algorithm.data]()

    def value_loss(
        self, params: Params, frozen: Params | None, batch: Batch
    ) -> tuple[Array, Stats]:
        """The critic's summed loss and its summed stats."""
        del frozen
        return critic_lib.value_loss(self.value_step(params, batch)[0], batch, self.algorithm)

    # Around the minibatches.

    def prepare(
        self,
        flat: Batch,
        minibatch_of: Array,
        step: Array,
        kl_coefficient: Array,
        num_minibatches: int,
    ) -> tuple[Batch, tuple[tuple[Array, Array], ...], Stats]:
        """From a flat batch to what the loss needs of each token.

        Args:
          flat: as `advantages.advantages` takes it, but `values_after` [F] (V of the state after
            each token) in place of bootstrap_values.
          minibatch_of: [N] int32; the minibatch each sequence belongs to, −1 at padding.
          step: int32, the version before the batch.
          kl_coefficient: float32, β of this batch.
          num_minibatches: M.

        Returns:
          [F] float32 arrays to gather from (advantages, loss_weights, and where they exist
          proximal_logprobs, reference_logprobs, values and returns); for each minibatch the
          denominator of its loss and its number of trained tokens, float32; sums for metrics.
        """
        algorithm, ids = self.algorithm, flat["sequence_ids"]
        flat = {**flat, "kl_coefficient": kl_coefficient}
        if "values_after" in flat:
            flat["bootstrap_values"] = _last(flat.pop("values_after"), ids, flat["valid"].shape[0])
        out = advantages_lib.advantages(flat, algorithm)
        mask = trained = self._trained(flat)
        part_of = minibatch_of.at[ids].get(mode="fill", fill_value=-1)
        weights = jnp.zeros(mask.shape, jnp.float32)
        divisors = []
        for index in range(num_minibatches):
            part = mask & (part_of == index)
            own, denominator = losses.loss_weights(part, ids, flat["group_ids"], algorithm)
            if algorithm.second_moment:
                log_weight = flat["behaviour_logprobs"] - flat["proximal_logprobs"]
                kept = losses.within_second_moment(log_weight, part, algorithm.second_moment)
                own, trained = jnp.where(kept, own, 0.0), trained & (kept | (part_of != index))
            weights = weights + own
            divisors.append((denominator, jnp.sum(part, dtype=jnp.float32)))
        per_token = {"advantages": out["advantages"], "loss_weights": weights}
        if "values" in flat:
            per_token["returns"] = out["returns"]
        for name in ("proximal_logprobs", "reference_logprobs", "values"):
            if name in flat:
                per_token[name] = flat[name]
        sums = {
            "task_reward": jnp.sum(jnp.where(flat["valid"], flat["rewards"], 0.0)),
            "shaped_reward": jnp.sum(out["shaped_rewards"]),
            "kl_reward": jnp.sum(out["kl_rewards"]),
            "n_nonfinite_kl": out["nonfinite_kl"],
            "n_left_out": jnp.sum(flat["loss_mask"] & ~trained),
            "kl_coefficient": kl_coefficient,
            "version": step.astype(jnp.float32),
        }
        return per_token, tuple(divisors), sums

    def _trained(self, flat: Batch) -> Array:
        """The tokens that the loss is of: [F] bool."""
        mask, ids = flat["loss_mask"], flat["sequence_ids"]
        if self.algorithm.kind.scores:  # one score: of the whole answer
            return mask & ~advantages_lib.next_trained(mask, ids)[1]
        if self.algorithm.overlong_filter:
            return mask & ~flat["truncated"].at[ids].get(mode="fill", fill_value=False)
        return mask

    def gather(self, per_token: Batch, batch: Batch, sums: Stats, progress: Array) -> Batch:
        """The microbatch with its rows of the flat arrays, and the scalars of this minibatch.

        A token whose weight is 0 (filtered, or dropped by M2PO) is not trained on.

        Args:
          per_token: [F] float32 arrays; 0 is gathered at padding.
          batch: [B, T] arrays with `flat_index`.
          sums: of `prepare`. progress: float32, share of the batch's minibatches done.
        """
        index = batch["flat_index"]
        rows = {
            name: values.at[index].get(mode="fill", fill_value=0.0)
            for name, values in per_token.items()
        }
        kept = {name: batch[name] for name in MODEL_INPUTS}
        kept["sampled"] = batch["loss_mask"]
        kept["loss_mask"] = kept["loss_mask"] & (rows["loss_weights"] > 0)
        scalars = {
            "target_version": sums["version"] + progress,
            "kl_coefficient": sums["kl_coefficient"],
        }
        return {**kept, **rows, **scalars}

    def waits(self, step: Array) -> Array:
        """Whether the policy waits for its critic at this train batch; bool scalar."""
        return step < self.critic_warmup

    def end_batch(
        self, state: TrainState, reference_kl: Array, trained: Array, trajectories: Array
    ) -> TrainState:
        """The state after a train batch: one version on, β and the reference policy with it.

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
            keep = jnp.float32(self.reference_decay)
            if self.reference_mode == "copy":
                keep = jnp.where(step % self.reference_every == 0, 0.0, 1.0)
            reference = jax.tree.map(
                lambda old, new: (keep * old + (1.0 - keep) * new).astype(old.dtype),
                reference, state.params,
            )  # fmt: skip
        return state.replace(step=step, kl_coefficient=coefficient, reference=reference)


MODEL_INPUTS = (
    "tokens",
    "positions",
    "segment_ids",
    "loss_mask",
    "behaviour_logprobs",
    "versions",
)


def trained_model(config: ModelConfig, params: Params, algorithm: Algorithm) -> Params:
    """What is trained: a policy's parameters, or those with a reward model's value head."""
    if not algorithm.kind.scores or config.value_head:
        return params
    return parameters.with_value_head(params, config)[0]


def scatter(flat: Array, flat_index: Array, values: Array) -> Array:
    """flat [F] with values [B, T] put at flat_index; what points beyond F is padding."""
    return flat.at[flat_index].set(values, mode="drop")


def _last(x: Array, sequence_ids: Array, size: int) -> Array:
    """x at the last token of each sequence; [size] float32, 0 for none."""
    index = jnp.arange(x.shape[0])
    last = jax.ops.segment_max(index, sequence_ids, size)
    return jnp.where(last >= 0, x[jnp.clip(last, 0)], 0.0)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
