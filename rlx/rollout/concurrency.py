"""Decide how many prompts are live at one time where `rollout.max_concurrent_rollouts` is auto.

    a queue stands at the servers               ─▶ fewer
    none does, and the trainer waits for a batch ─▶ more

A pure state machine, `(limits, observation) → limits`. A queue stands if it never empties: what
waits in it keeps no slot busy that would be idle otherwise. So fewer prompts cost no time. They
leave the servers' slots to others, their caches in memory, and attempts the time of their limit.
Source of the idea: CoDel (RFC 8289), which also judges a queue by its minimum in an interval.

Steps are an eighth of C, and a queue of up to a quarter changes nothing. So a step up, which makes
the queue longer by an eighth at most, causes no step down. `staleness.capacity` stays the bound.
"""

from dataclasses import dataclass, replace

from rlx.rollout.staleness import Limits

WAITED = 0.02  # share of a step that a trainer waits before more prompts are tried


@dataclass(frozen=True, slots=True)
class Observation:
    """A step of a run, for this decision."""

    waited: float  # share of the step in which the trainer waited for a batch, in [0, 1]
    queued: int  # fewest answers that waited at the servers at any moment; −1: unknown
    running: int  # live prompts at its end


def tunable_limits(limits: Limits, samples: int) -> Limits:
    """Return limits that `follow` may change; they begin at what max_staleness admits."""
    return replace(limits, concurrency=_most(limits), samples=samples)


def follow(limits: Limits, observation: Observation) -> Limits:
    """Return the limits after a step; unchanged if these are fixed.

        C − max(1, C/8)   if queued > n·max(1, C/4), and no more than C prompts are live
        C + max(1, C/8)   if queued = 0 and the trainer waited

    in [1, (η + 1)·B], with n answers to a prompt.
    """
    now, change = limits.concurrency, max(1, limits.concurrency // 8)
    if not limits.samples:
        return limits
    if observation.queued > limits.samples * max(1, now // 4):
        # Above C, a lower one has not taken effect yet: no prompt has started since.
        now -= change * (observation.running <= now)
    elif observation.queued == 0 and observation.waited > WAITED:
        now += change
    return replace(limits, concurrency=max(1, min(now, _most(limits))))


def resumed_limits(limits: Limits, concurrency: int) -> Limits:
    """Return the limits with the number that a stopped run had, unless they are fixed."""
    return follow(replace(limits, concurrency=concurrency), Observation(0.0, -1, 0))


def _most(limits: Limits) -> int:
    return int((limits.max_staleness + 1) * limits.batch_prompts)
