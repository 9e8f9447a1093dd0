"""Advantages of a flat batch, computed from its rewards.

Shapes: F tokens of the flat axis, N trajectories, K of either. Trajectories lie end to end:
`sequence_ids[t]` in 0 … N − 1 is the trajectory of token t (N at padding). Both axes may be padded.
Groups are identified by id, not by position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlx.algorithms import kl, signatures
from rlx.algorithms.algorithm import Algorithm, choose, require_reference
from rlx.algorithms.array_ops import Array, ops_of, same_shape
from rlx.algorithms.signatures import AdvantageInputs
from rlx.base import Group

EPS = 1e-5


def advantages(flat: Mapping[str, Array], algorithm: Algorithm) -> dict[str, Array]:
    """Return the per-token advantages of one whole train batch.

    The order is shape_rewards, kl_penalty, the function of `algorithm.advantage` (ADVANTAGES, or a
    user's own), standardise.

    Args:
      flat: loss_mask [F] bool; sequence_ids [F] int32, trajectories contiguous; rewards [N] f32;
        group_ids [N] int; truncated [N] bool; valid [N] bool (false for padding);
        behaviour_logprobs [F] f32. Optional: run_ids [N] int, equal for the parts of one run, which
        count as one in its group; proximal_logprobs, reference_logprobs, values (V of the state in
        which token t was chosen), each [F] f32; bootstrap_values [N] f32 (V of the state after the
        last token); baselines [N] f32, subtracted from the rewards; kl_coefficient, f32 scalar,
        else the algorithm's; for peers=agent agent_ids [N] int, for peers=turn turn_ids [F] int.
      algorithm: the row of the preset table.

    Returns:
      advantages [F] f32, 0 where not trained, NaN where a user's own is not finite; returns [F] f32
      (A + V before normalisation); shaped_rewards [N] f32 (after penalty, scale and clip, before
      baseline and normalisation); kl_rewards [F] f32, ≤ 0 for k2 and k3; nonfinite_kl, int32:
      number of trained tokens that were left out because their KL was not finite. UserError for
      KL in the reward without `reference_logprobs`.
    """
    mask, ids, valid = flat["loss_mask"], flat["sequence_ids"], flat["valid"]
    same_shape(mask, ids, flat["behaviour_logprobs"])
    same_shape(flat["rewards"], flat["group_ids"], flat["truncated"], valid)
    ops = ops_of(mask)
    lib = ops.lib
    lengths = ops.segment_sum(lib.where(mask, 1, 0), ids, valid.shape[0])
    rewards = ops.float32(flat["rewards"])
    plain = shaped = shape_rewards(rewards, lengths, algorithm)
    if "baselines" in flat:
        shaped = shape_rewards(rewards - flat["baselines"], lengths, algorithm)
    peers_N, peers_F = peers(flat, algorithm)
    kl_rewards, nonfinite_kl = kl_penalty(flat, algorithm)
    values = flat.get("values", lib.zeros_like(kl_rewards))
    after_end = lib.zeros_like(shaped)
    if algorithm.bootstrap_truncated and "bootstrap_values" in flat:
        after_end = lib.where(flat["truncated"], flat["bootstrap_values"], 0.0)
    inputs = AdvantageInputs(
        rewards=shaped, group_ids=peers_N, valid=valid, truncated=flat["truncated"],
        sequence_ids=ids, mask=mask, kl_rewards=kl_rewards, values=values, bootstrap=after_end,
        run_ids=flat.get("run_ids"),
    )  # fmt: skip
    finite = mask
    if algorithm.advantage_function is None:
        raw = choose("advantage", algorithm.advantage, ADVANTAGES)(inputs, algorithm)
    else:
        raw = signatures.own_advantage(inputs, algorithm)
        finite = mask & lib.isfinite(raw)
    out = standardise(
        raw, peers_F, finite, mean=algorithm.advantage_mean, std=algorithm.advantage_std
    )
    return {
        "advantages": out if finite is mask else lib.where(mask & ~finite, lib.nan, out),
        "returns": lib.where(finite, raw + values, 0.0),
        "shaped_rewards": lib.where(valid, plain, 0.0),
        "kl_rewards": kl_rewards,
        "nonfinite_kl": nonfinite_kl,
    }


def peers(flat: Mapping[str, Array], algorithm: Algorithm) -> tuple[Array, Array]:
    """Return ids, equal within a group of statistics: of trajectories [N], of tokens [F], int.

        prompt  all trajectories of a prompt
        agent   trajectories of one agent in it
        turn    tokens of one turn in it

    The reward of a trajectory with several turns belongs to the turn of its last trained token.
    """
    groups, ids = flat["group_ids"], flat["sequence_ids"]
    ops = ops_of(groups)

    def own(groups: Array) -> tuple[Array, Array]:
        return groups, ops.take(groups, ids, -1)

    def by_turn() -> tuple[Array, Array]:
        last = flat["loss_mask"] & ~next_trained(flat["loss_mask"], ids)[1]
        turns = ops.segment_sum(ops.lib.where(last, flat["turn_ids"], 0), ids, groups.shape[0])
        return _pairs(groups, turns), _pairs(own(groups)[1], flat["turn_ids"])

    table = {
        "prompt": lambda: own(groups),
        "agent": lambda: own(_pairs(groups, flat["agent_ids"])),
        "turn": by_turn,
    }
    return choose("peers", algorithm.peers, table)()


def _pairs(a: Array, b: Array) -> Array:
    """Return an integer for each pair of integers, b ≥ 0; it is negative if a is."""
    return a * (b.max() + 1) + b


def shape_rewards(rewards_N: Array, lengths_N: Array, algorithm: Algorithm) -> Array:
    """Return rewards with the overlong penalty (DAPO, 2503.14476, eq. 13), scaled and clipped.

        r ← r + overlong_factor·clip((overlong_limit − overlong_buffer − L)/overlong_buffer, −1, 0)
        r ← clip((r + reward_bias)·reward_scale, ±reward_clip)

    Takes and returns rewards [N] float32; lengths [N] int32, trained tokens of each trajectory.
    """
    same_shape(rewards_N, lengths_N)
    lib = ops_of(rewards_N).lib
    if algorithm.overlong_buffer:
        excess = lengths_N - (algorithm.overlong_limit - algorithm.overlong_buffer)
        penalty = lib.clip(-excess / algorithm.overlong_buffer, -1.0, 0.0)
        rewards_N = rewards_N + penalty * algorithm.overlong_factor
    scaled = (rewards_N + algorithm.reward_bias) * algorithm.reward_scale
    return lib.clip(scaled, -algorithm.reward_clip, algorithm.reward_clip)


def shares(valid: Array, ids: Array | None) -> Array:
    """Return 1 / valid entries of the same id (ids None: 1), [K] float32; 0 for invalid entries."""
    ops = ops_of(valid)
    counted = ops.float32(valid)
    if ids is None:
        return counted
    index = ops.dense_ranks(ids)
    return counted / ops.lib.clip(_total(counted, index, counted), 1.0, None)


def standardise(
    x: Array, group_ids: Array, valid: Array, *, mean: str, std: str, leave_one_out: bool = False,
    run_ids: Array | None = None,
) -> Array:  # fmt: skip
    """Standardise x over the valid entries of each group, of the batch, or not at all.

        (x − μ) / (σ + 1e-5), or for std=mean (x − μ) / μ (2602.02710), 0 where μ ≤ 1e-5

    σ is the unbiased deviation, 1 for a single entry. A leave-one-out μ is the mean of the other
    runs, 0 where there are none. Equal entries give exactly 0 (two-pass sums).

    Args:
      x: [K] float32. group_ids: [K] int, any values. valid: [K] bool.
      run_ids: [K] int; n entries of one run in a group count 1/n each; None: each entry is a run.
      mean, std: group | batch | none; std also: mean, to divide by μ.

    The result is [K] float32, 0 where not valid.
    """
    same_shape(x, group_ids, valid)
    ops = ops_of(x)
    lib = ops.lib
    x = lib.where(valid, x, 0.0)
    runs = None if run_ids is None else _pairs(group_ids, run_ids)
    weight = shares(valid, runs)
    peers: dict[str, Array | None] = {"batch": None, "none": None, "group": None}
    choose("reward_mean or advantage_mean", mean, peers)
    choose("reward_std or advantage_std", std, {**peers, "mean": None})
    if "group" in (mean, std):
        peers["group"] = ops.dense_ranks(group_ids)
    out = x
    if mean != "none":
        centred, n = _centre(x, peers[mean], weight)
        out = centred
        if leave_one_out:
            run_sum = centred if runs is None else _total(centred, ops.dense_ranks(runs), weight)
            out = lib.where(n > 1, centred + run_sum / lib.clip(n - 1, 1, None), x)
    if std == "mean":
        centre = x - out
        out = lib.where(centre > EPS, out / lib.where(centre > EPS, centre, 1.0), 0.0)
    elif std != "none":
        centred, n = _centre(x, peers[std], weight)
        variance = _mean(centred**2, n, peers[std], weight) * (n / lib.clip(n - 1, 1, None))
        out = out / (lib.where(n > 1, lib.sqrt(variance), 1.0) + EPS)
    return lib.where(valid, out, 0.0)


def _centre(x: Array, index: Array | None, weight: Array) -> tuple[Array, Array]:
    """Return x minus the mean of its index (None: of all), and the index's number of runs, [K]."""
    ops = ops_of(x)
    lib, valid = ops.lib, weight > 0
    n = lib.round(_total(ops.lib.ones_like(x), index, weight))  # three thirds may be less than one
    candidates = lib.where(valid, x, lib.inf)
    if index is None:
        least = candidates.min()
    else:
        least = ops.segment_min(candidates, index, x.shape[0])[index]
    x = x - lib.where(valid, least, 0.0)  # exact zeros where all are equal
    return x - _mean(x, n, index, weight), n


def _mean(x: Array, n: Array, index: Array | None, weight: Array) -> Array:
    """Return the mean of each entry's n peers, [K]; a second pass corrects the rounding."""
    n = ops_of(n).lib.clip(n, 1, None)
    first = _total(x, index, weight) / n
    return first + _total(x - first, index, weight) / n


def _total(x: Array, index: Array | None, weight: Array) -> Array:
    """Return the weighted sum over each entry's peers, [K]."""
    ops = ops_of(x)
    x = ops.lib.where(weight > 0, weight * x, 0.0)
    if index is None:
        return ops.lib.broadcast_to(x.sum(), x.shape)
    return ops.segment_sum(x, index, x.shape[0])[index]


def kl_penalty(flat: Mapping[str, Array], algorithm: Algorithm) -> tuple[Array, Array]:
    """Return KL as a reward of every trained token, and the number of non-finite ones.

        −β·KL(π ‖ π_ref), π the proximal policy where its logprobs are known, else the behaviour's

    The first is [F] float32, 0 where not trained or not finite, the second an int32 scalar.
    UserError if `reference_logprobs` are missing.
    """
    mask = flat["loss_mask"]
    lib = ops_of(mask).lib
    if not algorithm.kl_in_reward:
        return lib.zeros_like(mask, dtype=lib.float32), lib.sum(lib.zeros_like(mask))
    reference = require_reference(flat)
    policy = flat.get("proximal_logprobs", flat["behaviour_logprobs"])
    finite = lib.isfinite(policy - reference)
    coefficient = flat.get("kl_coefficient", algorithm.kl_coefficient)
    penalty = -coefficient * kl.estimate(policy, reference, algorithm.kl_estimator)
    return lib.where(mask & finite, penalty, 0.0), lib.sum(mask & ~finite)


def token_rewards(rewards_N: Array, loss_mask_F: Array, sequence_ids_F: Array) -> Array:
    """Return each trajectory's reward on its last trained token, 0 elsewhere; [F] float32."""
    same_shape(loss_mask_F, sequence_ids_F)
    ops = ops_of(loss_mask_F)
    last = loss_mask_F & ~next_trained(loss_mask_F, sequence_ids_F)[1]
    return ops.lib.where(last, ops.take(rewards_N, sequence_ids_F, 0.0), 0.0)


def gae(
    rewards_F: Array,  # [F] float32
    values_F: Array,  # [F] float32
    loss_mask_F: Array,  # [F] bool
    sequence_ids_F: Array,  # [F] int32
    bootstrap_N: Array,  # [N] float32; V after the end: 0 unless the trajectory was cut short
    algorithm: Algorithm,
) -> Array:
    """Estimate advantages over trained tokens only, generalised (1506.02438).

        δ_t = r_t + gamma·V_t' − V_t
        A_t = δ_t + gamma·lam·A_t', t' the next trained token of the same trajectory

    After the last trained token V is `bootstrap_N` and A is 0. The result is [F] float32, 0 where
    not trained.
    """
    same_shape(rewards_F, values_F, loss_mask_F, sequence_ids_F)
    ops = ops_of(rewards_F)
    lib = ops.lib
    following, has_next = next_trained(loss_mask_F, sequence_ids_F)
    after_end = ops.take(bootstrap_N, sequence_ids_F, 0.0)
    next_values = lib.where(has_next, values_F[following], after_end)
    delta = rewards_F + algorithm.gamma * next_values - values_F
    decay = algorithm.gamma * algorithm.lam * has_next
    # A = b + a·A_next at trained tokens, A = A_next between them; a = 0 after a trajectory's last
    # one cuts the trajectories apart.
    a = lib.where(loss_mask_F, decay, ops.float32(has_next))
    b = lib.where(loss_mask_F, delta, 0.0)
    return lib.where(loss_mask_F, ops.recur(a, b), 0.0)


def gae_advantage(inputs: AdvantageInputs[Array], algorithm: Algorithm) -> Array:
    """Return GAE of the normalised rewards plus the KL penalty.

        r_i = (reward_i − μ) / σ at the last trained token, by reward_mean and reward_std

    The result is [F] float32, 0 where not trained.
    """
    normalised = standardise(
        inputs.rewards, inputs.group_ids, inputs.valid, mean=algorithm.reward_mean,
        std=algorithm.reward_std, leave_one_out=algorithm.leave_one_out, run_ids=inputs.run_ids,
    )  # fmt: skip
    rewards = inputs.kl_rewards + token_rewards(normalised, inputs.mask, inputs.sequence_ids)
    args = inputs.values, inputs.mask, inputs.sequence_ids, inputs.bootstrap
    return gae(rewards, *args, algorithm)


ADVANTAGES = {"gae": gae_advantage}  # by `algorithm.advantage`


def next_trained(loss_mask_F: Array, sequence_ids_F: Array) -> tuple[Array, Array]:
    """Return the index of each token's next trained one in its trajectory; whether it exists."""
    ops, size = ops_of(loss_mask_F), loss_mask_F.shape[0]
    index = ops.lib.where(loss_mask_F, ops.row_index(loss_mask_F)[:, 0], size)
    at_or_after = ops.least_from(index)
    following = ops.lib.concatenate([at_or_after[1:], ops.lib.full_like(index[:1], size)])
    safe = ops.lib.clip(following, None, size - 1)
    return safe, (following < size) & (sequence_ids_F[safe] == sequence_ids_F)


def running_baselines(
    means: Mapping[str, float], groups: Sequence[Group], decay: float
) -> tuple[dict[str, float], list[Group]]:
    """Return the running means after a batch, and its groups with the trajectories' baselines.

        b ← decay·b + (1 − decay)·R, then A = R − b   (RAE, 2506.24119, eq. 4)

    Each agent has its own b, 0 at first, updated by runs in the order of the groups. R is the mean
    reward of a run's trajectories; `means` are those of agents, and decay is in [0, 1).
    """
    after, new_groups = dict(means), []
    for group in groups:
        rewards: dict[tuple[str, str], list[float]] = {}
        for t in group.trajectories:
            rewards.setdefault((t.run_id, t.agent), []).append(t.reward)
        baselines = {}
        for (run, agent), values in rewards.items():
            mean = sum(values) / len(values)
            after[agent] = decay * after.get(agent, 0.0) + (1 - decay) * mean
            baselines[run, agent] = after[agent]
        rows = (replace(t, baseline=baselines[t.run_id, t.agent]) for t in group.trajectories)
        new_groups.append(replace(group, trajectories=tuple(rows)))
    return after, new_groups
