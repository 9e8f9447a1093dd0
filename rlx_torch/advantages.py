"""From rewards to advantages in torch: as `rlx.algorithms.advantages`, same names, same order.

Shapes: F tokens of the flat axis, N trajectories, K of either. None depends on the data, so a whole
call compiles to one graph.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.algorithms import signatures
from rlx.algorithms.algorithm import Algorithm, choose, require_reference
from rlx.algorithms.signatures import AdvantageInputs
from rlx_torch import kl
from rlx_torch.segments import dense_ranks, same_shape, segment_extreme, segment_sum, take

EPS = 1e-5
BLOCK = 32  # tokens that `_recur` walks through one by one


@torch.no_grad()
def advantages(flat: Mapping[str, Tensor], algorithm: Algorithm) -> dict[str, Tensor]:
    """Return the per-token advantages of one whole train batch.

    Args:
      flat: what the JAX function takes, as tensors; ids int32 or int64.
      algorithm: the row of the preset table.

    Returns:
      advantages, returns, kl_rewards, [F] float32; shaped_rewards [N] float32; nonfinite_kl, an
      integer scalar. No gradient.

    Raises:
      UserError: KL in the reward without `reference_logprobs`.
    """
    mask, ids, valid = flat["loss_mask"], flat["sequence_ids"], flat["valid"]
    same_shape(mask, ids, flat["behaviour_logprobs"])
    same_shape(flat["rewards"], flat["group_ids"], flat["truncated"], valid)
    lengths = segment_sum(mask.int(), ids, valid.shape[0])
    shaped = shape_rewards(flat["rewards"].float(), lengths, algorithm)
    peers_N, peers_F = peers(flat, algorithm)
    kl_rewards, nonfinite_kl = kl_penalty(flat, algorithm)
    values = flat["values"] if "values" in flat else torch.zeros_like(kl_rewards)
    after_end = torch.zeros_like(shaped)
    if algorithm.bootstrap_truncated and "bootstrap_values" in flat:
        after_end = torch.where(flat["truncated"], flat["bootstrap_values"], 0.0)
    inputs = AdvantageInputs(
        rewards=shaped, group_ids=peers_N, valid=valid, truncated=flat["truncated"],
        sequence_ids=ids, mask=mask, kl_rewards=kl_rewards, values=values, bootstrap=after_end,
    )  # fmt: skip
    known = mask
    if algorithm.advantage_function is None:
        raw = choose("advantage", algorithm.advantage, ADVANTAGES)(inputs, algorithm)
    else:
        raw = signatures.own_advantage(inputs, algorithm)
        known = mask & torch.isfinite(raw)
    out = standardise(
        raw, peers_F, known, mean=algorithm.advantage_mean, std=algorithm.advantage_std
    )
    return {
        "advantages": out if known is mask else torch.where(mask & ~known, torch.nan, out),
        "returns": torch.where(known, raw + values, 0.0),
        "shaped_rewards": torch.where(valid, shaped, 0.0),
        "kl_rewards": kl_rewards,
        "nonfinite_kl": nonfinite_kl,
    }


def peers(flat: Mapping[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return ids of those who share a group's statistics: of trajectories [N], of tokens [F]."""
    groups, ids = flat["group_ids"], flat["sequence_ids"]

    def own(groups: Tensor) -> tuple[Tensor, Tensor]:
        return groups, take(groups, ids, -1)

    def by_turn() -> tuple[Tensor, Tensor]:
        last = flat["loss_mask"] & ~next_trained(flat["loss_mask"], ids)[1]
        turns = segment_sum(torch.where(last, flat["turn_ids"], 0), ids, groups.shape[0])
        return _pairs(groups, turns), _pairs(own(groups)[1], flat["turn_ids"])

    table = {
        "prompt": lambda: own(groups),
        "agent": lambda: own(_pairs(groups, flat["agent_ids"])),
        "turn": by_turn,
    }
    return choose("peers", algorithm.peers, table)()


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return one integer for each pair of integers; b is not negative, negative a stay so."""
    return a * (b.max() + 1) + b


def shape_rewards(rewards_N: Tensor, lengths_N: Tensor, algorithm: Algorithm) -> Tensor:
    """Return rewards with the overlong penalty, scaled and clipped; [N] float32.

    Args:
      rewards_N: [N] float32. lengths_N: [N] int, trained tokens of each trajectory.
    """
    same_shape(rewards_N, lengths_N)
    if algorithm.overlong_buffer:
        excess = lengths_N - (algorithm.overlong_limit - algorithm.overlong_buffer)
        penalty = -excess / algorithm.overlong_buffer * algorithm.overlong_factor
        rewards_N = rewards_N + penalty.clamp(max=0.0)
    scaled = (rewards_N + algorithm.reward_bias) * algorithm.reward_scale
    return scaled.clamp(-algorithm.reward_clip, algorithm.reward_clip)


def standardise(
    x: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    mean: str,
    std: str,
    leave_one_out: bool = False,
) -> Tensor:
    """Return (x − μ) / (σ + 1e-5) over valid entries of each group, of the batch, or not at all.

    Args:
      x: [K] float32. group_ids: [K] int, any values. valid: [K] bool.
      mean, std: group | batch | none; std also mean, the one taken off.

    Returns:
      [K] float32, 0 where not valid.
    """
    same_shape(x, group_ids, valid)
    x = torch.where(valid, x, 0.0)
    peers: dict[str, Tensor | None] = {"batch": None, "none": None, "group": None}
    choose("reward_mean or advantage_mean", mean, peers)
    choose("reward_std or advantage_std", std, {**peers, "mean": None})
    if "group" in (mean, std):
        peers["group"] = dense_ranks(group_ids)
    out = x
    if mean != "none":
        centred, n = _centre(x, peers[mean], valid)
        out = centred
        if leave_one_out:
            out = torch.where(n > 1, centred * (n / (n - 1).clamp(min=1)), x)
    if std == "mean":
        centre = x - out
        out = torch.where(centre > EPS, out / torch.where(centre > EPS, centre, 1.0), 0.0)
    elif std != "none":
        centred, n = _centre(x, peers[std], valid)
        variance = _mean(centred**2, n, peers[std], valid) * (n / (n - 1).clamp(min=1))
        out = out / (torch.where(n > 1, variance.sqrt(), 1.0) + EPS)
    return torch.where(valid, out, 0.0)


def _centre(x: Tensor, index: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return x minus its peers' mean, and how many they are, [K] each."""
    n = _total(torch.ones_like(x), index, valid)
    candidates = torch.where(valid, x, torch.inf)
    if index is None:
        least = candidates.amin()
    else:
        least = segment_extreme(candidates, index, x.numel(), "amin", torch.inf)[index]
    x = x - torch.where(valid, least, 0.0)  # exact zeros where all are equal
    return x - _mean(x, n, index, valid), n


def _mean(x: Tensor, n: Tensor, index: Tensor | None, valid: Tensor) -> Tensor:
    """Return the mean of each entry's n valid peers, [K]; a second pass corrects the rounding."""
    n = n.clamp(min=1)
    first = _total(x, index, valid) / n
    return first + _total(x - first, index, valid) / n


def _total(x: Tensor, index: Tensor | None, valid: Tensor) -> Tensor:
    """Return the sum over each entry's valid peers, [K]."""
    x = torch.where(valid, x, 0.0)
    if index is None:
        return x.sum().expand_as(x)
    return segment_sum(x, index, x.numel())[index]


def kl_penalty(flat: Mapping[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return −β·KL(π ‖ π_ref) of each trained token, [F] float32, and how many were not finite.

    Raises:
      UserError: without `reference_logprobs`.
    """
    mask = flat["loss_mask"]
    if not algorithm.kl_in_reward:
        zeros = torch.zeros_like(mask, dtype=torch.float32)
        return zeros, torch.zeros_like(mask[0], dtype=torch.int64)
    reference = require_reference(flat)
    policy = flat.get("proximal_logprobs", flat["behaviour_logprobs"])
    finite = torch.isfinite(policy - reference)
    coefficient = flat.get("kl_coefficient", algorithm.kl_coefficient)
    penalty = -coefficient * kl.estimate(policy, reference, algorithm.kl_estimator)
    return torch.where(mask & finite, penalty, 0.0), (mask & ~finite).sum()


def token_rewards(rewards_N: Tensor, loss_mask_F: Tensor, sequence_ids_F: Tensor) -> Tensor:
    """Return each trajectory's reward on its last trained token, 0 elsewhere; [F] float32."""
    same_shape(loss_mask_F, sequence_ids_F)
    last = loss_mask_F & ~next_trained(loss_mask_F, sequence_ids_F)[1]
    return torch.where(last, take(rewards_N, sequence_ids_F, 0.0), 0.0)


def gae(
    rewards_F: Tensor,
    values_F: Tensor,
    loss_mask_F: Tensor,
    sequence_ids_F: Tensor,
    bootstrap_N: Tensor,
    algorithm: Algorithm,
) -> Tensor:
    """Estimate advantages over trained tokens only, generalised (1506.02438).

    δ_t = r_t + γ·V_{t'} − V_t and A_t = δ_t + γλ·A_{t'}, t' the next trained token of the same
    trajectory; after the last one V is `bootstrap_N` and A is 0.

    Args:
      rewards_F, values_F: [F] float32. loss_mask_F: [F] bool. sequence_ids_F: [F] int.
      bootstrap_N: [N] float32.

    Returns:
      [F] float32, 0 where not trained.
    """
    same_shape(rewards_F, values_F, loss_mask_F, sequence_ids_F)
    following, has_next = next_trained(loss_mask_F, sequence_ids_F)
    after_end = take(bootstrap_N, sequence_ids_F, 0.0)
    next_values = torch.where(has_next, values_F[following], after_end)
    delta = rewards_F + algorithm.gamma * next_values - values_F
    decay = algorithm.gamma * algorithm.lam * has_next
    # A = b + a·A_next at trained tokens, A = A_next between them
    a = torch.where(loss_mask_F, decay, 1.0)
    b = torch.where(loss_mask_F, delta, 0.0)
    return torch.where(loss_mask_F, _recur(a, b), 0.0)


def gae_advantage(inputs: AdvantageInputs[Tensor], algorithm: Algorithm) -> Tensor:
    """Return GAE of rewards normalised by their peers', and of the penalty of KL; [F] float32."""
    normalised = standardise(
        inputs.rewards, inputs.group_ids, inputs.valid, mean=algorithm.reward_mean,
        std=algorithm.reward_std, leave_one_out=algorithm.leave_one_out,
    )  # fmt: skip
    rewards = inputs.kl_rewards + token_rewards(normalised, inputs.mask, inputs.sequence_ids)
    given = inputs.values, inputs.mask, inputs.sequence_ids, inputs.bootstrap
    return gae(rewards, *given, algorithm)


# A of each token by `algorithm.advantage`; the one place where it is looked up.
ADVANTAGES = {"gae": gae_advantage}


def _recur(a: Tensor, b: Tensor) -> Tensor:
    """Return x with x[t] = b[t] + a[t]·x[t + 1] and x[F] = 0: by steps in all blocks at once.

    Then the blocks' own recurrence, of a BLOCK-th of the size, gives each what follows it.
    """
    size = a.shape[0]
    if size == 1:
        return b
    missing = -size % BLOCK
    a, b = (pad(x, (0, missing)).view(-1, BLOCK).t().contiguous() for x in (a, b))
    products, sums = [a[-1]], [b[-1]]
    for step in reversed(range(BLOCK - 1)):
        products.append(a[step] * products[-1])
        sums.append(torch.addcmul(b[step], a[step], sums[-1]))
    after = pad(_recur(products[-1], sums[-1])[1:], (0, 1))
    x = torch.addcmul(torch.stack(sums[::-1]), torch.stack(products[::-1]), after)
    return x.t().reshape(-1)[:size]


def next_trained(loss_mask_F: Tensor, sequence_ids_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the next trained token ([F] int64, in range); whether there is one."""
    size = loss_mask_F.shape[0]
    index = torch.arange(size, device=loss_mask_F.device)
    index = torch.where(loss_mask_F, index, size)
    at_or_after = index.flip(0).cummin(0).values.flip(0)
    following = pad(at_or_after[1:], (0, 1), value=size)
    safe = following.clamp(max=size - 1)
    return safe, (following < size) & (sequence_ids_F[safe] == sequence_ids_F)
