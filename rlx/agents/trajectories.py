"""Makes trajectories of what an agent was answered and of its rewards. Pure.

A conversation is a chain: each prompt begins with all the tokens before it, sampled ones included.
A number is the reward of the whole run: one trajectory a chain, its observations masked off. With
rewards by completion each completion is a trajectory of its own (AReaL's individual export), so
that its reward lands on its own tokens.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from rlx.agents.sessions import Interaction
from rlx.base import Group, Trajectory, UserError
from rlx.rollout.workflows import joined


def chains(interactions: Sequence[Interaction]) -> list[list[int]]:
    """Return the conversations of a run, as numbers of its interactions in order.

    Where two go on from the same place, the first has the common beginning and the second
    begins anew, so that every completion is in one chain.
    """
    found: list[list[int]] = []
    for number, interaction in enumerate(interactions):
        chain = next((c for c in found if c[-1] == interaction.parent), None)
        if chain is None:
            found.append([number])
        else:
            chain.append(number)
    return found


def of_run(
    interactions: Sequence[Interaction],
    value: float | Mapping[str, float],
    run_id: str,
    *,
    agent: str = "",
    turn_discount: float = 1.0,
    individual: bool = False,
) -> list[Trajectory]:
    """Return the trajectories of one run.

    Args:
      interactions: of its session, ≥ 1.
      value: a reward for the run, or rewards by completion id; completions without one get 0.
      run_id: `"{group_id}.{sample}"`; the only trajectory's id, several have it with `.0`, `.1`, ….
      agent: a name for statistics.
      turn_discount: γ, in [0, 1], of R_i = r_i + γ·R_{i+1} along a conversation, for rewards by
        completion.
      individual: make one trajectory per completion for a number too, which is then the r of the
        last one.

    Returns:
      In the order of the conversations; `info["run_reward"]` is `outcome(…)` in each.
    """
    info = {
        "run_reward": outcome(interactions, value),
        "interactions": float(len(interactions)),
        "tool_calls": float(sum(i.tool_calls for i in interactions)),
    }
    every: list[tuple[list[Interaction], int, float]] = []  # turns, number of the first, reward
    for chain in chains(interactions):
        turns = [interactions[k] for k in chain]
        if isinstance(value, Mapping) or individual:
            rewards = _returns(turns, value, turn_discount)
            every += [([turn], k, rewards[k]) for k, turn in enumerate(turns)]
        else:
            every.append((turns, 0, float(value)))
    several = len(every) > 1
    return [
        _trajectory(
            turns, first, reward, f"{run_id}.{k}" if several else run_id, agent=agent, info=info
        )
        for k, (turns, first, reward) in enumerate(every)
    ]


def outcome(interactions: Sequence[Interaction], value: float | Mapping[str, float]) -> float:
    """Return one number for a run: its reward, or that of the latest rewarded completion."""
    if not isinstance(value, Mapping):
        return float(value)
    return next(
        float(value[i.completion_id]) for i in reversed(interactions) if i.completion_id in value
    )


class Turn(NamedTuple):
    """A completion and what came before it since the last one; token ids."""

    prompt: list[int]
    completion: list[int]


def turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of a trajectory, for a transcript."""
    steps = np.diff(trajectory.loss_mask.astype(np.int8), prepend=0, append=0)
    edges, out, before = np.flatnonzero(steps), [], 0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        tokens = trajectory.tokens
        out.append(Turn(tokens[before:begin].tolist(), tokens[begin:end].tolist()))
        before = end
    return out


def samples(group: Group, count: int) -> list[list[Trajectory]]:
    """Return the trajectories of each of `count` samples, by their ids `"{group_id}.{sample}"`.

    Raises:
      UserError: the workflow gave another number of samples.
    """
    found = [list(own) for _, own in groupby(group.trajectories, _sample_of)]
    if len(found) != count:
        raise UserError(
            f"the workflow gave {len(found)} samples where n={count} were asked for; its "
            'trajectory_id must be "{group_id}.{sample}", with .0, .1, … for parts of one'
        )
    return found


def record(parts: Sequence[Trajectory], tokenizer: Any) -> dict[str, Any]:
    """Return one sample for a file of samples; an agent's has `turns`, as the model saw them.

    The completion is the last turn's. The reward of a run that gave its completions rewards is
    that of the latest one that has one (`outcome`).
    """
    last = parts[-1]
    found = {
        "completion": last.completion,
        "reward": last.info.get("run_reward", last.reward),
        "tokens": sum(part.num_trained for part in parts),
        "stop_reason": last.stop_reason,
    }
    own = [turn for part in parts for turn in turns(part)]
    if not last.agent and len(own) == 1:
        return found
    words = tokenizer.decode(own[-1].completion, skip_special_tokens=True)
    texts = [
        {"prompt": tokenizer.decode(t.prompt), "completion": tokenizer.decode(t.completion)}
        for t in own
    ]
    return {**found, "completion": words, "turns": texts}


def _sample_of(trajectory: Trajectory) -> tuple[str, ...]:
    return tuple(trajectory.trajectory_id.split(".")[:2])


def _returns(
    turns: Sequence[Interaction], value: float | Mapping[str, float], discount: float
) -> list[float]:
    if isinstance(value, Mapping):
        rewards = [float(value.get(turn.completion_id, 0.0)) for turn in turns]
    else:
        rewards = [0.0] * (len(turns) - 1) + [float(value)]
    for k in reversed(range(len(turns) - 1)):
        rewards[k] += discount * rewards[k + 1]
    return rewards


def _trajectory(
    turns: Sequence[Interaction],
    first: int,
    reward: float,
    trajectory_id: str,
    *,
    agent: str,
    info: Mapping[str, float],
) -> Trajectory:
    """Return one sequence; `first` is the number of its first turn in its conversation."""
    before = [0, *(len(t.prompt_tokens) + len(t.completion.tokens) for t in turns)]
    new = [
        (t.prompt_tokens[length:], t.completion) for t, length in zip(turns, before, strict=False)
    ]
    last, begun = turns[-1], turns[0].prompt_text
    return joined(
        new,
        reward,
        trajectory_id,
        first,
        agent=agent,
        prompt=begun,
        completion=last.text if len(turns) == 1 else last.whole[len(begun) :],
        info=info,
    )
