"""The papers' equations in float64 numpy, one trajectory at a time.

Written from the equations, not from the implementation: a batch is a list of `Rollout`s, nothing
is packed, padded, scanned or grouped by anything but a Python loop.
"""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Rollout:
    """One trajectory of L tokens; every array is [L]."""

    mask: np.ndarray
    reward: float
    group: int
    truncated: bool
    target: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    values: np.ndarray
    entropy: np.ndarray
    versions: np.ndarray
    bootstrap: float = 0.0
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def trained(self) -> np.ndarray:
        return np.flatnonzero(self.mask)


def shaped_reward(rollout, a):
    r, length = rollout.reward, len(rollout.trained())
    if a.overlong_buffer:
        r += min(
            -(length - (a.overlong_limit - a.overlong_buffer))
            / a.overlong_buffer
            * a.overlong_factor,
            0.0,
        )
    return min(max((r + a.reward_bias) * a.reward_scale, -a.reward_clip), a.reward_clip)


def standardised(xs, groups, mean, std, leave_one_out=False):
    """xs[i] → (xs[i] − μ)/(σ + 1e-5) with peers by `groups`."""
    out = []
    for i, x in enumerate(xs):
        y = x
        if mean != "none":
            peers = [j for j in range(len(xs)) if mean == "batch" or groups[j] == groups[i]]
            if leave_one_out:
                others = [xs[j] for j in peers if j != i]
                y -= sum(others) / len(others) if others else 0.0
            else:
                y -= sum(xs[j] for j in peers) / len(peers)
        if std != "none":
            peers = [xs[j] for j in range(len(xs)) if std == "batch" or groups[j] == groups[i]]
            sigma = np.std(peers, ddof=1) if len(peers) > 1 else 1.0
            y /= sigma + 1e-5
        out.append(y)
    return out


def kl(logp, ref, estimator):
    d = min(max(logp - ref, -10.0), 10.0)
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def kl_slope(logp, ref, estimator):
    """d kl / d logp, 0 where clamped."""
    d = logp - ref
    if abs(d) > 10:
        return 0.0
    return {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[estimator]


def advantages(batch, a):
    """Advantages and returns of every rollout, lists of [L]; zeros where not trained."""
    rewards = standardised(
        [shaped_reward(r, a) for r in batch],
        [r.group for r in batch],
        a.reward_mean,
        a.reward_std,
        a.leave_one_out,
    )
    advs, returns = [], []
    for rollout, reward in zip(batch, rewards, strict=True):
        adv, ret = np.zeros(len(rollout.mask)), np.zeros(len(rollout.mask))
        following, next_value = 0.0, rollout.bootstrap if rollout.truncated else 0.0
        for k, t in enumerate(reversed(rollout.trained())):
            r = reward if k == 0 else 0.0
            if a.kl_placement == "reward":
                r -= a.kl_coefficient * kl(
                    rollout.proximal[t], rollout.reference[t], a.kl_estimator
                )
            delta = r + a.gamma * next_value - rollout.values[t]
            following = delta + a.gamma * a.lam * following
            next_value = rollout.values[t]
            adv[t], ret[t] = following, following + rollout.values[t]
        advs.append(adv)
        returns.append(ret)
    places = [(i, t) for i, r in enumerate(batch) for t in r.trained()]
    normal = standardised(
        [advs[i][t] for i, t in places],
        [batch[i].group for i, _ in places],
        a.advantage_mean,
        a.advantage_std,
    )
    for (i, t), x in zip(places, normal, strict=True):
        advs[i][t] = x
    return advs, returns


def token_weights(batch, a):
    """The reduction's weight of each trained token, denominator included, lists of [L]."""
    sizes = [len(r.trained()) for r in batch]
    total, alive = sum(sizes), sum(n > 0 for n in sizes)
    prompts = {r.group for r, n in zip(batch, sizes, strict=True) if n}
    out = []
    for rollout, n in zip(batch, sizes, strict=True):
        if n == 0:
            out.append(np.zeros(len(rollout.mask)))
            continue
        same = sum(m for r, m in zip(batch, sizes, strict=True) if r.group == rollout.group)
        weight = {
            "token_mean": 1 / total,
            "sequence_mean_token_mean": 1 / n / alive,
            "sequence_mean_token_sum": 1 / alive,
            "constant": 1 / max(a.constant_length, 1) / alive,
            "prompt_mean": 1 / same / len(prompts),
        }[a.reduction]
        out.append(weight * rollout.mask)
    return out


def anchor(rollout, a, target_version):
    """The proximal logprobs of a rollout, [L]."""
    if a.proximal == "behaviour":
        return rollout.behaviour
    if a.proximal == "recompute":
        return rollout.proximal
    out = np.array(rollout.behaviour)
    for t in rollout.trained():
        age = target_version - rollout.versions[t]
        if age != 0:
            alpha = (math.floor(target_version) - rollout.versions[t]) / age
            alpha = min(max(alpha, 0.0), 1.0)
            out[t] += alpha * (rollout.target[t] - rollout.behaviour[t])
    return out


def behaviour_weights(rollout, proximal, used, a):
    """w of each token after control, [L]."""
    if not a.decoupled:
        return np.ones(len(used))
    log_w = np.where(used, proximal - rollout.behaviour, 0.0)
    w = np.exp(log_w)
    if a.weight_action == "none":
        return w
    stat = {
        "ratio": log_w,
        "k1": log_w,
        "k2": log_w**2 / 2,
        "k3": w - 1 - log_w,
    }[a.weight_statistic]
    if a.weight_level == "sequence":
        if not used.any():
            return w
        how = {"mean": np.mean, "sum": np.sum, "max": np.max}[a.weight_aggregate]
        stat = np.full(len(used), how(stat[used]))
    if a.weight_statistic == "ratio":
        stat = np.exp(stat)
    for t in range(len(w)):
        bound = min(max(stat[t], a.weight_lower), a.weight_upper)
        if bound != stat[t]:
            w[t] *= 0.0 if a.weight_action == "mask" else bound / stat[t]
    return w


def finite(logp, other):
    """Whether the log-ratio and the ratio are finite, as float32 counts it."""
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = np.float32(logp - other)
        return np.isfinite(log_ratio) & np.isfinite(np.exp(log_ratio))


def loss_and_gradient(batch, a, target_version=0.0, weights=None):
    """The minibatch's loss, its gradient by target and by entropy, and Σ|terms| for tolerances."""
    loss, scale, by_target, by_entropy = 0.0, 0.0, [], []
    for rollout, weight in zip(batch, weights or token_weights(batch, a), strict=True):
        proximal = anchor(rollout, a, target_version)
        used = rollout.mask & finite(rollout.target, proximal)
        used &= finite(proximal, rollout.behaviour)
        w = behaviour_weights(rollout, proximal, used, a)
        slope_t, slope_e = np.zeros(len(used)), np.zeros(len(used))
        for t in np.flatnonzero(used):
            adv = rollout.advantages[t]
            u = math.exp(rollout.target[t] - proximal[t])
            inside = min(max(u, 1 - a.clip_low), 1 + a.clip_high)
            value, slope = -u * adv, -u * adv  # d e^x = e^x dx
            if -inside * adv > value:
                value, slope = -inside * adv, 0.0
            if a.dual_clip and adv < 0 and -a.dual_clip * adv < value:
                value, slope = -a.dual_clip * adv, 0.0
            terms = [w[t] * value, -a.entropy_coefficient * rollout.entropy[t]]
            slope *= w[t]
            if a.kl_placement == "loss":
                terms.append(
                    a.kl_coefficient * kl(rollout.target[t], rollout.reference[t], a.kl_estimator)
                )
                slope += a.kl_coefficient * kl_slope(
                    rollout.target[t], rollout.reference[t], a.kl_estimator
                )
            loss += weight[t] * sum(terms)
            scale += weight[t] * sum(abs(x) for x in terms)
            slope_t[t] = weight[t] * slope
            slope_e[t] = -weight[t] * a.entropy_coefficient
        by_target.append(slope_t)
        by_entropy.append(slope_e)
    return loss, by_target, by_entropy, scale
