"""The metrics of one train step, computed when they are first read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.algorithms import losses
from rlx.base import Group, info_means
from rlx.train.packing import FlatBatch, PackPlan

# Sums over a microbatch's tokens, of L layers and E experts; see model.experts.Routing.
ROUTING = ("router_load", "router_chance", "router_entropy")


class Metrics(Mapping[str, Any]):
    """A read-only dict of metrics; the first read waits for the device, once."""

    def __init__(self, compute: Callable[[], dict[str, Any]]):
        self._compute: Callable[[], dict[str, Any]] | None = compute
        self._values: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        if self._compute is not None:
            self._values, self._compute = self._compute(), None
        return self._values

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"Metrics({self._values if self._compute is None else 'not read yet'})"


def host_metrics(groups: Sequence[Group], flat: FlatBatch, plans: Sequence[PackPlan]) -> dict:
    """Return the metrics that need no device: sizes and shares.

    task_reward: mean over the samples, as the environment gave it. avg_seq_len, avg_prompt_len:
    tokens (a prompt ends before the first sampled token). n_tokens: prompts included.
    n_shared_tokens: of them, those that are computed for another sample (train.share_prefixes).
    no_eos_ratio: share that ended by length. pad_ratio: share of padding in the computed tokens.
    crossed_ratio: see that function.
    info/*, reward/*: means of the trajectories' own scalars.
    """
    count = flat.num_sequences
    mask = flat.tokens["loss_mask"][: flat.num_tokens]
    positions = flat.tokens["positions"][: flat.num_tokens]
    size_of_token = np.repeat(flat.sizes, flat.sizes)
    prompt = np.minimum.reduceat(np.where(mask, positions, size_of_token), flat.starts)
    shared = sum(int(plan.shared.sum()) for plan in plans)
    padded = sum(plan.padded_tokens for plan in plans)
    rewards: dict[tuple[int, str], list[float]] = {}
    for index, t in ((i, t) for i, group in enumerate(groups) for t in group.trajectories):
        rewards.setdefault((index, t.run_id), []).append(t.run_reward)
    return {
        "task_reward": float(np.mean([np.mean(parts) for parts in rewards.values()])),
        "n_seqs": count,
        "n_prompts": flat.num_groups,
        "n_tokens": flat.num_tokens,
        "n_shared_tokens": shared,
        "n_microbatches": sum(len(plan.shapes) for plan in plans),
        "avg_seq_len": flat.num_tokens / count,
        "avg_prompt_len": float(prompt.mean()),
        "no_eos_ratio": float(flat.sequences["truncated"].sum()) / count,
        "crossed_ratio": crossed_ratio(groups),
        "pad_ratio": 1 - (flat.num_tokens - shared) / padded,
        "row_length": max(plan.row_length for plan in plans),
        **info_means(t for group in groups for t in group.trajectories),
    }


def crossed_ratio(groups: Sequence[Group]) -> float:
    """Return the share of trained tokens that came after a weight update within their turn."""
    crossed = trained = 0
    for t in (t for group in groups for t in group.trajectories):
        at = np.flatnonzero(t.loss_mask)
        turns = 0 * at if t.turn_ids is None else t.turn_ids[at]
        _, first, turn = np.unique(turns, return_index=True, return_inverse=True)
        crossed += int((t.versions[at] > t.versions[at[first]][turn]).sum())
        trained += len(at)
    return crossed / max(trained, 1)


def count_versions(flat: FlatBatch) -> dict[int, int]:
    """Return the number of trained tokens by policy version; a dataset's tokens have none."""
    trained = flat.tokens["versions"][flat.tokens["loss_mask"]]
    trained = trained[trained >= 0]
    versions, counts = np.unique(trained, return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))


def staleness(tokens_per_version: Mapping[int, int], version: int) -> dict[str, Any]:
    """Return the lag of trained tokens behind `version`: min, mean, max, and tokens by lag."""
    lags = {version - old: count for old, count in tokens_per_version.items()}
    total = sum(lags.values())
    return {
        "staleness_min": min(lags, default=0),
        "staleness_mean": sum(lag * n for lag, n in lags.items()) / max(total, 1),
        "staleness_max": max(lags, default=0),
        "staleness_histogram": {str(lag): lags[lag] for lag in sorted(lags)},
        "tokens_per_version": {str(v): tokens_per_version[v] for v in sorted(tokens_per_version)},
    }


def totals(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sums of microbatches' or minibatches' stats, except ROUTING."""
    return {k: float(sum(part[k] for part in parts)) for k in parts[0] if k not in ROUTING}


def routing_metrics(minibatches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return metrics of a mixture's routers; {} for a model without experts.

    expert_load: each expert's share of the choices, mean over layers. expert_max_share: largest
    share of an expert in a layer; 1 / E if even. expert_balance: `experts.balance_loss` of the
    whole batch; 1 if even. router_entropy: of the probabilities before the choice, nats a token and
    layer.
    """
    if ROUTING[0] not in minibatches[0]:
        return {}
    load, chance, entropy = (
        np.sum([stats[name] for stats in minibatches], axis=0, dtype=np.float64) for name in ROUTING
    )
    share = load / np.maximum(load.sum(-1, keepdims=True), 1)
    mean = chance / np.maximum(chance.sum(-1, keepdims=True), 1)
    return {
        "expert_load": {str(i): float(x) for i, x in enumerate(share.mean(0))},
        "expert_max_share": float(share.max()),
        "expert_balance": float(share.shape[-1] * (share * mean).sum(-1).mean()),
        "router_entropy": float(entropy.sum() / np.maximum(chance.sum(), 1)),
    }


def device_metrics(
    minibatches: Sequence[Mapping[str, Any]],
    denominators: Any,
    sums: Mapping[str, Any],
    num_runs: int,
    schedule: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return the metrics of the device's sums, which are on the host by now.

    kl_reward: mean per trained token. n_left_out: tokens removed by a filter (overlong_filter,
    M2PO). kl_coefficient: β. final_reward: mean of the shaped reward and the summed KL penalty.
    grad_norm: mean over the minibatches, before clipping. lag_kl: of the first minibatch
    (`losses.lag_stats`). For others see `losses.summarise`.
    """
    total = totals(minibatches)
    skipped, norms = total.pop("skipped_updates"), total.pop("grad_norm")
    critic = {}
    if "critic_grad_norm" in total:
        critic["critic_skipped_updates"] = total.pop("critic_skipped_updates")
        critic["critic_grad_norm"] = total.pop("critic_grad_norm") / len(minibatches)
    del total["updates"]
    for name in losses.LAG:  # later minibatches see an updated policy
        if name in total:
            total[name] = float(minibatches[0][name])
    shaped, penalty = float(sums["shaped_reward"]), float(sums["kl_reward"])
    return {
        **losses.summarise(total, float(np.sum(denominators))),
        **critic,
        **routing_metrics(minibatches),
        "kl_reward": penalty / max(total["n_valid_tokens"], 1.0),
        "final_reward": (shaped + penalty) / num_runs,
        "n_nonfinite_kl": float(sums["n_nonfinite_kl"]),
        "n_left_out": float(sums["n_left_out"]),
        "kl_coefficient": float(sums["kl_coefficient"]),
        "grad_norm": norms / len(minibatches),
        "skipped_updates": skipped,
        "learning_rate": float(schedule(minibatches[-1]["updates"])),
    }
