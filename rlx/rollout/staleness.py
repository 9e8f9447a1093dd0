"""Decide how many prompts may be admitted: counters and the capacity formula, nothing else.

A pure state machine, `(state, event) → state`. `buffer.py` decides which groups form a batch, and
proves that the two keep every trained token within the bound.
"""

from dataclasses import dataclass, replace


class StalenessViolation(RuntimeError):
    """The staleness rules were broken: always a bug in rlx, never a user's mistake."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers that govern admission."""

    batch_prompts: int  # B ≥ 1, prompts per train batch
    max_staleness: float  # η, an integer ≥ 0 (0: synchronous), or ∞ in an evaluation
    concurrency: int  # C, most live prompts; below 1 counts as 1
    total_steps: int | None = None  # T, batches of the whole run; None: no limit
    samples: int = 0  # n, answers to a prompt, if C follows waiting times; 0: C stays as it is


@dataclass(frozen=True, slots=True)
class Staleness:
    """Counters of a run, since step 0."""

    version: int = 0  # v, the newest version that every live server has acknowledged
    consumed: int = 0  # batches given to the trainer; never below v
    running: int = 0  # live prompts: admitted, and not yet accepted, rejected or failed
    accepted: int = 0  # groups, consumed ones included
    rejected: int = 0  # groups filtered out
    failed: int = 0  # attempts that raised
    skipped: int = 0  # prompts given up, whose last attempts also count as failed
    admitted: int = 0  # attempts started


def resume(version: int, buffered: int, limits: Limits) -> Staleness:
    """Return the state after a restart at `version`, with `buffered` finished groups restored."""
    accepted = version * limits.batch_prompts + buffered
    return Staleness(version=version, consumed=version, accepted=accepted, admitted=accepted)


def capacity(state: Staleness, limits: Limits) -> int:
    """Return how many prompts may be admitted now.

        min(max(1, C) − running, min(η + v + 1, T)·B − (accepted + running)), at least 0

    Equivalently the N-th prompt (N from 1, counting those accepted or live) may start when
    ⌊(N − 1)/B⌋ ≤ min(v + η, T − 1). Source: AReaL (arXiv:2505.24298), eq. 3, counting accepted
    groups instead of attempts so that filtering cannot let the lag grow, and none beyond the last
    batch.
    """
    concurrency = max(1, limits.concurrency) - state.running
    staleness = _groups_due(state.version, limits) - (state.accepted + state.running)
    return int(max(0, min(concurrency, staleness)))


def full(state: Staleness, limits: Limits) -> bool:
    """Return whether everything that may be admitted before the next publish is accepted.

    A trainer that waits for this has batches that are exactly min(version, max_staleness) versions
    old.
    """
    return state.accepted >= _groups_due(state.consumed, limits)


def admit(state: Staleness, limits: Limits, count: int = 1) -> Staleness:
    """Record that `count` prompts start at the current version."""
    if capacity(state, limits) < count:
        raise StalenessViolation(f"admitted {count} without capacity: {state}, {limits}")
    return replace(state, running=state.running + count, admitted=state.admitted + count)


def end(state: Staleness, outcome: str) -> Staleness:
    """Record the outcome of a live prompt's attempt: accepted, rejected, failed or skipped."""
    if state.running < 1:
        raise StalenessViolation(f"{outcome} without a live prompt: {state}")
    counts = {"failed": state.failed + 1} if outcome == "skipped" else {}
    counts[outcome] = getattr(state, outcome) + 1
    return replace(state, running=state.running - 1, **counts)


def publish(state: Staleness, version: int) -> Staleness:
    """Record that every live server has acknowledged `version`."""
    if not state.version <= version <= state.consumed:
        raise StalenessViolation(
            f"published version {version}; it must be between the last one ({state.version}) and "
            f"the number of batches taken ({state.consumed})"
        )
    return replace(state, version=version)


def consume(state: Staleness, limits: Limits) -> Staleness:
    """Record that the trainer takes one batch out of the buffer."""
    buffered = state.accepted - state.consumed * limits.batch_prompts
    if buffered < limits.batch_prompts:
        raise StalenessViolation(f"took a batch with {buffered} groups buffered: {state}")
    return replace(state, consumed=state.consumed + 1)


def _groups_due(version: int, limits: Limits) -> float:
    """Return how many groups since step 0 have a batch to go to, with `version` published."""
    horizon = limits.max_staleness + version + 1
    if limits.total_steps is not None:
        horizon = min(horizon, limits.total_steps)
    return horizon * limits.batch_prompts
