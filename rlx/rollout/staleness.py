"""Decide how many prompts may be admitted: counters and the capacity formula, nothing else.

A pure state machine, `(state, event) → state`, shared by the executor, recovery and the
simulator. It knows numbers, not groups; `buffer.py` knows which groups form a batch, and
its docstring proves that the two together keep every trained token within the bound.
"""

from dataclasses import dataclass, replace


class StalenessViolation(RuntimeError):
    """The staleness rules were broken: always a bug in rlx, never a user's mistake."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers that govern admission.

    Attributes:
      batch_prompts: B ≥ 1, prompts a train batch.
      max_staleness: η ≥ 0, versions; 0 is synchronous training, ∞ an evaluation.
      concurrency: C, live prompts at most; below 1 counts as 1.
      total_steps: T, batches of the whole run; None: as many as are taken.
    """

    batch_prompts: int
    max_staleness: float  # a whole number or math.inf
    concurrency: int
    total_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Staleness:
    """Counters of a run.

    Attributes:
      version: v, the newest version that every live server has acknowledged.
      consumed: batches handed to the trainer so far; v never exceeds it.
      running: live prompts (admitted, not yet accepted, rejected or failed).
      accepted: groups accepted since step 0, consumed ones included.
      rejected, failed: groups filtered out, and attempts that raised.
      skipped: prompts given up, the last of whose attempts is among `failed`.
      admitted: attempts started.
    """

    version: int = 0
    consumed: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    skipped: int = 0
    admitted: int = 0


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
    staleness = _wanted(state.version, limits) - (state.accepted + state.running)
    return int(max(0, min(concurrency, staleness)))


def full(state: Staleness, limits: Limits) -> bool:
    """Return whether everything that may be admitted before the next publish is accepted.

    A trainer that waits for this has batches of exactly min(version, max_staleness) versions of
    lag: each version's prompts finish under it, and wait η batches for their turn.
    """
    return state.accepted >= _wanted(state.consumed, limits)


def admit(state: Staleness, limits: Limits) -> Staleness:
    """Record that a prompt starts at the current version."""
    if capacity(state, limits) < 1:
        raise StalenessViolation(f"admitted a prompt without capacity: {state}, {limits}")
    return replace(state, running=state.running + 1, admitted=state.admitted + 1)


def accept(state: Staleness) -> Staleness:
    """Record that a live prompt finished and its group goes to the buffer."""
    return replace(_leave(state, "accept"), accepted=state.accepted + 1)


def reject(state: Staleness) -> Staleness:
    """Record that a live prompt finished and is filtered out; its place is free again."""
    return replace(_leave(state, "reject"), rejected=state.rejected + 1)


def fail(state: Staleness) -> Staleness:
    """Record that a live prompt's attempt raised; its place is free again."""
    return replace(_leave(state, "fail"), failed=state.failed + 1)


def skip(state: Staleness) -> Staleness:
    """Record that a live prompt's last attempt raised; its place is free for another one."""
    state = fail(state)
    return replace(state, skipped=state.skipped + 1)


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


def _wanted(version: int, limits: Limits) -> float:
    """Return how many groups since step 0 have a batch to go to, with `version` published."""
    horizon = limits.max_staleness + version + 1
    if limits.total_steps is not None:
        horizon = min(horizon, limits.total_steps)
    return horizon * limits.batch_prompts


def _leave(state: Staleness, event: str) -> Staleness:
    if state.running < 1:
        raise StalenessViolation(f"{event} without a live prompt: {state}")
    return replace(state, running=state.running - 1)
