"""Convert an agent's answers and rewards to trajectories. Pure.

The completions of a run are a forest: a prompt that begins with all tokens of an earlier one
continues it. Rows have one of three forms:

    tree        each completion is trained on once, with its own return; a conversation is one row,
                and a second branch repeats the common beginning untrained
    concat      one row per branch, from its beginning to its end, with the return of the end on
                every completion; a common beginning is trained on in each row
    individual  one row per completion

Rewards propagate along the conversations (`Interaction.after`), even if a chat template rewrites
messages and each turn becomes a row.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rlx.agents.agent_options import EXPORTS
from rlx.agents.sessions import Interaction
from rlx.base import Group, Trajectory, UserError, with_images
from rlx.rollout.control_tokens import plain
from rlx.rollout.workflows import joined


def turn_returns(
    interactions: Sequence[Interaction], value: float | Mapping[str, float], discount: float
) -> list[float]:
    """Return the return R_i of each completion.

        rewards by completion  R_i = r_i + γ·Σ R_c over the completions c that continue i
        a number r             R_i = γ^h·r, h the length of the longest branch after i

    A reward that several choices of one request share counts once for earlier completions.
    """
    rewards = [0.0] * len(interactions)
    if isinstance(value, Mapping):
        rewards = [float(value.get(i.completion_id, 0.0)) for i in interactions]
    returns, heights = list(rewards), [0] * len(interactions)
    for k in reversed(range(len(interactions))):  # parents have smaller numbers
        turn, before = interactions[k], interactions[k].after
        if before is not None:
            returns[before] += discount * (returns[k] - (rewards[k] if turn.choice else 0.0))
            heights[before] = max(heights[before], heights[k] + 1)
    return returns if isinstance(value, Mapping) else [discount**h * float(value) for h in heights]


def delivered(interactions: Sequence[Interaction], value: float | Mapping[str, float]) -> list[int]:
    """Return the numbers of completions that reached the agent."""
    # A resent request means that the latest unused answer to its prompt was lost.
    used = {interactions[k].completion_id for i in interactions for k in (i.after, i.parent)
            if k is not None}  # fmt: skip
    used |= set(value) if isinstance(value, Mapping) else set()
    unused: dict[str, list[str]] = {}  # completion ids, by prompt
    lost: set[str] = set()
    for i in interactions:
        before = unused.setdefault(i.prompt_text, [])
        if i.retry and not i.choice and before:
            lost.add(before.pop())
        if not i.choice and i.completion_id not in used:
            before.append(i.completion_id)
    return [k for k, i in enumerate(interactions) if i.completion_id not in lost]


def _chains(interactions: Sequence[Interaction], chosen: Sequence[int]) -> list[list[int]]:
    """Return branches with each completion once, as they end; first children continue parents."""
    chains: list[list[int]] = []
    for number in chosen:
        chain = next((c for c in chains if c[-1] == interactions[number].parent), None)
        if chain is None:
            chains.append(chain := [])
        chain.append(number)
    return sorted(chains, key=lambda chain: chain[-1])


def _paths(interactions: Sequence[Interaction], chosen: Sequence[int]) -> list[list[int]]:
    """Return the branch from the beginning to each completion without a continuation."""
    paths: list[list[int]] = []
    for number, interaction in enumerate(interactions):
        before = [] if interaction.parent is None else paths[interaction.parent]
        paths.append([*before, number])
    parents = {interaction.parent for interaction in interactions}
    return [paths[number] for number in chosen if number not in parents]


_LINES = dict(zip(EXPORTS, (_chains, _paths, lambda _, chosen: [[k] for k in chosen]), strict=True))


def of_run(
    interactions: Sequence[Interaction],  # of its session, ≥ 1
    value: float | Mapping[str, float],  # for the run, or by completion id; 0 without one
    run_id: str,  # `"{group_id}.{sample}"`; several trajectories append `.0`, `.1`, …
    *,
    agent: str = "",  # name for statistics
    turn_discount: float = 1.0,  # γ of `turn_returns`, in [0, 1]
    export: str = "tree",  # one of EXPORTS, see the top of this file
    seconds: float = 0.0,  # duration of the run
) -> list[Trajectory]:
    """Return the trajectories of one run, in the order of their last completions."""
    chosen = delivered(interactions, value)
    info = {
        **getattr(value, "parts", {}),
        "run_reward": outcome(interactions, value),
        "interactions": float(len(chosen)),
        "lost_answers": float(len(interactions) - len(chosen)),
        "tool_calls": float(sum(i.tool_calls for i in interactions)),
        "latency/run": seconds,
        "latency/call": sum(i.seconds for i in interactions) / len(interactions),
    }
    returns = turn_returns(interactions, value, turn_discount)
    depths: list[int] = []
    for interaction in interactions:
        depths.append(0 if interaction.after is None else depths[interaction.after] + 1)
    trajectories: list[Trajectory] = []
    for line in (lines := _LINES[export](interactions, chosen)):
        rewards = tuple(returns[k] for k in (line[-1:] if export == "concat" else line))
        name = run_id if len(lines) == 1 else f"{run_id}.{len(trajectories)}"
        trajectories.append(_trajectory(
            [interactions[k] for k in line], depths[line[0]], reward=rewards[0], trajectory_id=name,
            agent=agent, info=info, turn_rewards=rewards if len(set(rewards)) > 1 else (),
        ))  # fmt: skip
    return trajectories


def outcome(interactions: Sequence[Interaction], value: float | Mapping[str, float]) -> float:
    """Return a run's reward: its own, or that of its latest rewarded completion."""
    if not isinstance(value, Mapping):
        return float(value)
    rewarded = [i.completion_id for i in interactions if i.completion_id in value]
    return float(value[rewarded[-1]])


def turns(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each completion, after those read since the previous one."""
    steps = np.diff(trajectory.loss_mask.astype(np.int8), prepend=0, append=0)
    parts = np.split(trajectory.tokens, np.flatnonzero(steps))
    pairs = zip(parts[::2], parts[1::2], strict=False)
    return [(prompt.tolist(), completion.tolist()) for prompt, completion in pairs]


def samples(group: Group, count: int) -> list[list[Trajectory]]:
    """Split a group's trajectories by sample; raise UserError unless there are `count`."""
    runs = [list(run) for _, run in groupby(group.trajectories, lambda t: t.run_id)]
    if len(runs) != count:
        problem = f"the workflow returned {len(runs)} samples, not n={count}"
        remedy = 'its trajectory_id must be "{group_id}.{sample}", with .0, .1, … for parts of one'
        raise UserError(f"{problem}; {remedy}")
    return runs


def record(parts: Sequence[Trajectory], tokenizer: Any) -> dict[str, Any]:
    """Return one sample as JSON types; an agent's has `turns`, and the last completion."""
    last = parts[-1]
    fields = {
        "completion": last.completion, "reward": last.run_reward,
        "tokens": sum(part.num_trained for part in parts), "stop_reason": last.stop_reason,
    }  # fmt: skip
    pairs = [turn for part in parts for turn in turns(part)]
    if not last.agent and len(pairs) == 1:
        return fields
    words = tokenizer.decode(pairs[-1][1], skip_special_tokens=True)
    texts = [{"prompt": tokenizer.decode(p), "completion": tokenizer.decode(c)} for p, c in pairs]
    return {**fields, "completion": words, "turns": texts}


def _trajectory(turns: Sequence[Interaction], first: int, **fields: Any) -> Trajectory:
    """Return the trajectory of a branch; `first` is its first turn's number in the conversation."""
    before = [0, *(len(t.prompt_tokens) + len(t.completion.tokens) for t in turns)]
    counts = [0, *(len(t.images) for t in turns)]
    new = [
        (with_images(t.prompt_tokens[length:], t.images[count:]), t.completion)
        for t, length, count in zip(turns, before, counts, strict=False)
    ]
    last, prompt = turns[-1], plain(turns[0].prompt_text)
    if len(turns) == 1:
        return joined(new, first=first, prompt=prompt, completion=last.text, **fields)
    starts = [len(plain(t.prompt_text)) - len(prompt) for t in turns]
    spans = tuple((at, at + len(plain(t.raw))) for at, t in zip(starts, turns, strict=True))
    words = plain(last.full_text)[len(prompt) :]
    return joined(new, first=first, prompt=prompt, completion=words, said=spans, **fields)
