"""Decide which groups form the next batch: live and finished groups as a pure state machine.

Together with `staleness.capacity` it guarantees that no trained token is older than η versions,
in whatever order groups finish, and drops no trajectory.

Terms. The policy of version k trains on batch k = 0, 1, …, so a token of version u may be in
batch k only if k − u ≤ η. Every unconsumed group has a *deadline*: the last batch that may
contain it. It is u + η for a finished group, with u its oldest token's version. It is a + η for a
live one admitted at version a, since its tokens can only be newer. v is the published version, B
the prompts of a batch.

Rule. Batch k may be taken only if afterwards, for every j ≥ k,

    #{unconsumed groups with deadline ≤ j} ≤ (j − k)·B                                   (H)

Then batches k+1 … j have room for everything due by j (Hall's condition for unit jobs with
deadlines). The B finished groups with the earliest deadlines are taken. They minimise the
left-hand side for every j at once, so this choice satisfies (H) if any does.

Invariant. While batch k is the next one, for every j ≥ k,

    D(j) := #{unconsumed groups with deadline ≤ j} ≤ (j − k + 1)·B.                      (I)

* Empty at k = 0: 0 ≤ (j + 1)·B.
* Admission at version v makes a group with deadline d = v + η. Capacity leaves
  accepted + live ≤ (d + 1)·B, of which k·B are consumed, so all unconsumed groups together
  are ≤ (d + 1 − k)·B. D changes only for j ≥ d, where that is ≤ (j − k + 1)·B.
* Finishing replaces a + η by u + η ≥ a + η: D can only fall. Rejecting and failing remove a
  group: D falls. Publishing changes no deadline. A retried prompt is a new admission.
* Taking batch k: (H) is (I) for k + 1, and at j = k it says that nothing due by k is left.

Bound. By the last point nothing unconsumed is ever overdue, so what batch k takes has
deadline ≥ k: lag ≤ η. It is checked again, on the tokens, when the batch is taken.

No deadlock. Suppose nothing is live. With B or more finished groups (I) gives
max(0, D(j) − B) ≤ (j − k)·B, which is (H): the batch is ready. With fewer than B,
accepted + running < (k + 1)·B, so capacity is positive as soon as v + η ≥ k, at the latest
when version k is published. A known last step T only lowers capacity, and not for k < T. While
something is live it ends sooner or later. So the trainer waits only for generation, for slow
groups that are due, or for its own publish.

η = 0. At most B groups are unconsumed, all due at k. A batch is the B accepted groups of the
prompts admitted first: synchronous training in admission order.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from rlx.base import Group
from rlx.rollout.staleness import Limits, StalenessViolation

_group_id = attrgetter("group_id")
Counts = tuple[tuple[int, int], ...]  # (version, groups), ascending versions, groups ≥ 1
# A persistent list, newest first: a buffer shares all but its own last group with the one before.
Chain = tuple[Group, "Chain"] | None


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Unconsumed groups, as a value."""

    live: Counts = ()  # by the version of their admission
    finished: Counts = ()  # by the version of their oldest token
    groups: Mapping[int, Chain] = field(default_factory=dict)  # the finished ones, likewise

    @property
    def num_finished(self) -> int:
        return sum(count for _, count in self.finished)


def admit(buffer: Buffer, version: int, count: int = 1) -> Buffer:
    """Record that `count` prompts start at published version `version`."""
    return Buffer(_add(buffer.live, version, count), buffer.finished, buffer.groups)


def withdraw(buffer: Buffer, version: int) -> Buffer:
    """Record that a live prompt admitted at `version` was rejected or failed."""
    return Buffer(_add(buffer.live, version, -1), buffer.finished, buffer.groups)


def finish(buffer: Buffer, version: int, group: Group) -> Buffer:
    """Record that a live prompt admitted at `version` finished as `group`, without older tokens."""
    oldest = group.oldest_version
    if oldest < 0:  # nothing was sampled, so nothing can be stale
        oldest = version
    if oldest < version:
        raise StalenessViolation(
            f"group {group.group_id} was admitted at version {version}, which every server had "
            f"acknowledged, and has a token of version {oldest}"
        )
    return _put(withdraw(buffer, version), oldest, group)


def repeat_batches(
    known: Mapping[int, Group], order: Iterable[Sequence[int]], step: int, limits: Limits
) -> list[list[Group]]:
    """Return a killed run's batches from `step` on, up to one that cannot be repeated."""
    batches: list[list[Group]] = []
    for at, ids in enumerate(order, step):
        batch = [known[group_id] for group_id in ids if group_id in known]
        lags = [at - group.oldest_version for group in batch if group.oldest_version >= 0]
        complete = len(ids) == len(batch) == limits.batch_prompts
        if not complete or max(lags, default=0) > limits.max_staleness:
            break
        batches.append(batch)
    return batches  # without these groups, (I) holds as it did in the killed run


def restore(groups: Iterable[Group], step: int, limits: Limits) -> tuple[Buffer, list[Group]]:
    """Return a buffer of a killed run's groups, and the groups that do not fit, oldest first."""
    left_over: list[Group] = []  # if η or B became smaller, or versions are still to come
    buffer = Buffer()
    for group in sorted(groups, key=lambda g: (g.oldest_version, g.group_id), reverse=True):
        oldest = group.oldest_version if group.oldest_version >= 0 else step
        newest = max((int(t.versions.max()) for t in group.trajectories), default=-1)
        candidate = _put(buffer, oldest, group)
        if newest <= step and fits(candidate, step, limits):
            buffer = candidate
        else:
            left_over.append(group)
    return buffer, left_over[::-1]


def ready(buffer: Buffer, step: int, limits: Limits) -> bool:
    """Return whether batch `step` can be taken under rule (H)."""
    for counts in (buffer.live, buffer.finished):
        if counts and counts[0][0] + limits.max_staleness < step:
            raise StalenessViolation(
                f"a group of version {counts[0][0]} is still unconsumed at step {step} with "
                f"max_staleness={limits.max_staleness}"
            )
    if buffer.num_finished < limits.batch_prompts:
        return False
    return _feasible(buffer, limits.batch_prompts, step, limits)


def take(buffer: Buffer, step: int, limits: Limits) -> tuple[Buffer, list[Group]]:
    """Remove and return batch `step`: the B finished groups due first, sorted by group_id."""
    if not ready(buffer, step, limits):
        raise StalenessViolation(f"batch {step} was taken before it was ready")
    batch: list[Group] = []
    counts, rest = buffer.finished, dict(buffer.groups)
    for version in sorted(rest):
        if missing := limits.batch_prompts - len(batch):
            due = sorted(_in_order(rest.pop(version)), key=_group_id)
            batch += due[:missing]
            counts = _add(counts, version, -len(due[:missing]))
            for group in due[missing:]:
                rest[version] = group, rest.get(version)
    batch.sort(key=_group_id)
    if limits.max_staleness < math.inf:  # an evaluation takes tokens of any version
        for group in batch:
            _check_lag(group, step, limits)
    return Buffer(buffer.live, counts, rest), batch


def fits(buffer: Buffer, step: int, limits: Limits) -> bool:
    """Return whether invariant (I) holds: every group fits a batch from `step` on."""
    return _feasible(buffer, 0, step - 1, limits)


def groups(buffer: Buffer) -> list[Group]:
    """Return the finished, unconsumed groups, sorted by group_id."""
    return sorted((g for chain in buffer.groups.values() for g in _in_order(chain)), key=_group_id)


def _in_order(chain: Chain) -> Iterator[Group]:
    while chain:
        group, chain = chain
        yield group


def _feasible(buffer: Buffer, count: int, step: int, limits: Limits) -> bool:
    """Return whether (H) holds for `step` once the `count` finished groups due first are gone."""
    # D only jumps at deadlines and the right-hand side grows with j, so the deadlines suffice.
    live, finished = dict(buffer.live), dict(buffer.finished)
    due_live = due_finished = 0
    for version in sorted(live.keys() | finished.keys()):
        due_live += live.get(version, 0)
        due_finished += finished.get(version, 0)
        room = (version + limits.max_staleness - step) * limits.batch_prompts
        if due_live + max(0, due_finished - count) > max(0, room):
            return False
    return True


def _check_lag(group: Group, step: int, limits: Limits) -> None:
    for trajectory in group.trajectories:
        versions = trajectory.versions[trajectory.versions >= 0]
        if versions.size == 0:
            continue
        oldest, newest = int(versions.min()), int(versions.max())
        if step - oldest > limits.max_staleness or newest > step:
            raise StalenessViolation(
                f"trajectory {trajectory.trajectory_id} has tokens of versions {oldest} to "
                f"{newest} in batch {step} with max_staleness={limits.max_staleness}"
            )


def _put(buffer: Buffer, oldest: int, group: Group) -> Buffer:
    groups = {**buffer.groups, oldest: (group, buffer.groups.get(oldest))}
    return Buffer(buffer.live, _add(buffer.finished, oldest, 1), groups)


def _add(counts: Counts, version: int, change: int) -> Counts:
    """Return `counts` with `change` more groups at `version`."""
    table = dict(counts)
    count = table.pop(version, 0) + change
    if count < 0:
        raise StalenessViolation(f"no group of version {version} to remove")
    if count:
        table[version] = count
    return tuple(sorted(table.items()))
