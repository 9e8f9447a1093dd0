"""The papers' equations in float64 numpy, one trajectory at a time.

Written from the equations, not from the implementation: a batch is a list of `Rollout`s, nothing
is packed, padded, scanned or grouped by anything but a Python loop.
"""

import math
from dataclasses import dataclass, field, replace

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
    agent: int = 0
    turns: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))
    current_values: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def trained(self) -> np.ndarray:
        return np.flatnonzero(self.mask)


def shaped_reward(rollout, a):
    r, length = rollout.reward, len(rollout.trained())
    if a.overlong_buffer:
        safe = a.overlong_limit - a.overlong_buffer
        if length > a.overlong_limit:
            r -= a.overlong_factor
        elif length > safe:
            r += (safe - length) / a.overlong_buffer * a.overlong_factor
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
        if std == "mean":  # MaxRL: what was taken off divides
            out.append(y / (x - y) if x - y > 1e-5 else 0.0)
            continue
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


def peers(rollout, a, turn):
    """The name of the circle in which a rollout, or one of its tokens, is compared."""
    return {
        "prompt": (rollout.group,),
        "agent": (rollout.group, rollout.agent),
        "turn": (rollout.group, turn),
    }[a.peers]


def last_turn(rollout):
    trained = rollout.trained()
    return rollout.turns[trained[-1]] if len(trained) and len(rollout.turns) else 0


def advantages(batch, a):
    """Advantages and returns of every rollout, lists of [L]; zeros where not trained."""
    rewards = standardised(
        [shaped_reward(r, a) for r in batch],
        [peers(r, a, last_turn(r)) for r in batch],
        a.reward_mean,
        a.reward_std,
        a.leave_one_out,
    )
    advs, returns = [], []
    for rollout, reward in zip(batch, rewards, strict=True):
        adv, ret = np.zeros(len(rollout.mask)), np.zeros(len(rollout.mask))
        bootstraps = a.bootstrap_truncated and rollout.truncated
        following, next_value = 0.0, rollout.bootstrap if bootstraps else 0.0
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
        [peers(batch[i], a, batch[i].turns[t] if len(batch[i].turns) else 0) for i, t in places],
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


def without_overlong(batch):
    """The batch with no token of a truncated rollout trained on."""
    return [replace(r, mask=r.mask & (not r.truncated)) for r in batch]


def within_second_moment(batch, limit):
    """The masks of M2PO: the farthest token goes, one at a time, until the mean square is low."""
    far = {(i, t): (r.behaviour[t] - r.proximal[t]) ** 2
           for i, r in enumerate(batch) for t in r.trained()}  # fmt: skip
    while far and sum(far.values()) / len(far) >= limit:
        del far[max(far, key=far.get)]
    return [np.array([(i, t) in far for t in range(len(r.mask))]) for i, r in enumerate(batch)]


def second_moment_bound(batch, limit):
    """M2PO's τ: the largest cap of the squares of tokens that move away, with a low enough mean."""
    squares = []
    for r in batch:
        for t in r.trained():
            delta = r.proximal[t] - r.behaviour[t]
            if (r.advantages[t] > 0 and delta > 0) or (r.advantages[t] < 0 and delta < 0):
                squares.append(delta**2)
    if sum(squares) <= limit * len(squares):
        return math.inf
    low = [s for s in squares if sum(min(s, x) for x in squares) <= limit * len(squares)]
    return math.sqrt(max(low, default=0.0))


def anchor(rollout, a, target_version):
    """The proximal logprobs of a rollout, [L]."""
    if a.loss in ("reinforce", "dppo"):
        return rollout.target
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


def behaviour_weights(log_w, used, a):
    """w of each token after control, [L], from log(proximal / behaviour)."""
    if not a.decoupled:
        return np.ones(len(used))
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
        if a.weight_action == "mask":
            w[t] *= bound == stat[t]
        elif a.weight_level == "sequence" and a.weight_aggregate != "max":
            w[t] = bound  # one weight for the whole sequence
        else:
            w[t] *= bound / stat[t]
    return w


def finite(logp, other):
    """Whether the log-ratio and the ratio are finite, as float32 counts it."""
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = np.float32(logp - other)
        return np.isfinite(log_ratio) & np.isfinite(np.exp(log_ratio))


def surrogate(u, adv, a):
    """ℓ and dℓ/d(log u) of one token by its ratio."""
    if a.loss == "sapo":
        tau = a.sapo_positive if adv > 0 else a.sapo_negative
        gate = 1 / (1 + math.exp(-tau * (u - 1)))
        return -adv * 4 / tau * gate, -adv * 4 * gate * (1 - gate) * u
    inside = min(max(u, 1 - a.clip_low), 1 + a.clip_high)
    value, slope = -u * adv, -u * adv  # d e^x = e^x dx
    if -inside * adv > value:
        value, slope = -inside * adv, 0.0
    if a.dual_clip and adv < 0 and -a.dual_clip * adv < value:
        value, slope = -a.dual_clip * adv, 0.0
    return value, slope


def outside(target, behaviour, adv, a):
    """Whether DPPO's token has left its trust region, in the direction in which A pushes it."""
    new, old = (math.exp(min(x, -1e-6)) for x in (target, behaviour))
    far = abs(new - old)
    if a.divergence == "kl":
        far = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    if adv > 0:
        return target > behaviour and far > a.clip_high
    return adv < 0 and target < behaviour and far > a.clip_low


def geometric_mean(log_u, used, adv, a):
    """GMPO's ratio of a sequence, and the tokens that are not clipped."""
    low = math.log(1 - a.clip_low) if a.clip_low < 1 else -math.inf
    high = math.log(1 + a.clip_high)
    held = np.where(adv > 0, np.minimum(log_u, high), np.maximum(log_u, low))
    return math.exp(held[used].mean()) if used.any() else 1.0, used & (held == log_u)


def staying(rollout, proximal, used, a):
    """1 for the tokens whose sequence is not masked as a whole, [L]."""
    if not used.any():
        return np.ones(len(used))
    ratios = np.exp(proximal[used] - rollout.behaviour[used])
    mean = np.prod(ratios ** (1 / used.sum()))
    if not a.sequence_lower <= mean <= a.sequence_upper or min(ratios) < a.veto:
        return np.zeros(len(used))
    drift = np.mean(rollout.behaviour[used] - rollout.target[used])
    far = a.off_policy_limit > 0 and drift > a.off_policy_limit
    return np.where(far & (rollout.advantages < 0), 0.0, 1.0)


def policy_terms(rollout, weight, a, target_version):
    """Σ weight·w·ℓ over one rollout, its gradient by target [L], Σ|terms|, tokens used, w·u [L]."""
    proximal = anchor(rollout, a, target_version)
    used = rollout.mask & finite(rollout.target, proximal)
    used &= finite(proximal, rollout.behaviour)
    log_u = np.where(used, rollout.target - proximal, 0.0)
    log_w = np.where(used, proximal - rollout.behaviour, 0.0)
    sequence = a.ratio_level == "sequence"
    if a.ratio_level != "token" and used.any():  # (Π ratios)^(1/n), of either ratio
        log_u, log_w = (np.where(used, x[used].mean(), 0.0) for x in (log_u, log_w))
    w = behaviour_weights(log_w, used, a) * staying(rollout, proximal, used, a)
    loss, scale, slopes = 0.0, 0.0, np.zeros(len(used))
    together, free = geometric_mean(log_u, used, rollout.advantages, a)
    for t in np.flatnonzero(used):
        adv = rollout.advantages[t]
        if a.loss in ("reinforce", "dppo", "cispo"):
            factor = 1.0
            if a.loss == "cispo":
                factor = min(max(math.exp(log_u[t]), 1 - a.clip_low), 1 + a.clip_high)
            if a.loss == "dppo":
                factor = 1.0 - outside(rollout.target[t], rollout.behaviour[t], adv, a)
            value, slope = -adv * factor * rollout.target[t], -adv * factor
        elif a.loss == "gmpo":
            value = slope = -adv * together
        else:
            value, slope = surrogate(math.exp(log_u[t]), adv, a)
        loss += weight[t] * w[t] * value
        scale += abs(weight[t] * w[t] * value)
        if a.loss == "gmpo":
            slopes[free] += weight[t] * w[t] * slope / used.sum()
        elif sequence and a.loss not in ("reinforce", "dppo", "cispo"):
            # every token of the sequence moves its ratio
            slopes[used] += weight[t] * w[t] * slope / used.sum()
        else:
            slopes[t] += weight[t] * w[t] * slope
    return loss, slopes, scale, used, w * np.exp(log_u)


def loss_and_gradient(batch, a, target_version=0.0, weights=None, at=None):
    """The minibatch's loss, its gradient by target and by entropy, and Σ|terms| for tolerances.

    `at` is the batch from which the KL's weights w·u are taken, which have no gradient: itself.
    """
    loss, scale, by_target, by_entropy = 0.0, 0.0, [], []
    for rollout, where, weight in zip(
        batch, at or batch, weights or token_weights(batch, a), strict=True
    ):
        value, slope_t, size, used, _ = policy_terms(rollout, weight, a, target_version)
        drawn = policy_terms(where, weight, a, target_version)[-1]
        slope_e = np.where(used, -weight * a.entropy_coefficient, 0.0)
        loss, scale = loss + value, scale + size
        for t in np.flatnonzero(used):
            terms = [-a.entropy_coefficient * rollout.entropy[t]]
            if a.kl_placement == "loss":
                pair = rollout.target[t], rollout.reference[t], a.kl_estimator
                beta = a.kl_coefficient * drawn[t]
                terms.append(beta * kl(*pair))
                slope_t[t] += weight[t] * beta * kl_slope(*pair)
            loss += weight[t] * sum(terms)
            scale += weight[t] * sum(abs(x) for x in terms)
        by_target.append(slope_t)
        by_entropy.append(slope_e)
    return loss, by_target, by_entropy, scale


def value_loss_and_gradient(batch, a, total=None):
    """Mean over trained tokens of ½·max((V − R)², (clip(V, V_b ± ε_v) − R)²), gradient by V."""
    total = max(total or sum(len(r.trained()) for r in batch), 1)
    loss, gradients = 0.0, []
    for r in batch:
        slope = np.zeros(len(r.mask))
        for t in r.trained():
            v, before, target = r.current_values[t], r.values[t], r.returns[t]
            square, slope[t] = (v - target) ** 2, 2 * (v - target)
            if a.value_clip:
                held = min(max(v, before - a.value_clip), before + a.value_clip)
                if (held - target) ** 2 > square:  # v is out of its bounds: the clip is flat
                    square, slope[t] = (held - target) ** 2, 0.0
            loss += square / 2 / total
            slope[t] /= 2 * total
        gradients.append(slope)
    return loss, gradients


def nll_and_gradient(batch, a):
    """−Σ weight·log π with the reduction's weights, and its gradient."""
    weights = token_weights(batch, a)
    loss = sum(-(w * r.target)[r.mask].sum() for w, r in zip(weights, batch, strict=True))
    scale = sum(np.abs(w * r.target)[r.mask].sum() for w, r in zip(weights, batch, strict=True))
    return loss, [-w for w in weights], scale


def pairs_and_gradient(batch, a):
    """Mean loss of pairs (batch[0] against batch[1], …), gradient by target (or by score)."""
    losses, gradients, margins = [], [], []
    count = sum(1 for r in batch[::2] if r.mask.any())
    for chosen, rejected in zip(batch[::2], batch[1::2], strict=True):
        side, slopes = [], []
        for r in (chosen, rejected):
            trained, slope = r.trained(), np.zeros(len(r.mask))
            if a.loss == "bradley_terry":  # the score after the last token
                side.append(r.target[trained[-1]])
                slope[trained[-1]] = 1.0
            else:
                x = [r.target[t] - r.reference[t] for t in trained]
                side.append(math.fsum(x) / (len(trained) if a.loss == "ipo" else 1))
                slope[trained] = 1 / len(trained) if a.loss == "ipo" else 1.0
            slopes.append(slope)
        z = side[0] - side[1]
        if a.loss == "ipo":
            losses.append((z - 1 / (2 * a.pair_beta)) ** 2)
            dz = 2 * (z - 1 / (2 * a.pair_beta))
        else:
            beta = 1.0 if a.loss == "bradley_terry" else a.pair_beta
            losses.append(math.log1p(math.exp(-abs(beta * z))) + max(-beta * z, 0.0))
            dz = -beta / (1 + math.exp(beta * z))
        margins.append(z)
        gradients += [dz / count * slopes[0], -dz / count * slopes[1]]
    return sum(losses) / max(count, 1), gradients, margins
