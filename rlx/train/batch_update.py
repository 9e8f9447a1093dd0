"""One train batch, by steps that the trainers in JAX and torch share; imports neither library.

    groups ─▶ flatten ─▶ plan, pack ─▶ (proximal, reference logprobs; values) ─▶ advantages, loss
           weights ─▶ for each minibatch: one optimizer update (and one of the critic) ─▶ end of
           the batch

SFT, reward models and DPO differ only in their row of the preset table.
Shapes: F tokens of the flat axis, B rows of a microbatch, T tokens of a row.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.algorithms import losses
from rlx.algorithms.algorithm import Algorithm
from rlx.base import Group, UserError
from rlx.model import kept_tokens
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.train import objective, packing, prefix_trees, step_metrics
from rlx.train.step_metrics import Metrics
from rlx.train.train_options import TrainOptions, rate_at

State = Any  # has `critic`, or None, and `reference`, where that follows the policy
Arrays = dict[str, Any]  # on the trainer's devices


class BatchUpdate:
    """The batch methods of the `Update` contract, made of primitives of a trainer.

    `row_shards` devices share a microbatch's rows, `context` devices share a row.
    """

    def __init__(self, options: TrainOptions, row_shards: int = 1, context: int = 1):
        self._options = options
        self._algorithm: Algorithm = options.algorithm
        self._row_shards, self._token_budget = row_shards, options.token_budget * context
        self._attention_cost = 0.0  # as of `packing.plan`
        self._tree_cost = self._fork_cost = 0.0  # as of `prefix_trees.plan`
        self._prefix_mode = "off"  # of `prefix_trees.MODES`
        self._reference: Any = None  # the frozen one; None with LoRA: the base without adapters

    def _share_prefixes(self, obstacle: str) -> None:
        """Take up `train.share_prefixes`; UserError if it is on and there is an obstacle to it."""
        self._prefix_mode = "off" if obstacle else self._options.share_prefixes
        if obstacle and self._options.share_prefixes == "on":
            raise UserError(f"train.share_prefixes=on and {obstacle}; set it to auto or off")

    def _wrong_trees(self, kernel: str, error: Callable[[], float]) -> str:
        """Return an obstacle for `_share_prefixes` unless a kernel's error over trees is small."""
        if self._options.share_prefixes == "off":
            return ""
        try:
            amount = error()
        except Exception as problem:  # compilers raise errors of many kinds
            text = (str(problem) or repr(problem)).splitlines()[0]
            return f"{kernel} has no attention over trees on this device ({text})"
        if amount < prefix_trees.ERROR:
            return ""
        return f"{kernel}'s attention over trees is wrong by {amount:.1%} on this device"

    # The primitives, which each trainer defines.

    model: ModelConfig
    _put: Callable[[Any], Arrays]  # move flat arrays to every device
    _put_rows: Callable[[Any], Arrays]  # move a packed microbatch to the devices that share it
    _to_host: Callable[[Any], Any]  # wait for arrays in dicts and sequences; return numpy's
    _policy: Callable[[State], Any]  # the trained policy, for `_logprobs_of`
    _logprobs_of: Callable[[Any, Arrays], Any]  # (policy, microbatch) → [B, T] float32, nats
    _values_of: Callable[[Any, Arrays], tuple]  # (critic, microbatch) → V before, V after, [B, T]
    _scatter: Callable[..., Any]  # (flat_F, flat_index_BT, values_BT) → flat_F, which is donated
    _prepare: Callable[..., tuple]  # `objective.prepare`, of (state, flat, minibatch_of, count)
    _gather: Callable[..., Arrays]  # `objective.gather`, with other inputs of the model
    _waits: Callable[[Any], Any]  # step → bool: the policy waits for its critic
    # (state, microbatches, denominator, wait, critic=False) → state after one update of the policy
    # or critic, unless it waits; summed stats.
    _learn: Callable[..., tuple[State, Arrays]]
    _stats: Callable[[State, Arrays], Arrays]  # summed, of a microbatch without training on it
    # (state, summed KL to the reference, its tokens, trajectories) → state of the next version,
    # with its β and reference policy.
    _end_batch: Callable[..., State]

    def _pack(
        self, flat: packing.FlatBatch, ids: np.ndarray
    ) -> tuple[packing.PackPlan, list[Arrays]]:
        """Return the plan for sequences `ids` [N'], and their microbatches on the devices."""
        sizes, limits = flat.sizes[ids], (self._token_budget, self._options.row_buckets)
        how: dict[str, Any] = {
            "attention_cost": self._attention_cost,
            "shards": self._row_shards,
            "row_mates": flat.row_mates(ids) if self._algorithm.data == "pairs" else None,
        }
        plan = packing.plan(sizes, *limits, **how)
        trees = None
        if self._prefix_mode != "off":
            how |= {"tree_cost": self._tree_cost, "fork_cost": self._fork_cost}
            trees = prefix_trees.plan(flat, ids, *limits, **how)
            most = prefix_trees.GAIN * self._cost(plan, sizes)
            if self._prefix_mode == "auto" and self._cost(trees, sizes) > most:
                trees = None
        if trees is None:
            parts = packing.microbatches(flat, ids, plan)
        else:
            plan, parts = trees, prefix_trees.microbatches(flat, ids, trees)
        for part in parts if flat.masks else ():
            index, vocab = part["flat_index"], self.model.vocab_size
            part |= kept_tokens.batch_arrays(**flat.masks, index_BT=index, vocab=vocab)
        return plan, [self._put_rows(part) for part in parts]

    def _cost(self, plan: packing.PackPlan, sizes: np.ndarray) -> float:
        """Return the work of a plan, of sequences of these sizes, in tokens."""
        return plan.padded_tokens + self._tree_cost * plan.token_pairs(sizes)

    def _on_flat_axis(
        self, batches: Sequence[Arrays], size: int, count: int, function: Callable[[Arrays], tuple]
    ) -> tuple:
        """Return the `count` results [B, T] of function(microbatch) as flat [size] float32."""
        zeros = np.zeros(size, np.float32)
        out = [self._put({"zeros": zeros})["zeros"] for _ in range(count)]
        for batch in batches:
            for i, x_BT in enumerate(function(batch)):
                out[i] = self._scatter(out[i], batch["flat_index"], x_BT)
        return tuple(out)

    def _score(self, policy: Any, batches: Sequence[Arrays], size: int) -> Any:
        """Return the log-probabilities of all tokens under a policy, [F] float32, nats."""
        return self._on_flat_axis(batches, size, 1, lambda b: (self._logprobs_of(policy, b),))[0]

    def _begin(self, state: State, groups: Sequence[Group], minibatches: int) -> tuple:
        """Pack groups and score them by the other networks.

        Returns the flat batch; for each minibatch its plan and its microbatches on the devices; the
        result of `objective.prepare`.
        """
        flat, algorithm = packing.flatten(groups), self._algorithm
        objective.require(groups, flat, algorithm)
        parts = packing.minibatch_ids(flat, minibatches)
        plans, packed = zip(*(self._pack(flat, ids) for ids in parts), strict=True)
        batches, size = [b for part in packed for b in part], len(flat.tokens["tokens"])
        arrays = self._put(flat.arrays())
        if algorithm.needs_proximal_pass(len(parts)):
            arrays["proximal_logprobs"] = self._score(self._policy(state), batches, size)
        if algorithm.needs_reference:
            reference = self._reference if state.reference is None else state.reference
            arrays["reference_logprobs"] = self._score(reference, batches, size)
        if state.critic is not None:
            arrays["values"], arrays["values_after"] = self._on_flat_axis(
                batches, size, 2, lambda b: self._values_of(state.critic, b)
            )
        prepared = self._prepare(state, arrays, flat.minibatch_of(parts), len(parts))
        return flat, plans, packed, prepared

    def update(self, state: State, groups: Sequence[Group]) -> tuple[State, Mapping[str, Any]]:
        """Train on groups; return the new state and lazy `Metrics`; raises for unfit groups."""
        o = self._options
        flat, plans, packed, prepared = self._begin(state, groups, o.minibatches)
        per_token, divisors, sums = prepared
        waits, results = self._waits(state.step), []
        for index, batches in enumerate(packed):
            progress = np.float32(index / len(packed))
            inputs = [self._gather(per_token, b, sums, progress) for b in batches]
            denominator, tokens = divisors[index]
            state, stats = self._learn(state, inputs, denominator, waits)
            if state.critic is not None:
                state, more = self._learn(state, inputs, tokens, np.bool_(False), critic=True)
                del more["updates"]
                names = ("grad_norm", "skipped_updates")
                stats |= {f"critic_{k}" if k in names else k: value for k, value in more.items()}
            results.append(stats)
        reference_kl, trained = (
            sum(stats.get(name, 0.0) for stats in results)
            for name in ("reference_kl", "n_valid_tokens")
        )
        state = self._end_batch(state, reference_kl, trained, np.float32(flat.num_sequences))
        metrics = step_metrics.host_metrics(groups, flat, plans)
        metrics["model_flops"] = self._flops(flat.sizes, [plan.shared for plan in plans])
        versions = step_metrics.count_versions(flat)
        denominators = [denominator for denominator, _ in divisors]

        def compute() -> dict[str, Any]:
            parts, divided, totals = self._to_host((results, denominators, sums))
            return {
                **step_metrics.device_metrics(
                    parts, divided, totals, flat.num_runs,
                    lambda updates: rate_at(o.optimizer, o.policy_updates, updates, np),
                ),
                **metrics,
                **step_metrics.staleness(versions, int(totals["version"])),
            }  # fmt: skip

        return state, Metrics(compute)

    def _flops(self, sizes: np.ndarray, shared: Sequence[np.ndarray]) -> float:
        """Return the FLOPs of a batch's passes, without padding and what remat repeats.

        `shared` has an array for each minibatch, as of `packing.PackPlan`.
        """
        algorithm, valued = self._algorithm, dataclasses.replace(self.model, value_head=True)
        passes = 2 if self._options.lora else 3  # frozen weights have no gradient
        passes += algorithm.needs_proximal_pass(len(shared)) + algorithm.needs_reference

        def forward(model: ModelConfig) -> float:
            prefix = np.concatenate(shared)
            return parameters.forward_flops(model, sizes) - parameters.forward_flops(model, prefix)

        return passes * forward(self.model) + 4 * algorithm.critic * forward(valued)

    def evaluate(self, state: State, groups: Sequence[Group]) -> dict[str, float]:
        _, _, packed, (per_token, divisors, sums) = self._begin(state, groups, 1)
        inputs = (self._gather(per_token, batch, sums, np.float32(0.0)) for batch in packed[0])
        results = [self._stats(state, batch) for batch in inputs]
        parts, denominator = self._to_host((results, divisors[0][0]))
        return losses.summarise(step_metrics.totals(parts), float(denominator))

    def logprobs(self, state: State, groups: Sequence[Group]) -> list[np.ndarray]:
        flat = packing.flatten(groups)
        _, batches = self._pack(flat, np.arange(flat.num_sequences))
        scores = self._score(self._policy(state), batches, len(flat.tokens["tokens"]))
        scores = np.asarray(self._to_host(scores))
        return [scores[a : a + n] for a, n in zip(flat.starts, flat.sizes, strict=True)]


def require_same(path: Path, have: Mapping[str, str], want: Mapping[str, str]) -> None:
    """Raise UserError unless a checkpoint's state has this run's leaves, by name → description."""
    for name in [*want, *have]:
        if have.get(name) != want.get(name):
            raise UserError(
                f"checkpoint {path} has {name} as {have.get(name, 'nothing')}, this run wants "
                f"{want.get(name, 'nothing')}; use the model, algorithm and optimizer that it was "
                "made with, or another workdir"
            )
