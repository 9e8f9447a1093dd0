"""Keep a running mean of each agent's rewards: a baseline that needs no group.

Role-conditioned advantage estimation (RAE, 2506.24119, eq. 4).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from rlx.base import Group

Means = Mapping[str, float]  # agent → mean, 0 before its first reward


def take_off(
    means: Means, groups: Sequence[Group], decay: float
) -> tuple[dict[str, float], list[Group]]:
    """Return the means after a batch, and its groups with the baselines of their trajectories.

        b ← decay·b + (1 − decay)·R, then A = R − b

    of each agent by itself, run after run in the order of the groups. The rows of one run count
    once, with their mean reward.

    Args:
      decay: in [0, 1).
    """
    after, found = dict(means), []
    for group in groups:
        rewards: dict[tuple[str, str], list[float]] = {}
        for t in group.trajectories:
            rewards.setdefault((t.run_id, t.agent), []).append(t.reward)
        taken = {}
        for (run, agent), values in rewards.items():
            mean = sum(values) / len(values)
            after[agent] = decay * after.get(agent, 0.0) + (1 - decay) * mean
            taken[run, agent] = after[agent]
        rows = (
            dataclasses.replace(t, baseline=taken[t.run_id, t.agent]) for t in group.trajectories
        )
        found.append(dataclasses.replace(group, trajectories=tuple(rows)))
    return after, found
